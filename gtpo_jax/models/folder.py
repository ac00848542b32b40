"""A Hugging Face model folder: where it is, and whether it may be trusted, before anything of it is read into memory.

Nothing in a folder is ever executed: safetensors and JSON are data, pickles and code are refused.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from gtpo_jax.models.presets import ModelConfig, Yarn
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import printable, read_json

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", "tokenizer.model")

# Settings with one value that this port computes; absent and null stand for it.
COMPUTED = {
  "use_sliding_window": False,
  "hidden_act": "silu",
  "attention_dropout": 0.0,
  "partial_rotary_factor": 1.0,
  "quantization_config": None,
  "dual_chunk_attention_config": None,
}
YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}


def find(name: str) -> Path:
  """The local folder of a model: a path as it is, a hub id through huggingface_hub's cache.

  Raises:
    UserError: no such folder, and no such model in the cache or at the hub.
  """
  folder = Path(name)
  try:
    if folder.is_dir():
      return folder
    taken = (
      folder.exists() or folder.parent.is_dir()
    )  # runs/misspelt is no hub id where runs/ is a folder
  except (OSError, ValueError):  # too long for a path, or with a NUL
    taken = True
  if taken or not HUB_ID.fullmatch(name):
    raise UserError(
      f"no folder at {name[:200]!r}; name the workdir of a run, a model folder, or a hub id as Qwen/Qwen2.5-0.5B"
    )
  return _from_hub(name)


@functools.cache  # one revision for the whole process, though the hub moves on
def _from_hub(name: str) -> Path:
  from huggingface_hub import snapshot_download
  from huggingface_hub.utils import disable_progress_bars

  disable_progress_bars()
  try:
    return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
  except Exception as error:  # the hub's, the network library's and the disk's own kinds
    raise UserError(
      f"{name!r} is neither a folder here nor cached, and the hub did not give it ({first_line(error)[:160]}); "
      f"download it where there is a network, or name a folder"
    ) from error


def is_hf_folder(folder: Path) -> bool:
  """Whether a folder's config.json is a Hugging Face model's (a run's workdir has one too)."""
  try:
    values = json.loads((folder / "config.json").read_text())
  except (OSError, ValueError, RecursionError):
    return False
  return isinstance(values, dict) and "model_type" in values


def read_config(folder: Path, dtype: str) -> ModelConfig:
  """The architecture that config.json describes, in `dtype` throughout.

  Raises:
    UserError: no such file, or an architecture that this port does not compute.
  """
  values = read_json(folder, "config.json")
  where = str(folder / "config.json")
  if "auto_map" in values:
    raise UserError(
      f"{where!r} asks for code of its own (auto_map); nothing of a model folder is executed here"
    )
  if values.get("model_type") != "qwen2":
    raise UserError(
      f"{where!r} is of model_type {values.get('model_type')!r}; this port computes qwen2 (Qwen2 and Qwen2.5)"
    )
  for key, computed in COMPUTED.items():
    if values.get(key) not in (None, computed):
      which = "models without it" if computed is None else f"{computed!r} alone"
      raise UserError(f"{where!r} has {key} = {repr(values[key])[:80]}; this port computes {which}")
  sizes = {
    key: _number(values, key, where, int)
    for key in (
      "vocab_size",
      "hidden_size",
      "num_hidden_layers",
      "num_attention_heads",
      "intermediate_size",
    )
  }
  heads = sizes["num_attention_heads"]
  eps = _number(values, "rms_norm_eps", where, float)
  kv_heads = _number(values, "num_key_value_heads", where, int, heads)
  head_dim = _number(
    values, "head_dim", where, int, sizes["hidden_size"] // heads if heads > 0 else 0
  )
  context = _number(values, "max_position_embeddings", where, int, 32768)
  tied = values.get("tie_word_embeddings", False)
  if not isinstance(tied, bool):
    raise UserError(f"{where!r} has tie_word_embeddings = {tied!r}; it must be true or false")
  if not 0 < eps < float("inf"):
    raise UserError(f"{where!r} has rms_norm_eps = {eps}; it must be above 0 and finite")
  if (kinds := values.get("layer_types")) and (
    not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
  ):
    raise UserError(
      f"{where!r} has layer_types other than full_attention; this port computes that alone"
    )
  theta, yarn = _rope(values, where, context)
  return ModelConfig(
    vocab_size=sizes["vocab_size"],
    width=sizes["hidden_size"],
    layers=sizes["num_hidden_layers"],
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    mlp=sizes["intermediate_size"],
    tied=tied,
    rope_theta=theta,
    norm_eps=eps,
    context=context,
    yarn=yarn,
    param_dtype=dtype,
    compute_dtype=dtype,
  )


def _rope(values: dict[str, Any], where: str, context: int) -> tuple[float, Yarn | None]:
  """Theta and YaRN, from `rope_scaling` beside `rope_theta` or from the newer `rope_parameters`."""
  for key in ("rope_parameters", "rope_scaling"):
    if not isinstance(values.get(key) or {}, dict):
      raise UserError(f"{where!r} has {key} = {values[key]!r}; it must be an object")
  newer = values.get("rope_parameters") or {}
  older = values.get("rope_scaling") or {}
  thetas = [
    _number(part, "rope_theta", where, float)
    for part in (values, newer, older)
    if part.get("rope_theta") is not None
  ]
  if any(theta != thetas[0] for theta in thetas[1:]):
    raise UserError(f"{where!r} names several rope_theta: {', '.join(map(str, thetas))}; keep one")
  theta = thetas[0] if thetas else 10000.0
  if not 1 < theta < float("inf"):
    raise UserError(f"{where!r} has rope_theta = {theta!r}; it must be above 1 and finite")
  scaling = {
    key: value
    for key, value in (older or newer).items()
    if value is not None and key not in ("type", "rope_type", "rope_theta")
  }
  kind = (older or newer).get("rope_type") or (older or newer).get("type") or "default"
  if kind not in ("default", "yarn"):
    raise UserError(
      f"{where!r} has RoPE scaling of type {kind!r}; this port computes 'yarn' and plain angles"
    )
  for key, computed in {"partial_rotary_factor": 1.0, "truncate": True}.items():
    if (given := scaling.pop(key, computed)) != computed:
      raise UserError(
        f"{where!r} has {key} = {given!r} for RoPE; this port computes {computed} alone"
      )
  if unknown := sorted(scaling.keys() - (YARN if kind == "yarn" else set())):
    raise UserError(
      f"{where!r} has RoPE settings that this port does not compute for {kind!r}: {', '.join(map(printable, unknown))}"
    )
  if kind == "default":
    return theta, None
  if "factor" not in scaling:
    raise UserError(f"{where!r} has YaRN without a factor")
  attention = (
    _number(scaling, "attention_factor", where, float) if "attention_factor" in scaling else None
  )
  return theta, Yarn(
    _number(scaling, "factor", where, float),
    _number(scaling, "original_max_position_embeddings", where, int, context),
    _number(scaling, "beta_fast", where, float, 32.0),
    _number(scaling, "beta_slow", where, float, 1.0),
    attention,
  )


def _number(
  values: dict[str, Any], key: str, where: str, kind: type, default: float | None = None
) -> Any:
  """A number of config.json; `default` where it is absent or null."""
  value = values.get(key)
  if value is None and default is not None:
    return default
  if not _is(value, kind):
    raise UserError(
      f"{where!r} has {key} = {value!r}; it must be a {'whole ' if kind is int else ''}number"
    )
  return kind(value)


def _is(value: Any, kind: type) -> bool:
  return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
