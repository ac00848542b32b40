"""Low-rank adapters: adding them, separating them from the base parameters, merging them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from gtpo_jax.models.config import DTYPES, Lora
from gtpo_jax.models.number_formats import dequantize
from gtpo_jax.models.params import Params, param_shardings, stacked, unstack_layers
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import axis_size

ADAPTERS = ("lora_a", "lora_b")  # names of an adapter's parameters within its module
REPLACED = (*ADAPTERS, "kernel", "kernel_scale")  # by the merged kernel


def is_adapter(path: tuple[str, ...]) -> bool:
  """Returns whether the parameter at `path` belongs to an adapter."""
  return path[-1] in ADAPTERS


def partition(model: Transformer, params: Params) -> tuple[Params, Params]:
  """Splits parameters into (trained, frozen).

  If the model has adapters, only the adapters are trained; otherwise all parameters are.
  """
  return split_adapters(params) if model.config.lora.rank else (params, {})


def split_adapters(params: Params) -> tuple[Params, Params]:
  """Splits parameters into (adapters, base); without adapters the first is empty."""
  flat = flatten_dict(params)
  return tuple(
    unflatten_dict({path: x for path, x in flat.items() if is_adapter(path) == adapter})
    for adapter in (True, False)
  )


def combine(trained: Params, frozen: Params) -> Params:
  """Joins trained and frozen parameters; the inverse of `partition`."""
  return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen)) if frozen else trained


def without_lora(model: Transformer) -> Transformer:
  """Returns the same architecture without adapters and quantisation."""
  return Transformer(dataclasses.replace(model.config, lora=Lora(), quantize=""), model.mesh)


def add_lora(model: Transformer, params: Params, key: jax.Array) -> Params:
  """Adds fresh adapters, which leave the model's outputs unchanged.

  Args:
    model: the architecture with adapters.
    params: parameters of the base model, quantised if the architecture is.
    key: PRNG key that initialises A, the random matrix of each adapter.

  Returns:
    Parameters of `model`; the adapters are created directly in their shardings.
  """
  if not model.config.lora.rank:
    return params
  shardings, _ = partition(model, param_shardings(model))
  tokens = jnp.zeros((axis_size(model.mesh, "batch"), 2), jnp.int32)

  def init(key: jax.Array) -> Params:
    trained, _ = partition(model, nn.unbox(stacked(model).init(key, tokens)["params"]))
    return unstack_layers(model, trained)

  fresh = jax.jit(init, out_shardings=shardings)
  return combine(fresh(key), params)


def merge_lora(model: Transformer, params: Params) -> Params:
  """Returns parameters of `without_lora(model)` in which each kernel includes its adapter.

  The sum is computed in float32 and cast to `param_dtype`.
  """
  lora = model.config.lora
  if not lora.rank:
    return params
  dtype = DTYPES[model.config.param_dtype]

  def merge(module: Any) -> Any:
    if not isinstance(module, dict):
      return module
    if "lora_a" not in module and "kernel_scale" not in module:
      return {name: merge(value) for name, value in module.items()}
    kernel = module["kernel"]  # [layers, *numbered, *inputs, *outputs]
    if "kernel_scale" in module:
      kernel = dequantize(kernel, module["kernel_scale"], jnp.float32)
    others = {name: value for name, value in module.items() if name not in REPLACED}
    if "lora_a" not in module:
      return others | {"kernel": kernel.astype(dtype)}
    a = module["lora_a"]  # [layers, *numbered, *inputs, rank]
    b = module["lora_b"]  # [layers, *numbered, rank, *outputs]
    leading = a.ndim + b.ndim - kernel.ndim - 2  # the axes of layers and of matrices
    count = math.prod(kernel.shape[:leading])
    a = a.reshape(count, -1, lora.rank)
    b = b.reshape(count, lora.rank, -1)
    delta = jnp.einsum("lir,lro->lio", a, b, precision="highest").reshape(kernel.shape)
    merged = kernel.astype(jnp.float32) + delta * lora.scale
    return others | {"kernel": merged.astype(dtype)}

  return merge(params)
