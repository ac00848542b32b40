"""`gtpo export`: writes the policy of a run as a Hugging Face folder with a model card."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.config import AlgorithmSection, Config, flatten, resolved_dict
from gtpo_jax.data.chat import Chat, load_chat
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.logs.text import visible
from gtpo_jax.models import save, save_adapter
from gtpo_jax.models.hf.folder import is_hf_folder
from gtpo_jax.models.lora import combine
from gtpo_jax.rollout.policies import open_policy
from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.runtime.files import read_json
from gtpo_jax.tinker.models import ServedBase
from gtpo_jax.tinker.saved_weights import ABOUT, read_saved

ADAPTER = "adapter_config.json"
HUB_NAME = r"[\w.-]+/[\w.-]+"
PACKAGES = ("gtpo_jax", "jax", "flax", "optax", "transformers")
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
CARD_METRICS = (
  "reward/mean",
  "reward/accuracy",
  "entropy/mean",
  "length/mean",
  "loss",
  "grad_norm",
)


def export_policy(
  workdir: Path,
  out: Path,
  command: str,
  step: int | None = None,
  dtype: str | None = None,
  adapter: bool = False,
) -> str:
  """Writes the policy of a checkpoint to the folder `out`.

  Args:
    workdir: the workdir of a run, or adapters that a client of `gtpo tinker` has saved.
    out: the folder to write; it must be empty or not exist.
    command: the command line of this export, for the model card.
    step: the step of the checkpoint; None for the newest, 0 for the base model.
    dtype: "float32", "bfloat16" or "float16"; None for the dtype of the run's parameters.
    adapter: whether to write only the adapters, as a PEFT folder.

  Returns:
    A one-line summary for the user.

  Raises:
    UserError: `workdir` is a Hugging Face folder, there is no such checkpoint, `out` is not empty,
      or `adapter` is True and the run has no adapters or started from random weights.
  """
  if (workdir / ABOUT).exists() and (workdir / ADAPTER).exists():
    return _export_saved(workdir, out, dtype)
  if is_hf_folder(workdir):
    raise UserError(
      f"{str(workdir)!r} is already a Hugging Face folder; "
      f"--workdir must be the workdir of a `gtpo train` run"
    )
  worker, config, params, step = open_policy(workdir, step)
  base = base_model(config.model.path)
  small = not adapter and has_small_tokenizer(worker.chat)
  rows = read_jsonl(workdir / "metrics.jsonl")
  card = {"README.md": model_card(config, step, rows, command, base, adapter, small)}
  if adapter:
    if not base:
      raise UserError(
        "adapters can only be exported if others can load the base model, "
        "but this run started from random weights (model.path is empty)"
      )
    save_adapter(worker.model, params, out, base, card, worker.model_folder)
  else:
    save(
      worker.model,
      params,
      worker.chat.tokenizer,
      out,
      dtype=dtype,
      stop=worker.chat.stop,
      source=worker.model_folder,
      files=card,
    )
  content = "adapters" if adapter else dtype or config.model.param_dtype
  return f"step {step} of {workdir} -> {out} ({content})"


def create_on_hub(name: str) -> None:
  """Creates a private model on the hub, unless it exists already."""
  from huggingface_hub import HfApi

  if not re.fullmatch(HUB_NAME, name):
    raise UserError(f"--push needs OWNER/NAME, got {name!r}")
  try:
    HfApi().create_repo(name, private=True, exist_ok=True)
  except Exception as error:  # from the hub or the network library
    raise UserError(
      f"--push={name}: the hub refused it ({first_line(error)[:160]}); run `hf auth login`, or set "
      "HF_TOKEN to a token that may write"
    ) from error


def upload(folder: Path, name: str) -> str:
  """Uploads an exported folder to a model of the hub; returns a line that says where it is."""
  from huggingface_hub import HfApi

  try:
    commit = HfApi().upload_folder(
      repo_id=name, folder_path=folder, commit_message="Export of gtpo_jax"
    )
  except Exception as error:  # from the hub or the network library
    raise RunError(
      f"--push={name}: the upload failed ({first_line(error)[:160]}); {str(folder)!r} is complete, "
      f"upload it with: hf upload {name} {folder}"
    ) from error
  return f"pushed to {commit.repo_url}"


def _export_saved(folder: Path, out: Path, dtype: str | None) -> str:
  """Writes the adapters in a folder of `gtpo tinker`, merged into their base model."""
  saved = read_saved(folder, expired=True)
  if saved is None:
    raise UserError(f"{str(folder / ABOUT)!r} is damaged; export other weights")
  source = str(read_json(folder, ADAPTER)["base_model_name_or_path"])
  worker, _, params, _ = open_policy(Path(source), None)
  base = ServedBase(source, worker, params, source)
  spec = saved.about.spec
  model = base.model(spec)
  save(
    model,
    combine(base.read(spec, saved), params),
    worker.chat.tokenizer,
    out,
    dtype=dtype,
    stop=worker.chat.stop,
    source=worker.model_folder,
  )
  return f"adapters in {folder} and {source} -> {out} ({dtype or model.config.param_dtype})"


def base_model(path: str) -> str:
  """Returns a name of the base model that does not depend on the working directory.

  A folder's path becomes absolute; a hub id or an empty path is returned unchanged.
  """
  return os.path.abspath(path) if path and os.path.isdir(path) else path


def has_small_tokenizer(chat: Chat) -> bool:
  """Whether the tokenizer is the small one of this package, which llama.cpp does not know.

  Its converter identifies a BPE tokenizer by a hash of the token ids of a test string. It rejects
  every tokenizer whose hash is not in its table, whatever the splitting pattern.
  """
  return chat.tokenizer.get_vocab() == load_chat().tokenizer.get_vocab()


def model_card(
  config: Config,
  step: int,
  rows: list[dict[str, Any]],
  command: str,
  base: str,
  adapter: bool = False,
  small_tokenizer: bool = False,
) -> str:
  """Returns the text of the model card, README.md, of the checkpoint of a step.

  It contains the base model, which is "" for random weights, the data, the algorithm, how to load
  the folder, the metrics at `step`, the first and the last evaluation up to it, of the `rows` of
  metrics.jsonl, all settings, the versions, and the command line of the export.
  """
  name = config.algorithm.name
  rows = [row for row in rows if row["step"] <= step]
  settings = {key: (value,) for key, value in resolved_settings(config).items()}
  defaults = resolved_settings(Config(algorithm=AlgorithmSection(name=name)))
  # What "auto" stands for follows the devices.
  changed = {
    key: value for key, value in settings.items() if defaults.get(key) not in (*value, AUTO)
  }
  settings.pop("model.preset" if config.model.path else "model.path")
  evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
  first, last = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
  header = {
    "library_name": "peft" if adapter else "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["gtpo_jax", name, "reinforcement-learning"],
  }
  # The hub refuses a card whose base model is a path: github.com/huggingface/trl/issues/1873.
  if base and not os.path.isabs(base):
    header["base_model"] = base
  page = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATE.parent),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  cell = lambda x: "-" if x is None else f"{x:.4g}" if isinstance(x, float) else _plain(str(x))
  page.filters |= {"plain": _plain, "code": _code, "fence": _fence, "json": json.dumps}
  page.filters["cell"] = cell
  return page.get_template(TEMPLATE.name).render(
    config=config,
    header=header,
    title=os.path.basename(base) or config.model.preset,
    name=name,
    paper=RECIPES[name].paper,
    step=step,
    base=base,
    adapter=adapter,
    small_tokenizer=small_tokenizer,
    evaluation_heads=("", f"step {first.get('step')}", f"step {last.get('step')}"),
    evaluations={
      key.removeprefix("eval/"): (first.get(key), value)
      for key, value in last.items()
      if key.startswith("eval/")
    },
    metrics={key: (rows[-1][key],) for key in CARD_METRICS if rows and key in rows[-1]},
    changed=changed,
    settings=settings,
    versions=", ".join(f"{package} {_version(package)}" for package in PACKAGES),
    python=platform.python_version(),
    command=command,
  )


def _plain(text: str) -> str:
  """Returns text on one line in which Markdown finds no HTML and no end of a table cell."""
  line = " ".join(visible(text, "\n").splitlines())
  return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", r"\|")


def _code(text: str) -> str:
  """Returns text as inline code of Markdown, in which HTML has no effect."""
  line = " ".join(visible(text, "\n").splitlines())
  fence = _fence(line, 1)
  padding = " " if "`" in line else ""  # Markdown removes it
  return f"{fence}{padding}{line}{padding}{fence}"


def _fence(text: str, least: int) -> str:
  """Returns at least `least` backticks, more than the text has in a row."""
  longest = max(map(len, re.findall("`+", text)), default=0)
  return "`" * max(least, longest + 1)


def resolved_settings(config: Config) -> Mapping[str, Any]:
  """Returns all fields of the config by dotted name, with published values for unset settings."""
  return {
    key: value
    for key, value in flatten(resolved_dict(config)).items()
    if value is not None or not key.startswith("algorithm.")
  }


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # the package runs from a source tree
    return "(source)"
