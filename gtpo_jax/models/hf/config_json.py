"""Reads and writes a model's config.json.

Nothing in a model folder is ever executed; a config.json that refers to code is rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gtpo_jax.models.attention.rope_scaling import Llama3Scaling, RopeScaling, Yarn
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.families import FAMILIES, MATRICES, Family
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.storage.files import printable, read_json

# Settings with only one implemented value. An absent or null setting has that value.
SUPPORTED = {
  "use_sliding_window": False,
  "hidden_act": "silu",
  "attention_dropout": 0.0,
  "partial_rotary_factor": 1.0,
  "rope_interleaved": False,
  "quantization_config": None,
  "dual_chunk_attention_config": None,
}
SUPPORTED_ROPE = {"partial_rotary_factor": 1.0, "truncate": True}
# Settings that only models of these kinds have.
KINDS_OF_MODELS = {
  "num_experts": "mixtures of experts",
  "num_local_experts": "mixtures of experts",
  "n_routed_experts": "mixtures of experts",
  "text_config": "models of several modalities",
}


class RopeType(NamedTuple):
  """A kind of RoPE scaling: our class, and its fields by the names of their settings."""

  scaling: type[RopeScaling]
  fields: Mapping[str, str]


ROPE_TYPES = {
  "yarn": RopeType(
    Yarn,
    {
      "factor": "factor",
      "original_max_position_embeddings": "original",
      "beta_fast": "beta_fast",
      "beta_slow": "beta_slow",
      "attention_factor": "attention_factor",
    },
  ),
  "llama3": RopeType(
    Llama3Scaling,
    {
      "factor": "factor",
      "original_max_position_embeddings": "original",
      "low_freq_factor": "low_freq_factor",
      "high_freq_factor": "high_freq_factor",
    },
  ),
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
DEFAULT_ROPE_THETA = 10000.0  # of every family in Transformers


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
  _check_supported(values, path)
  number = lambda key, kind, default=None: _number(values, key, path, kind, default)
  width = number("hidden_size", int)
  vocab_size = number("vocab_size", int)
  layers = number("num_hidden_layers", int)
  heads = number("num_attention_heads", int)
  context = number("max_position_embeddings", int, family.context)
  norm_eps = number("rms_norm_eps", float)
  if not 0 < norm_eps < float("inf"):
    raise UserError(f"{path!r} has rms_norm_eps = {norm_eps}; it must be above 0 and finite")
  rope_theta, rope_scaling = _rope(values, path, context)
  config = ModelConfig(
    vocab_size=vocab_size,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=number("num_key_value_heads", int, heads),
    head_dim=number("head_dim", int, family.head_dim or (width // heads if heads > 0 else 0)),
    mlp=number("intermediate_size", int),
    tied=_flag(values, "tie_word_embeddings", path),
    rope_theta=rope_theta,
    norm_eps=norm_eps,
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
      f"{path!r} has model_type {repr(model_type)[:80]}; {''.join(kinds[:1])}"
      f"supported are {', '.join(FAMILIES)}"
    )
  return FAMILIES[model_type]


def _check_supported(values: dict[str, Any], path: str) -> None:
  for key, supported in SUPPORTED.items():
    if values.get(key) not in (None, supported):
      only = "models without it are" if supported is None else f"{supported!r} is"
      raise UserError(f"{path!r} has {key} = {repr(values[key])[:80]}; only {only} supported")
  kinds = values.get("layer_types")
  if kinds and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
    raise UserError(f"{path!r} has layer_types other than full_attention, the only supported type")


def _check_sliding_window(
  values: dict[str, Any], family: Family, path: str, max_length: int
) -> None:
  """Refuses a sliding window that is shorter than the longest sequence."""
  if family.sliding_window is None:
    return
  window = values.get("sliding_window", family.sliding_window)
  if window is not None and not (isinstance(window, int) and window >= max_length):
    raise UserError(
      f"{path!r} has a sliding window (sliding_window = {window!r}) below its context of "
      f"{max_length}, which is not supported; to use the model for shorter texts only, lower "
      "max_position_embeddings to the window"
    )


def _biases(values: dict[str, Any], family: Family, path: str) -> tuple[str, ...]:
  """Returns the matrices with a bias, in the order of `MATRICES`."""
  found = set(family.biases)
  for key, matrices in family.optional_biases.items():
    if _flag(values, key, path):
      found.update(matrices)
  return tuple(name for name in MATRICES if name in found)


def _flag(values: dict[str, Any], key: str, path: str) -> bool:
  """Returns the setting `key`, which is False if it is absent or null."""
  value = values.get(key)
  if value is not None and not isinstance(value, bool):
    raise UserError(f"{path!r} has {key} = {value!r}; it must be true or false")
  return bool(value)


def _rope(values: dict[str, Any], path: str, context: int) -> tuple[float, RopeScaling | None]:
  """Returns the base of the rotary angles, and their scaling or None.

  Older files have `rope_scaling` and `rope_theta`, newer ones `rope_parameters`.
  """
  for key in ("rope_parameters", "rope_scaling"):
    if not isinstance(values.get(key) or {}, dict):
      raise UserError(f"{path!r} has {key} = {values[key]!r}; it must be an object")
  newer = values.get("rope_parameters") or {}
  older = values.get("rope_scaling") or {}
  theta = _rope_theta((values, newer, older), path)
  scaling = older or newer
  kind = scaling.get("rope_type") or scaling.get("type") or "default"
  if kind not in ("default", *ROPE_TYPES):
    raise UserError(
      f"{path!r} has RoPE scaling of type {kind!r}; only {', '.join(ROPE_TYPES)} and no scaling "
      "are supported"
    )
  settings = {
    key: value
    for key, value in scaling.items()
    if value is not None and key not in ("type", "rope_type", "rope_theta")
  }
  for key, supported in SUPPORTED_ROPE.items():
    value = settings.pop(key, supported)
    if value != supported:
      raise UserError(f"{path!r} has {key} = {value!r} for RoPE; only {supported} is supported")
  valid = set() if kind == "default" else ROPE_TYPES[kind].fields.keys()
  if unknown := sorted(settings.keys() - valid):
    names = ", ".join(map(printable, unknown))
    raise UserError(f"{path!r} has RoPE settings that are not supported for {kind!r}: {names}")
  if kind == "default":
    return theta, None
  return theta, _rope_scaling(ROPE_TYPES[kind], settings, path, kind, context)


def _rope_scaling(
  rope_type: RopeType, settings: dict[str, Any], path: str, kind: str, context: int
) -> RopeScaling:
  settings = {"original_max_position_embeddings": context, **settings}
  required = {
    field.name
    for field in dataclasses.fields(rope_type.scaling)
    if field.default is dataclasses.MISSING
  }
  fields = {}
  for key, name in rope_type.fields.items():
    if key in settings:
      fields[name] = _number(settings, key, path, int if name == "original" else float)
    elif name in required:
      raise UserError(f"{path!r} has RoPE scaling of type {kind!r} without {key}")
  return rope_type.scaling(**fields)


def _rope_theta(objects: tuple[dict[str, Any], ...], path: str) -> float:
  thetas = [
    _number(values, "rope_theta", path, float)
    for values in objects
    if values.get("rope_theta") is not None
  ]
  if any(theta != thetas[0] for theta in thetas[1:]):
    raise UserError(f"{path!r} has several rope_theta: {', '.join(map(str, thetas))}; keep one")
  theta = thetas[0] if thetas else DEFAULT_ROPE_THETA
  if not 1 < theta < float("inf"):
    raise UserError(f"{path!r} has rope_theta = {theta!r}; it must be above 1 and finite")
  return theta


def _number(
  values: dict[str, Any], key: str, path: str, kind: type, default: float | None = None
) -> Any:
  """Returns the number `values[key]`, or `default` if it is absent or null."""
  value = values.get(key)
  if value is None and default is not None:
    return default
  allowed = int if kind is int else (int, float)
  if not isinstance(value, allowed) or isinstance(value, bool):
    noun = "an integer" if kind is int else "a number"
    raise UserError(f"{path!r} has {key} = {value!r}; it must be {noun}")
  return kind(value)


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
    values["rope_scaling"] = _to_hf_rope(config.rope_scaling)
  return values


def _to_hf_rope(scaling: RopeScaling) -> dict[str, Any]:
  """Returns the object `rope_scaling`, which Transformers 4 and 5 read."""
  kind = next(name for name, kind in ROPE_TYPES.items() if isinstance(scaling, kind.scaling))
  settings = {key: getattr(scaling, name) for key, name in ROPE_TYPES[kind].fields.items()}
  # Programs that are older than Llama 3.1 read `type`.
  older = {"type": kind} if kind == "yarn" else {}
  return {**older, "rope_type": kind} | {
    key: value for key, value in settings.items() if value is not None
  }


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
