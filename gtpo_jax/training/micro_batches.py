"""A batch cut into parts that are worked through one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain


def split(batch: Any, parts: int, model: Qwen2) -> Any:
  """Arrays [n, ...] -> [parts, n / parts, ...]; every part takes prompts from every shard, so that no device waits."""

  def one(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return constrain(x, model.mesh, None, "batch")

  return jax.tree.map(one, batch)


def join(x: jax.Array) -> jax.Array:
  """The inverse of `split`, of one array."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(-1, *x.shape[2:])


def check_positions(max_tokens: int, model: Qwen2) -> None:
  """Refuses completions whose positions do not divide where there is a context axis: somewhere it would then split nothing."""
  shards = axis_size(model.mesh, "sequence")
  if axis_size(model.mesh, "position") > 1 and max_tokens % shards:
    raise UserError(
      f"sampling.max_tokens = {max_tokens} does not divide over mesh.context x mesh.tensor = {shards}; make it a multiple "
      f"of {shards}"
    )


def check_divides(name: str, size: int, parts: int, model: Qwen2) -> None:
  """Refuses a batch of `size` that does not divide into `parts` over the mesh, before anything is compiled."""
  shards = batch_shards(model.mesh)
  if size % (parts * shards):
    raise UserError(
      f"{name} = {size} does not divide into {parts} part(s) over {shards} batch shard(s) of mesh "
      f"{dict(model.mesh.shape)}; make it a multiple of {parts * shards}"
    )
