"""`gtpo export`: a run's policy as a Hugging Face folder, with a card that says how it came about."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.algorithms import RECIPES
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.models import save, save_adapter
from gtpo_jax.models.folder import is_hf_folder
from gtpo_jax.reporting.journal import read_jsonl
from gtpo_jax.rollout.policies import open_policy
from gtpo_jax.runtime.errors import UserError

PACKAGES = ("gtpo_jax", "jax", "flax", "optax", "transformers")


def export(
  workdir: Path,
  out: Path,
  command: str,
  step: int | None = None,
  dtype: str | None = None,
  adapter: bool = False,
) -> str:
  """Writes the policy of a run's checkpoint into the folder `out`; returns what was written, in one line.

  Args:
    workdir: of a `gtpo train`.
    out: must not exist yet, or be empty.
    command: how this export was asked for; it goes into the model card.
    step: which checkpoint; the newest unless given, 0 for the base model.
    dtype: "float32", "bfloat16" or "float16"; the run's own if None.
    adapter: the adapters alone, as a PEFT folder.

  Raises:
    UserError: no such checkpoint, or a folder that holds something already.
  """
  if is_hf_folder(workdir):
    raise UserError(
      f"{str(workdir)!r} is a Hugging Face folder already; --workdir is the folder of a `gtpo train`"
    )
  worker, config, params, step = open_policy(workdir, step)
  card = {"README.md": model_card(config, step, read_jsonl(workdir / "metrics.jsonl"), command)}
  if adapter:
    if not config.model.path:
      raise UserError(
        "adapters need a base model that others can load: this run began from random weights (model.path is empty)"
      )
    save_adapter(worker.model, params, out, config.model.path, card)
  else:
    save(
      worker.model,
      params,
      worker.chat.tokenizer,
      out,
      dtype=dtype,
      stop=worker.chat.stop,
      files=card,
    )
  return f"step {step} of {workdir} -> {out} ({'adapters' if adapter else dtype or config.model.param_dtype})"


def model_card(config: Config, step: int, rows: list[dict[str, Any]], command: str) -> str:
  """The text of README.md: base, data, algorithm and all hyperparameters, steps, metrics, versions, command."""
  name = config.algorithm.name
  base = config.model.path
  header = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["gtpo_jax", name, "reinforcement-learning"],
  }
  header |= {"base_model": base} if base else {}
  origin = f"`{base}`" if base else "random weights"
  if config.warm_start.steps:
    origin += f" after {config.warm_start.steps} steps of imitation"
  up_to = [row for row in rows if row["step"] <= step]
  evaluated = [row for row in up_to if any(key.startswith("eval/") for key in row)]
  first, last = (evaluated[0], evaluated[-1]) if evaluated else ({"step": 0}, {"step": step})
  gains = {
    key.removeprefix("eval/"): (first.get(key), value)
    for key, value in last.items()
    if key.startswith("eval/")
  }
  shown = ("reward/mean", "reward/accuracy", "entropy/mean", "length/mean", "loss", "grad_norm")
  ended = {key: (up_to[-1][key],) for key in shown if up_to and key in up_to[-1]}
  versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
  parts = [
    "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---"]),
    f"# {base or config.model.preset}, trained by {name}",
    f"Reinforcement learning by `{name}` ({RECIPES[name].paper}) on `{config.data.train}`: {step} steps of {config.batch.prompts} "
    f"prompts x {config.batch.group} completions, from {origin}.",
    _table("Held-out evaluation", ("", f"step {first['step']}", f"step {last['step']}"), gains),
    _table(f"Step {step}", ("metric", "value"), ended),
    _table(
      "Settings", ("setting", "value"), {key: (value,) for key, value in settings(config).items()}
    ),
    f"## Versions\n\n{versions}, Python {platform.python_version()}",
    f"## Command\n\n```\n{command}\n```",
  ]
  return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, head: tuple[str, ...], rows: Mapping[str, tuple[Any, ...]]) -> str:
  """A section with a Markdown table; nothing where there are no rows."""
  cell = lambda value: (
    f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
  )
  lines = [f"| {' | '.join((key, *map(cell, values)))} |" for key, values in rows.items()]
  return (
    "\n".join([f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])
    if rows
    else ""
  )


def settings(config: Config) -> Mapping[str, Any]:
  """Every field of the config, the algorithm's with the published values filled in."""
  flat = flatten(to_dict(config))
  algorithm = config.algorithm_built.settings
  read = {
    f"algorithm.{key}": getattr(algorithm, key) for key in RECIPES[config.algorithm.name].settings
  }
  return {
    key: value
    for key, value in flat.items()
    if not key.startswith("algorithm.") or key == "algorithm.name"
  } | read


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # run from a source tree
    return "(source)"
