"""Adapters apart from the matrices that they stand beside: what is trained, what is frozen, what is merged."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from gtpo_jax.models.presets import Lora
from gtpo_jax.models.qwen2 import Params, Qwen2, param_shardings


def is_adapter(path: tuple[str, ...]) -> bool:
  """Whether the parameter at `path` belongs to an adapter."""
  return path[-1] in ("lora_a", "lora_b")


def partition(model: Qwen2, params: Params) -> tuple[Params, Params]:
  """Parameters as (trained, frozen): with adapters, those alone are trained; without, everything is."""
  if not model.config.lora.rank:
    return params, {}
  flat = flatten_dict(params)
  return tuple(
    unflatten_dict({path: x for path, x in flat.items() if is_adapter(path) == trained})
    for trained in (True, False)
  )


def combine(trained: Params, frozen: Params) -> Params:
  """The inverse of `partition`."""
  return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen)) if frozen else trained


def without_lora(model: Qwen2) -> Qwen2:
  """The same architecture without adapters."""
  return Qwen2(dataclasses.replace(model.config, lora=Lora()), model.mesh)


def add_lora(model: Qwen2, params: Params, key: jax.Array) -> Params:
  """Parameters of `model` from those of `without_lora(model)`: fresh adapters that change nothing yet, where they belong."""
  if not model.config.lora.rank:
    return params
  shardings, _ = partition(model, param_shardings(model))
  fresh = jax.jit(
    lambda k: partition(model, nn.unbox(model.init(k, jnp.zeros((1, 2), jnp.int32))["params"]))[0],
    out_shardings=shardings,
  )
  return combine(fresh(key), params)


def merge_lora(model: Qwen2, params: Params) -> Params:
  """Parameters of `without_lora(model)`: each kernel with its adapter added, in float32, and back in its own type."""
  lora = model.config.lora
  if not lora.rank:
    return params

  def merged(module: Any) -> Any:
    if not isinstance(module, dict):
      return module
    if "lora_a" not in module:
      return {name: merged(value) for name, value in module.items()}
    kernel = module["kernel"]  # [layer, in..., out...], [layer, in..., r], [layer, r, out...]
    a = module["lora_a"]
    b = module["lora_b"]
    flat_a = a.reshape(len(a), -1, lora.rank)
    flat_b = b.reshape(len(b), lora.rank, -1)
    delta = jnp.einsum("lir,lro->lio", flat_a, flat_b, precision="highest").reshape(kernel.shape)
    whole = (kernel.astype(jnp.float32) + delta * (lora.alpha / lora.rank)).astype(kernel.dtype)
    return {name: value for name, value in module.items() if name not in ("lora_a", "lora_b")} | {
      "kernel": whole
    }

  return merged(params)
