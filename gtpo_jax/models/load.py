"""Hugging Face folders in: config.json and safetensors, each slice read once, straight to where it lies."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from gtpo_jax.errors import UserError, first_line
from gtpo_jax.models.hf import params_from_hf
from gtpo_jax.models.presets import ModelConfig
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.parallel import single_device_mesh


def load(folder: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None) -> tuple[Qwen2, Params]:
  """The model and parameters of a Hugging Face Qwen2 folder.

  Args:
    folder: holds config.json and safetensors, one file or several.
    dtype: "float32", "bfloat16" or "float16", of parameters and computation.
    mesh: where they go; the first device if None.

  Raises:
    UserError: the folder is not a Qwen2 checkpoint, or a tensor is missing, left over or of another shape.
  """
  folder = Path(folder)
  model = Qwen2(read_config(folder, dtype), mesh or single_device_mesh())
  return model, read_params(model, folder)


def is_hf_folder(folder: Path) -> bool:
  """Whether a folder's config.json is a Hugging Face model's (a run's workdir has one too)."""
  try:
    return "model_type" in json.loads((folder / "config.json").read_text())
  except (OSError, ValueError):
    return False


def read_config(folder: Path, dtype: str) -> ModelConfig:
  """The architecture that config.json describes, in `dtype` throughout.

  Raises:
    UserError: no such file, or an architecture that this port does not compute.
  """
  file = folder / "config.json"
  try:
    values = json.loads(file.read_text())
  except OSError as error:
    raise UserError(f"no model in {str(folder)!r}: config.json cannot be read ({error.strerror})") from error
  except ValueError as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {error}") from error
  if not isinstance(values, dict) or values.get("model_type") != "qwen2":
    raise UserError(f"{str(file)!r} is of model_type {values.get('model_type') if isinstance(values, dict) else None!r}; "
                    f"this port computes qwen2")
  refused = {"rope_scaling": None, "use_sliding_window": False, "hidden_act": "silu"}
  for key, expected in refused.items():
    if values.get(key, expected) != expected:
      raise UserError(f"{str(file)!r} has {key} = {values[key]!r}, which this port does not compute; it computes {expected!r}")
  need = {"vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
          "kv_heads": "num_key_value_heads", "mlp": "intermediate_size", "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
  missing = [name for name in need.values() if name not in values]
  if missing:
    raise UserError(f"{str(file)!r} lacks {', '.join(missing)}")
  rope = values.get("rope_parameters") or {}
  theta = values.get("rope_theta") or rope.get("rope_theta")
  if theta is None or rope.get("rope_type", "default") != "default":
    raise UserError(f"{str(file)!r} has no plain rope_theta (rope_parameters {rope!r}), which this port needs")
  head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
  return ModelConfig(**{ours: values[name] for ours, name in need.items()}, head_dim=head_dim, rope_theta=float(theta),
                     param_dtype=dtype, compute_dtype=dtype)


def read_params(model: Qwen2, folder: Path) -> Params:
  """The parameters of a folder's safetensors on the model's mesh; a process reads the slices that its devices hold.

  Raises:
    UserError: a file is damaged, or the tensors are not the model's.
  """
  import safetensors
  files = sorted(folder.glob("*.safetensors"))
  if not files:
    raise UserError(f"no safetensors in {str(folder)!r}")
  slices: dict[str, Any] = {}
  try:
    for file in files:
      opened = safetensors.safe_open(file, framework="numpy")
      slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, not a dict
  except safetensors.SafetensorError as error:
    raise UserError(f"{str(file)!r} is not a sound safetensors file: {first_line(error)}") from error
  return params_from_hf(model, slices)
