"""Reads and writes a model's config.json.

Nothing in a model folder is ever executed; a config.json that refers to code is rejected.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gtpo_jax.models.config import EXPERTS, ModelConfig
from gtpo_jax.models.families import FAMILIES, MATRICES, MULTIMODAL, NOT_COVERED, Family
from gtpo_jax.models.hf.json_values import (
  LARGEST_SIZES,
  READ,
  check_layers,
  check_same,
  check_supported,
  flag,
  number,
  shown,
  size,
  unused_keys,
)
from gtpo_jax.models.hf.rope_json import (
  FULL,
  LINEAR,
  OF_IMAGES,
  SHARE,
  SLIDING,
  read_ropes,
  read_share,
  write_rope,
)
from gtpo_jax.models.kinds import DELTA, DeltaSizes, LayerKind, Mixture
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import ABOVE_0
from gtpo_jax.runtime.files import printable, read_json

# Settings that only models of these kinds have.
KINDS_OF_MODELS = {
  "num_experts": "other mixtures of experts",
  "num_local_experts": "other mixtures of experts",
  "n_routed_experts": "other mixtures of experts",
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
# Settings that null gives another meaning than their absence.
NULLABLE = ("num_key_value_heads", "sliding_window")
# The sizes of gated delta nets, in the order of `DeltaSizes`.
DELTA_KEYS = (
  "linear_num_key_heads",
  "linear_num_value_heads",
  "linear_key_head_dim",
  "linear_value_head_dim",
  "linear_conv_kernel_dim",
)
# The keys of families for the number of layers after which one attends to all positions.
INTERVALS = ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval")
MAX_NAMES = 8  # the most keys that a line lists


def read_config(folder: Path, dtype: str) -> ModelConfig:
  """Returns the architecture that config.json describes.

  Args:
    folder: a model folder.
    dtype: the dtype of the parameters and of computation.

  Raises:
    UserError: there is no such file, or the architecture is not supported.
  """
  path = str(folder / "config.json")
  values, family = _text_values(read_json(folder, "config.json"), path)
  check_supported(values, family, path)
  sizes = lambda key, default=None: size(values, key, path, default)
  layers = sizes("num_hidden_layers")
  width = sizes("hidden_size")
  heads = sizes("num_attention_heads")
  context = sizes("max_position_embeddings")
  rope_theta, rope_scaling, local_theta = read_ropes(values, family, path, context)
  max_length = rope_scaling.max_length(context) if rope_scaling else context
  kinds = tuple(_kinds(values, family, layers, local_theta, path, max_length))
  has_delta = any(kind.mixer == DELTA for kind in kinds)
  kv_heads = sizes("num_key_value_heads", heads)
  if heads % kv_heads:
    raise UserError(
      f"{path!r} has num_attention_heads = {heads}, which is not a multiple of "
      f"num_key_value_heads = {kv_heads}"
    )
  biases = set(family.biases)
  for key, matrices in family.optional_biases.items():
    if flag(values, key, path):
      biases.update(matrices)

  def optional(key: str, known: Collection[str]) -> float | None:
    is_set = key in known and values.get(key) is not None
    return number(values, key, path, ABOVE_0) if is_set else None

  return ModelConfig(
    vocab_size=sizes("vocab_size"),
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=_head_dim(values, width, heads, path),
    mlp=sizes("intermediate_size"),
    tied=flag(values, "tie_word_embeddings", path),
    rope_theta=rope_theta,
    norm_eps=number(values, "rms_norm_eps", path),
    context=context,
    rope_scaling=rope_scaling,
    rope_share=read_share(values, family, path),
    kinds=kinds,
    delta=DeltaSizes(*map(sizes, DELTA_KEYS)) if has_delta else None,
    query_scalar=optional("query_pre_attn_scalar", family.defaults),
    mixture=_mixture(values, family, path),
    clip_qkv=optional("clip_qkv", family.keys),
    biases=tuple(name for name in MATRICES if name in biases),
    model_type=values["model_type"],
    param_dtype=dtype,
    compute_dtype=dtype,
  )


def describe_unused_keys(folder: Path) -> str:
  """Returns one line about the keys of config.json that are not used, or the empty string.

  Keys that have no effect on a model of this family do not count.
  """
  path = str(folder / "config.json")
  names = unused_keys(*_text_values(read_json(folder, "config.json"), path))
  if not names:
    return ""
  listed = ", ".join(map(printable, names[:MAX_NAMES])) + (" ..." if len(names) > MAX_NAMES else "")
  return f"{path!r} has {len(names)} key(s) that are not used: {listed}"


def is_multimodal(values: dict[str, Any]) -> bool:
  """Returns whether a config.json describes a model with other parts than its text model."""
  return isinstance(kind := values.get("model_type"), str) and kind in MULTIMODAL


def _text_values(values: dict[str, Any], path: str) -> tuple[dict[str, Any], Family]:
  """Returns the settings of the text model, with the defaults of its family."""
  if is_multimodal(values):
    text = values.get("text_config")
    if not isinstance(text, dict):
      raise UserError(f"{path!r} has text_config = {shown(text)}; it must be an object")
    outer = ("auto_map", "tie_word_embeddings")
    outside = {key: value for key, value in values.items() if key in outer}
    for key in (READ | LARGEST_SIZES.keys()) - {"model_type", "tie_word_embeddings"}:
      check_same(path, {key: values.get(key), f"text_config.{key}": text.get(key)})
    values = {"model_type": MULTIMODAL[values["model_type"]]} | outside | text
  family = _family(values, path)
  given = {key: value for key, value in values.items() if value is not None or key in NULLABLE}
  if family.expert_mlp and "num_local_experts" in given:  # as Transformers 5 saves Qwen3-MoE
    given.setdefault("num_experts", size(given, "num_local_experts", path))
  return {**family.defaults, **given}, family


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
    if isinstance(model_type, str) and model_type in NOT_COVERED:
      kinds = [f"not supported: {NOT_COVERED[model_type]}; "]
    raise UserError(
      f"{path!r} has model_type {shown(model_type)}; {''.join(kinds[:1])}"
      f"supported are {', '.join(FAMILIES)}"
    )
  family = FAMILIES[model_type]
  stated = values.get("architectures")
  stated = stated if isinstance(stated, list) else []
  other = next((x.architecture for x in FAMILIES.values() if x.architecture in stated), "")
  if other and family.architecture not in stated:
    raise UserError(
      f"{path!r} has model_type = {model_type!r} and architectures = {shown(stated)}, which is "
      "another family; keep the right one"
    )
  return family


def _kinds(
  values: dict[str, Any],
  family: Family,
  layers: int,
  local_theta: float | None,
  path: str,
  max_length: int,
) -> list[LayerKind]:
  """Returns the kind of each layer. A window of `max_length` or more is none."""
  window = None
  if family.has_windows and values.get("sliding_window") is not None:
    window = size(values, "sliding_window", path)
    window = window if window < max_length else None
  windowed = LayerKind(window, rope_theta=local_theta)
  types = {FULL: LayerKind()} | ({SLIDING: windowed} if family.has_windows else {})
  types |= {LINEAR: LayerKind(mixer=DELTA)} if family.has_delta else {}
  interval = family.full_interval
  if family.interval_key in values:
    interval = _per_layer(values, family.interval_key, path)
  other = LINEAR if family.has_delta else SLIDING
  every = lambda n: [FULL if n and i % n == 0 else other for i in range(1, layers + 1)]
  of_layers = every(interval)
  given = values.get("layer_types")
  if given is not None:
    if not isinstance(given, list) or any(kind not in types for kind in map(str, given)):
      raise UserError(
        f"{path!r} has layer_types = {shown(given)}; supported for {values['model_type']} are "
        + " and ".join(types)
      )
    if len(given) != layers:
      raise UserError(
        f"{path!r} has {len(given)} layer_types for num_hidden_layers = {layers}; there must be "
        "one per layer, or none"
      )
    if window and not family.full_interval and FULL in given:
      raise UserError(f"{path!r} has layer_types, but a sliding_window for all layers; remove one")
    of_layers = given
  for key in INTERVALS if len(types) > 1 else ():
    # Transformers writes the default as _sliding_window_pattern beside any list.
    if key in values and not (key[0] == "_" and values[key] == family.full_interval):
      stated = _per_layer(values, key, path)
      check_layers(path, "layer_types", of_layers, f"{key} = {stated}", every(stated))
  rotates = _rotates(values, family, layers, path)
  mlps = _mlps(values, family, layers, path)
  return [
    dataclasses.replace(types[of_layers[i]], rotates=rotates[i], mlp=mlps[i]) for i in range(layers)
  ]


def _mlps(values: dict[str, Any], family: Family, layers: int, path: str) -> list[str]:
  """Returns whether the MLP of each layer is "dense" or "experts"."""
  if not family.expert_mlp:
    return ["dense"] * layers
  if "mlp_only_layers" not in family.keys:
    return [EXPERTS] * layers
  step = size(values, "decoder_sparse_step", path)
  dense = values.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(x) is not int for x in dense):
    raise UserError(
      f"{path!r} has mlp_only_layers = {shown(dense)}; it must be a list of numbers of layers"
    )
  if outside := [x for x in dense if not 0 <= x < layers]:
    raise UserError(
      f"{path!r} has mlp_only_layers = {shown(dense)}, but num_hidden_layers = {layers}: there is "
      f"no layer {outside[0]}, as layers count from 0"
    )
  return [EXPERTS if i not in dense and (i + 1) % step == 0 else "dense" for i in range(layers)]


def _mixture(values: dict[str, Any], family: Family, path: str) -> Mixture | None:
  """Returns the mixture of experts, if a layer has one."""
  layers = size(values, "num_hidden_layers", path)
  if EXPERTS not in _mlps(values, family, layers, path):
    return None
  return Mixture(
    experts=size(values, "num_experts", path),
    per_token=size(values, "num_experts_per_tok", path),
    mlp=size(values, family.expert_mlp, path),
    normalised=flag(values, "norm_topk_prob", path),
    shared=size(values, family.shared_mlp, path) if family.shared_mlp else 0,
  )


def _rotates(values: dict[str, Any], family: Family, layers: int, path: str) -> list[bool]:
  """Returns which layers rotate queries and keys; `no_rope_layers` has 1 for layers that do."""
  if not family.no_rope_interval:
    return [True] * layers
  interval = family.no_rope_interval
  if "no_rope_layer_interval" in values:
    interval = _per_layer(values, "no_rope_layer_interval", path)
  implied = [i % interval != 0 for i in range(1, layers + 1)]
  given = values.get("no_rope_layers")
  if given is None:
    return implied
  if not isinstance(given, list) or len(given) != layers or any(x not in (0, 1) for x in given):
    raise UserError(
      f"{path!r} has no_rope_layers = {shown(given)}; there must be 0 or 1 for each of the "
      f"{layers} layers (num_hidden_layers)"
    )
  if interval != family.no_rope_interval:  # Transformers writes this one beside any list
    check_layers(path, "no_rope_layers", given, f"no_rope_layer_interval = {interval}", implied)
  return [bool(x) for x in given]


def _per_layer(values: dict[str, Any], key: str, path: str) -> int:
  """Returns a number of layers after which something repeats."""
  value = values[key]
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise UserError(f"{path!r} has {key} = {shown(value)}; it must be an integer from 1")
  return value


def _head_dim(values: dict[str, Any], width: int, heads: int, path: str) -> int:
  if "head_dim" not in values and width % heads:
    raise UserError(
      f"{path!r} has hidden_size = {width}, which is not a multiple of num_attention_heads = "
      f"{heads}, and no head_dim"
    )
  head_dim = size(values, "head_dim", path, width // heads)
  if head_dim % 2:
    stated = "" if "head_dim" in values else f" (hidden_size {width} / num_attention_heads {heads})"
    raise UserError(
      f"{path!r} has head_dim = {head_dim}{stated}; it must be even for rotary positions"
    )
  return head_dim


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns the contents of config.json for weights stored as `dtype`."""
  family = config.family
  values = {
    "architectures": [family.architecture],
    "model_type": config.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    family.activation_key: family.activation,
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
  if "head_dim" in family.defaults or config.head_dim * config.heads != config.width:
    values["head_dim"] = config.head_dim
  if config.rope_scaling and not family.rope_share:
    values["rope_scaling"] = write_rope(config.rope_scaling)
  if config.query_scalar:
    values["query_pre_attn_scalar"] = round(config.query_scalar)
  if "clip_qkv" in family.keys:
    values["clip_qkv"] = config.clip_qkv
  return values | _written_kinds(config) | _written_mixture(config)


def _written_mixture(config: ModelConfig) -> dict[str, Any]:
  """Returns the settings of experts in config.json."""
  family = config.family
  if not family.expert_mlp:
    return {}
  values: dict[str, Any] = {"output_router_logits": False}
  if "mlp_only_layers" in family.keys:
    dense = [i for i, kind in enumerate(config.layer_kinds) if kind.mlp != EXPERTS]
    values |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
  if mixture := config.mixture:
    values |= {
      "num_experts": mixture.experts,
      "num_experts_per_tok": mixture.per_token,
      family.expert_mlp: mixture.mlp,
      "norm_topk_prob": mixture.normalised,
    }
    if family.shared_mlp:
      values[family.shared_mlp] = mixture.shared
  return values


def _written_kinds(config: ModelConfig) -> dict[str, Any]:
  """Returns the settings of single layers, and of angles that not all layers have."""
  family = config.family
  kinds = config.layer_kinds
  values: dict[str, Any] = {}
  if family.no_rope_interval:
    values["no_rope_layers"] = [int(kind.rotates) for kind in kinds]
  if family.rope_share:
    scaling = write_rope(config.rope_scaling) if config.rope_scaling else {"rope_type": "default"}
    share = {"rope_theta": config.rope_theta, SHARE: config.rope_share}
    values["rope_parameters"] = scaling | share
  if family.has_delta:
    values["layer_types"] = [LINEAR if kind.mixer == DELTA else FULL for kind in kinds]
  if config.delta:
    values |= dict(zip(DELTA_KEYS, config.delta, strict=True))
  if not family.has_windows:
    return values
  is_windowed = [kind.window is not None or kind.rope_theta is not None for kind in kinds]
  windowed = itertools.compress(kinds, is_windowed)
  windows = [kind.window or config.max_length for kind in windowed]
  values["sliding_window"] = windows[0] if windows else None
  if family.full_interval:
    values["layer_types"] = [SLIDING if x else FULL for x in is_windowed]
  if family.local_theta:
    bases = [kind.rope_theta for kind in kinds if kind.rope_theta]
    local = bases[0] if bases else config.rope_theta
    full = write_rope(config.rope_scaling) if config.rope_scaling else {"rope_type": "default"}
    full.pop("type", None)
    if family.local_theta != "rope_theta":
      values[family.local_theta] = local
    values["rope_parameters"] = {
      FULL: {**full, "rope_theta": config.rope_theta},
      SLIDING: {"rope_type": "default", "rope_theta": local},
    }
  return values


def with_carried(model: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
  """Returns a text model's config.json, with the source's settings that only other programs read.

  Args:
    model: from `to_hf_config`.
    source: the contents of the config.json that the model was read from.
  """
  text = source["text_config"] if is_multimodal(source) else source
  carried = {key: text[key] for key in FAMILIES[model["model_type"]].carried if key in text}
  if "rope_parameters" in model and isinstance(rope := text.get("rope_parameters"), dict):
    of_images = {key: rope[key] for key in OF_IMAGES if key in rope}
    carried["rope_parameters"] = of_images | model["rope_parameters"]
  return model | carried


def source_defaults(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the settings that an export keeps of its source's two config files.

  These are the beginning-of-text id and the sampling defaults. Training depends on neither.
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
