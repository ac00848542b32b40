"""A Hugging Face model folder: where it is, and whether it may be trusted, before anything of it is read into memory.

Nothing in a folder is ever executed: safetensors and JSON are data, pickles and code are refused.
"""
from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.errors import UserError, first_line
from gtpo_jax.models.presets import ModelConfig, Yarn

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", "tokenizer.model")


@functools.cache
def find(name: str, files: Sequence[str] = HUB_FILES) -> Path:
  """The local folder of a model: a path as it is, a hub id through huggingface_hub's cache.

  Raises:
    UserError: no such folder, and no such model in the cache or at the hub.
  """
  folder = Path(name)
  if folder.is_dir():
    return folder
  if folder.exists() or folder.parent.is_dir() or not HUB_ID.fullmatch(name):  # runs/misspelt is no hub id where runs/ is a folder
    raise UserError(f"no folder at {name!r}; name the workdir of a run, a model folder, or a hub id as Qwen/Qwen2.5-0.5B")
  from huggingface_hub import snapshot_download
  from huggingface_hub.utils import disable_progress_bars
  disable_progress_bars()
  try:
    return Path(snapshot_download(name, allow_patterns=list(files)))
  except Exception as error:  # the hub's, the network library's and the disk's own kinds
    raise UserError(f"{name!r} is neither a folder here nor cached, and the hub did not give it ({first_line(error)[:160]}); "
                    f"download it where there is a network, or name a folder") from error


def is_hf_folder(folder: Path) -> bool:
  """Whether a folder's config.json is a Hugging Face model's (a run's workdir has one too)."""
  try:
    return "model_type" in json.loads((folder / "config.json").read_text())
  except (OSError, ValueError):
    return False


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """An object from a JSON file of the folder.

  Raises:
    UserError: it is not there, leads out of the folder, or is not a JSON object.
  """
  file = inside(folder, name)
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"no {name} in {str(folder)!r} that can be read ({error.strerror})") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {first_line(error)}") from error
  if not isinstance(values, dict):
    raise UserError(f"{str(file)!r} holds {type(values).__name__}, not an object")
  return values


def inside(folder: Path, name: str) -> Path:
  """The file `name` of a folder; the hub's cache keeps its files behind links of its own, other links must not leave the folder.

  Raises:
    UserError: the name or a link leads elsewhere.
  """
  if not name or Path(name).name != name or name in (".", ".."):
    raise UserError(f"{name!r}, named in {str(folder)!r}, is not the name of a file in it")
  file, home = folder / name, folder.resolve()
  cached = home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir()
  if not file.resolve().is_relative_to(home.parent.parent if cached else home):
    raise UserError(f"{str(file)!r} is a link out of its folder; copy the file itself")
  return file


def read_config(folder: Path, dtype: str) -> ModelConfig:
  """The architecture that config.json describes, in `dtype` throughout.

  Raises:
    UserError: no such file, or an architecture that this port does not compute.
  """
  values, where = read_json(folder, "config.json"), str(folder / "config.json")
  if "auto_map" in values:
    raise UserError(f"{where!r} asks for code of its own (auto_map); nothing of a model folder is executed here")
  if values.get("model_type") != "qwen2":
    raise UserError(f"{where!r} is of model_type {values.get('model_type')!r}; this port computes qwen2 (Qwen2 and Qwen2.5)")
  for key, expected in {"use_sliding_window": False, "hidden_act": "silu", "attention_dropout": 0.0}.items():
    if values.get(key, expected) != expected:
      raise UserError(f"{where!r} has {key} = {values[key]!r}; this port computes {expected!r} alone")
  need = {"vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "intermediate_size": int,
          "rms_norm_eps": float}
  for key, kind in need.items():
    if not _is(values.get(key), kind):
      raise UserError(f"{where!r} has {key} = {values.get(key)!r}; it must be a {'whole ' if kind is int else ''}number")
  heads = values["num_attention_heads"]
  head_dim = values.get("head_dim") or (values["hidden_size"] // heads if heads > 0 else 0)
  theta, yarn = _rope(values, where)
  return ModelConfig(
      vocab_size=values["vocab_size"], width=values["hidden_size"], layers=values["num_hidden_layers"], heads=heads,
      kv_heads=values.get("num_key_value_heads") or heads, head_dim=head_dim, mlp=values["intermediate_size"],
      tied=bool(values.get("tie_word_embeddings", False)), rope_theta=theta, norm_eps=float(values["rms_norm_eps"]),
      context=values.get("max_position_embeddings") or 32768, yarn=yarn, param_dtype=dtype, compute_dtype=dtype)


def _rope(values: dict[str, Any], where: str) -> tuple[float, Yarn | None]:
  """Theta and YaRN, from `rope_scaling` beside `rope_theta` or from the newer `rope_parameters`."""
  rope = values.get("rope_parameters") or {}
  scaling = values.get("rope_scaling") or rope
  theta = values.get("rope_theta") or rope.get("rope_theta") or 10000.0  # what transformers takes where none is said
  kind = scaling.get("rope_type") or scaling.get("type") or "default"
  if not _is(theta, float) or theta <= 1:
    raise UserError(f"{where!r} has rope_theta = {theta!r}; it must be a number above 1")
  if kind == "default":
    return float(theta), None
  if kind != "yarn":
    raise UserError(f"{where!r} has RoPE scaling of type {kind!r}; this port computes 'yarn' and plain angles")
  known = {"type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
  if unknown := sorted(scaling.keys() - known):
    raise UserError(f"{where!r} has YaRN settings that this port does not compute: {', '.join(unknown)}")
  if not _is(scaling.get("factor"), float):
    raise UserError(f"{where!r} has YaRN without a factor")
  original = scaling.get("original_max_position_embeddings") or values.get("max_position_embeddings")
  return float(theta), Yarn(float(scaling["factor"]), original, scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0,
                            scaling.get("attention_factor"))


def _is(value: Any, kind: type) -> bool:
  return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
