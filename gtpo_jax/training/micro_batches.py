"""Splits a batch into parts that are processed in sequence, and checks that the sizes fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain


def split_batch(batch: Any, parts: int, model: Transformer) -> Any:
  """Splits arrays [n, ...] into [parts, n / parts, ...].

  Every part contains prompts of every batch shard, which keeps all devices busy.
  """

  def split_array(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
    return constrain(x, model.mesh, None, "batch")

  return jax.tree.map(split_array, batch)


def merge_parts(x: jax.Array) -> jax.Array:
  """Merges one array [parts, n / parts, ...] into [n, ...]: the inverse of `split_batch`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(-1, *x.shape[2:])


def check_positions_divisible(max_tokens: int, model: Transformer) -> None:
  """Checks that completion positions can be sharded over context and tensor.

  Raises:
    UserError: mesh.context is above 1 and `max_tokens` is not a multiple of context x tensor.
  """
  shards = axis_size(model.mesh, "sequence")
  if axis_size(model.mesh, "position") > 1 and max_tokens % shards:
    raise UserError(
      f"sampling.max_tokens = {max_tokens} is not a multiple of mesh.context x mesh.tensor = "
      f"{shards}; change sampling.max_tokens or the mesh"
    )


def check_batch_divisible(name: str, size: int, parts: int, model: Transformer) -> None:
  """Checks that a batch can be split into equal parts, each sharded over the mesh's batch axes.

  Args:
    name: the config key of the batch size, for the message.
    size: the batch size.
    parts: the number of parts.
    model: the model on its mesh.

  Raises:
    UserError: `size` is not a multiple of `parts` times the number of batch shards.
  """
  shards = batch_shards(model.mesh)
  if size % (parts * shards):
    raise UserError(
      f"{name} = {size} is not a multiple of {parts * shards}: {parts} part(s) x {shards} batch "
      f"shard(s) of mesh {dict(model.mesh.shape)}; change {name} or the mesh"
    )
