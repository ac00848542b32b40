"""Splitting a batch into parts that are processed one after another, and the checks it needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain


def split_batch(batch: Any, parts: int, model: Qwen2) -> Any:
  """Splits arrays [n, ...] into [parts, n / parts, ...].

  Every part takes prompts from every shard, so no device is idle.
  """

  def split_array(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return constrain(x, model.mesh, None, "batch")

  return jax.tree.map(split_array, batch)


def merge_parts(x: jax.Array) -> jax.Array:
  """Merges one array [parts, n / parts, ...] into [n, ...]: the inverse of `split_batch`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(-1, *x.shape[2:])


def check_positions(max_tokens: int, model: Qwen2) -> None:
  """Checks that completion positions divide over a context axis, which would otherwise not split.

  Raises:
    UserError: the mesh has a context axis and `max_tokens` does not divide over context x tensor.
  """
  shards = axis_size(model.mesh, "sequence")
  if axis_size(model.mesh, "position") > 1 and max_tokens % shards:
    raise UserError(
      f"sampling.max_tokens = {max_tokens} does not divide over mesh.context x mesh.tensor = "
      f"{shards}; make it a multiple of {shards}"
    )


def check_divides(name: str, size: int, parts: int, model: Qwen2) -> None:
  """Checks, before anything is compiled, that a batch divides into `parts` over the mesh.

  Args:
    name: the config key of the batch size, for the message.
    size: the batch size.
    parts: the number of parts it is split into.
    model: the model on its mesh.

  Raises:
    UserError: `size` does not divide.
  """
  shards = batch_shards(model.mesh)
  if size % (parts * shards):
    raise UserError(
      f"{name} = {size} does not divide into {parts} part(s) over {shards} batch shard(s) of mesh "
      f"{dict(model.mesh.shape)}; make it a multiple of {parts * shards}"
    )
