"""Looking tokens up in a table whose words lie over the context and tensor axes and whose features over fsdp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.runtime.mesh import (
  gathered,
  mesh_axes,
  partition_spec,
  scattered,
  shard_number,
  where_even,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: jax.Array, tokens: jax.Array, dtype: str, mesh: Mesh) -> jax.Array:
  """The rows of `table` [v, d] for `tokens` i32[n, g, s], as `dtype`: [n, g, s, d], laid out as the residual stream.

  No device holds more of the table than its own words. Gradients are summed in float32: a frequent word has thousands of terms.
  """
  return _forward(table, tokens, dtype, mesh)[0]


def _forward(
  table: jax.Array, tokens: jax.Array, dtype: str, mesh: Mesh
) -> tuple[jax.Array, tuple]:
  rows, stream, split = _layout(tokens, mesh)

  def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
    words = gathered(table.astype(dtype), "vocab_embed", 1)
    place = place_among(table, tokens)
    found = jnp.where((place < len(words))[..., None], words[jnp.minimum(place, len(words) - 1)], 0)
    return scattered(found, "sequence", 2) if split else jax.lax.psum(found, mesh_axes("vocab"))

  return jax.shard_map(
    local, mesh=mesh, in_specs=(_TABLE, rows), out_specs=stream, check_vma=False
  )(table, tokens), (table, tokens)


def _backward(dtype: str, mesh: Mesh, residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, None]:
  table, tokens = residuals
  rows, stream, split = _layout(tokens, mesh)

  def local(table: jax.Array, tokens: jax.Array, d_out: jax.Array) -> jax.Array:
    d_out = gathered(d_out, "sequence", 2) if split else d_out
    width = table.shape[1] * jax.lax.axis_size(mesh_axes("vocab_embed"))
    d_table = (
      jnp.zeros((len(table), width), jnp.float32)
      .at[place_among(table, tokens)]
      .add(d_out.astype(jnp.float32), mode="drop")
    )
    return jax.lax.psum(scattered(d_table, "vocab_embed", 1), "data").astype(table.dtype)

  return jax.shard_map(
    local, mesh=mesh, in_specs=(_TABLE, rows, stream), out_specs=_TABLE, check_vma=False
  )(table, tokens, d_out), None


look_up.defvjp(_forward, _backward)

_TABLE = partition_spec(("vocab", "vocab_embed"))


def _layout(tokens: jax.Array, mesh: Mesh) -> tuple:
  """How the tokens lie, how what is found for them does, and whether that is split over positions."""
  split = where_even(mesh, tokens.shape[2], "sequence")
  return partition_spec(("batch",)), partition_spec(("batch", None, split)), split is not None


def place_among(words: jax.Array, tokens: jax.Array) -> jax.Array:
  """Within `shard_map`: where in this shard's `words` [v / shards, ...] the tokens stand; behind the last where they are another's."""
  place = tokens - shard_number("vocab") * len(words)
  return jnp.where((place >= 0) & (place < len(words)), place, len(words))
