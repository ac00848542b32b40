"""Reads and writes a model's config.json.

Nothing in a model folder is ever executed; a config.json that refers to code is rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.families import FAMILIES, MATRICES, Family
from gtpo_jax.models.hf.json_values import flag, number, shown, size
from gtpo_jax.models.hf.known_keys import check_supported, unused_keys
from gtpo_jax.models.hf.rope_json import read_rope, write_rope
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.storage.files import printable, read_json

# Settings that only models of these kinds have.
KINDS_OF_MODELS = {
  "num_experts": "mixtures of experts",
  "num_local_experts": "mixtures of experts",
  "n_routed_experts": "mixtures of experts",
  "text_config": "models of several modalities",
}
# Settings of generation_config.json that an export keeps.
SAMPLING_DEFAULTS = (
  "do_sample",
  "max_new_tokens",
  "min_p",
  "repetition_penalty",
  "temperature",
  "top_k",
  "top_p",
)
MAX_NAMES = 8  # the most keys that a line lists


def read_config(folder: Path, dtype: str) -> ModelConfig:
  """Returns the architecture that config.json describes.

  Args:
    folder: a model folder.
    dtype: the dtype of the parameters and of computation.

  Raises:
    UserError: there is no such file, or the architecture is not supported.
  """
  values = read_json(folder, "config.json")
  path = str(folder / "config.json")
  family = _family(values, path)
  check_supported(values, path)
  sizes = lambda key, default=None: size(values, key, path, default)
  layers = sizes("num_hidden_layers")
  _check_layer_types(values, layers, path)
  width = sizes("hidden_size")
  heads = sizes("num_attention_heads")
  context = sizes("max_position_embeddings", family.context)
  rope_theta, rope_scaling = read_rope(values, path, context)
  config = ModelConfig(
    vocab_size=sizes("vocab_size"),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=_kv_heads(values, heads, family, path),
    head_dim=_head_dim(values, width, heads, family, path),
    mlp=sizes("intermediate_size"),
    tied=flag(values, "tie_word_embeddings", path),
    rope_theta=rope_theta,
    norm_eps=number(values, "rms_norm_eps", path),
    context=context,
    rope_scaling=rope_scaling,
    qk_norm=family.qk_norm,
    biases=_biases(values, family, path),
    model_type=values["model_type"],
    param_dtype=dtype,
    compute_dtype=dtype,
  )
  _check_sliding_window(values, family, path, config.max_length)
  return config


def describe_unused_keys(folder: Path) -> str:
  """Returns one line about the keys of config.json that are not used, or the empty string.

  Keys that have no effect on a model of this family do not count.

  Raises:
    UserError: the model is not supported.
  """
  values = read_json(folder, "config.json")
  path = str(folder / "config.json")
  names = unused_keys(values, set(_family(values, path).optional_biases))
  if not names:
    return ""
  listed = ", ".join(map(printable, names[:MAX_NAMES])) + (" ..." if len(names) > MAX_NAMES else "")
  return f"{path!r} has {len(names)} key(s) that are not used: {listed}"


def _family(values: dict[str, Any], path: str) -> Family:
  if "auto_map" in values:
    raise UserError(
      f"{path!r} refers to its own code (auto_map); code in model folders is never executed"
    )
  model_type = values.get("model_type")
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    kinds = [
      f"{kind} are not supported; " for key, kind in KINDS_OF_MODELS.items() if key in values
    ]
    raise UserError(
      f"{path!r} has model_type {shown(model_type)}; {''.join(kinds[:1])}"
      f"supported are {', '.join(FAMILIES)}"
    )
  return FAMILIES[model_type]


def _check_layer_types(values: dict[str, Any], layers: int, path: str) -> None:
  kinds = values.get("layer_types")
  if kinds is None:
    return
  if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
    raise UserError(f"{path!r} has layer_types other than full_attention, the only supported type")
  if len(kinds) != layers:
    raise UserError(
      f"{path!r} has {len(kinds)} layer_types for num_hidden_layers = {layers}; there must be one "
      "per layer, or none"
    )


def _kv_heads(values: dict[str, Any], heads: int, family: Family, path: str) -> int:
  absent = family.kv_heads if "num_key_value_heads" not in values else None
  kv_heads = size(values, "num_key_value_heads", path, absent or heads)
  if heads % kv_heads:
    raise UserError(
      f"{path!r} has num_attention_heads = {heads}, which is not a multiple of "
      f"num_key_value_heads = {kv_heads}"
    )
  return kv_heads


def _head_dim(values: dict[str, Any], width: int, heads: int, family: Family, path: str) -> int:
  if values.get("head_dim") is None and not family.head_dim and width % heads:
    raise UserError(
      f"{path!r} has hidden_size = {width}, which is not a multiple of num_attention_heads = "
      f"{heads}, and no head_dim"
    )
  head_dim = size(values, "head_dim", path, family.head_dim or width // heads)
  if head_dim % 2:
    raise UserError(f"{path!r} has head_dim = {head_dim}; it must be even for rotary positions")
  return head_dim


def _check_sliding_window(
  values: dict[str, Any], family: Family, path: str, max_length: int
) -> None:
  """Refuses a sliding window that is shorter than the longest sequence."""
  if family.sliding_window is None:
    return
  window = values.get("sliding_window", family.sliding_window)
  if window is not None and not (isinstance(window, int) and window >= max_length):
    raise UserError(
      f"{path!r} has a sliding window (sliding_window = {shown(window)}) below its context of "
      f"{max_length}, which is not supported; to use the model for shorter texts only, lower "
      "max_position_embeddings to the window"
    )


def _biases(values: dict[str, Any], family: Family, path: str) -> tuple[str, ...]:
  """Returns the matrices with a bias, in the order of `MATRICES`."""
  found = set(family.biases)
  for key, matrices in family.optional_biases.items():
    if flag(values, key, path):
      found.update(matrices)
  return tuple(name for name in MATRICES if name in found)


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns the contents of config.json for weights stored as `dtype`."""
  family = FAMILIES[config.model_type]
  values = {
    "architectures": [family.architecture],
    "model_type": config.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "hidden_act": "silu",
    "max_position_embeddings": config.context,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tied,
    "attention_dropout": 0.0,
    **family.settings,
    "use_cache": True,
    "initializer_range": 0.02,
    "torch_dtype": dtype,
  }
  for key, matrices in family.optional_biases.items():
    values[key] = set(matrices) <= set(config.biases)
  if family.head_dim or config.head_dim * config.heads != config.width:
    values["head_dim"] = config.head_dim
  if config.rope_scaling:
    values["rope_scaling"] = write_rope(config.rope_scaling)
  return values


def source_defaults(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what an export keeps of config.json and of generation_config.json of its source.

  These are the beginning-of-text id and the sampling defaults. Training depends on neither.

  Raises:
    UserError: a file is not valid JSON or leads out of the folder.
  """
  config = read_json(folder, "config.json")
  generation = {}
  if (folder / "generation_config.json").exists():
    generation = read_json(folder, "generation_config.json")
  kept = {
    key: value for key in SAMPLING_DEFAULTS if isinstance(value := generation.get(key), int | float)
  }
  return _bos(config), _bos(generation) | kept


def _bos(values: dict[str, Any]) -> dict[str, int]:
  bos = values.get("bos_token_id")
  return {"bos_token_id": bos} if isinstance(bos, int) and not isinstance(bos, bool) else {}
