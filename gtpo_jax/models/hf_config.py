"""Reads and writes a model's config.json.

Nothing in a model folder is ever executed; a config.json that refers to code is rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtpo_jax.models.config import ModelConfig, Yarn
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.files import printable, read_json

# Settings with only one implemented value. An absent or null setting has that value.
SUPPORTED = {
  "use_sliding_window": False,
  "hidden_act": "silu",
  "attention_dropout": 0.0,
  "partial_rotary_factor": 1.0,
  "quantization_config": None,
  "dual_chunk_attention_config": None,
}
SUPPORTED_ROPE = {"partial_rotary_factor": 1.0, "truncate": True}
YARN_SETTINGS = {
  "factor",
  "original_max_position_embeddings",
  "beta_fast",
  "beta_slow",
  "attention_factor",
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
# Defaults of Hugging Face's Qwen2Config.
DEFAULT_CONTEXT = 32768
DEFAULT_ROPE_THETA = 10000.0


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
  _check_supported(values, path)
  number = lambda key, kind, default=None: _number(values, key, path, kind, default)
  width = number("hidden_size", int)
  vocab_size = number("vocab_size", int)
  layers = number("num_hidden_layers", int)
  heads = number("num_attention_heads", int)
  context = number("max_position_embeddings", int, DEFAULT_CONTEXT)
  norm_eps = number("rms_norm_eps", float)
  if not 0 < norm_eps < float("inf"):
    raise UserError(f"{path!r} has rms_norm_eps = {norm_eps}; it must be above 0 and finite")
  rope_theta, yarn = _rope(values, path, context)
  return ModelConfig(
    vocab_size=vocab_size,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=number("num_key_value_heads", int, heads),
    head_dim=number("head_dim", int, width // heads if heads > 0 else 0),
    mlp=number("intermediate_size", int),
    tied=values.get("tie_word_embeddings", False),
    rope_theta=rope_theta,
    norm_eps=norm_eps,
    context=context,
    yarn=yarn,
    param_dtype=dtype,
    compute_dtype=dtype,
  )


def _check_supported(values: dict[str, Any], path: str) -> None:
  if "auto_map" in values:
    raise UserError(
      f"{path!r} refers to its own code (auto_map); code in model folders is never executed"
    )
  if values.get("model_type") != "qwen2":
    raise UserError(
      f"{path!r} has model_type {values.get('model_type')!r}; "
      "only 'qwen2' (Qwen2 and Qwen2.5) is supported"
    )
  for key, supported in SUPPORTED.items():
    if values.get(key) not in (None, supported):
      only = "models without it are" if supported is None else f"{supported!r} is"
      raise UserError(f"{path!r} has {key} = {repr(values[key])[:80]}; only {only} supported")
  tied = values.get("tie_word_embeddings", False)
  if not isinstance(tied, bool):
    raise UserError(f"{path!r} has tie_word_embeddings = {tied!r}; it must be true or false")
  kinds = values.get("layer_types")
  if kinds and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
    raise UserError(f"{path!r} has layer_types other than full_attention, the only supported type")


def _rope(values: dict[str, Any], path: str, context: int) -> tuple[float, Yarn | None]:
  """Returns the base of the rotary angles, and the YaRN settings or None.

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
  if kind not in ("default", "yarn"):
    raise UserError(
      f"{path!r} has RoPE scaling of type {kind!r}; only 'yarn' and no scaling are supported"
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
  if unknown := sorted(settings.keys() - (YARN_SETTINGS if kind == "yarn" else set())):
    names = ", ".join(map(printable, unknown))
    raise UserError(f"{path!r} has RoPE settings that are not supported for {kind!r}: {names}")
  if kind == "default":
    return theta, None
  if "factor" not in settings:
    raise UserError(f"{path!r} has YaRN without a factor")
  number = lambda key, kind, default=None: _number(settings, key, path, kind, default)
  return theta, Yarn(
    factor=number("factor", float),
    original=number("original_max_position_embeddings", int, context),
    beta_fast=number("beta_fast", float, 32.0),
    beta_slow=number("beta_slow", float, 1.0),
    attention_factor=number("attention_factor", float) if "attention_factor" in settings else None,
  )


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
  values = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
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
    "use_sliding_window": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "torch_dtype": dtype,
  }
  if config.head_dim * config.heads != config.width:
    values["head_dim"] = config.head_dim
  if config.yarn:
    yarn = config.yarn
    values["rope_scaling"] = {
      "type": "yarn",
      "rope_type": "yarn",
      "factor": yarn.factor,
      "original_max_position_embeddings": yarn.original,
      "beta_fast": yarn.beta_fast,
      "beta_slow": yarn.beta_slow,
    }
    if yarn.attention_factor is not None:
      values["rope_scaling"]["attention_factor"] = yarn.attention_factor
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
