"""Token embedding with a table that is sharded over the vocabulary and over the features.

The vocabulary is split over the context and tensor axes, the features over fsdp. The logical axis
"sequence" is the positions of a sequence between layers, split over the context and tensor axes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.runtime.mesh import (
  all_gather_axis,
  divisible_axis,
  mesh_axes,
  partition_spec,
  reduce_scatter_axis,
  shard_index,
  sum_shards,
)

_TABLE = partition_spec(("vocab", "vocab_embed"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(table: jax.Array, tokens: jax.Array, dtype: str, mesh: Mesh) -> jax.Array:
  """Returns the rows of `table` [v, d] for `tokens` i32[n, g, s], as `dtype` [n, g, s, d].

  The result is split like the residual stream. No device holds more of the table than its own
  vocabulary shard. Gradients are summed in float32, because the gradient of a frequent token is a
  sum of thousands of terms.
  """
  return _forward(table, tokens, dtype, mesh)[0]


def local_ids(vocab_shard: jax.Array, tokens: jax.Array) -> jax.Array:
  """Within `shard_map`: converts token ids to row indices of this vocabulary shard.

  Args:
    vocab_shard: [v / shards, ...], this shard's rows.
    tokens: i32[...], global ids.

  Returns:
    i32[...]; for tokens of other shards `len(vocab_shard)`, which is out of bounds.
  """
  rows = len(vocab_shard)
  index = tokens - shard_index("vocab") * rows
  return jnp.where((index >= 0) & (index < rows), index, rows)


def _forward(
  table: jax.Array, tokens: jax.Array, dtype: str, mesh: Mesh
) -> tuple[jax.Array, tuple]:
  token_spec, embedding_spec, split_positions = _layout(tokens, mesh)

  def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
    vocab_shard = all_gather_axis(table.astype(dtype), "vocab_embed", 1)
    ids = local_ids(table, tokens)
    last = len(vocab_shard) - 1
    # One shard has a token's row; the other shards contribute zeros.
    x = jnp.where((ids <= last)[..., None], vocab_shard[jnp.minimum(ids, last)], 0)
    if split_positions:
      return reduce_scatter_axis(x, "sequence", 2)
    return sum_shards(x, mesh_axes("vocab"))

  lookup = jax.shard_map(
    local, mesh=mesh, in_specs=(_TABLE, token_spec), out_specs=embedding_spec, check_vma=False
  )
  return lookup(table, tokens), (table, tokens)


def _backward(dtype: str, mesh: Mesh, residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, None]:
  table, tokens = residuals
  token_spec, embedding_spec, split_positions = _layout(tokens, mesh)

  def local(table: jax.Array, tokens: jax.Array, d_out: jax.Array) -> jax.Array:
    if split_positions:
      d_out = all_gather_axis(d_out, "sequence", 2)
    width = table.shape[1] * jax.lax.axis_size(mesh_axes("vocab_embed"))
    d_table = jnp.zeros((len(table), width), jnp.float32)
    ids = local_ids(table, tokens)
    d_table = d_table.at[ids].add(d_out.astype(jnp.float32), mode="drop")
    d_table = reduce_scatter_axis(d_table, "vocab_embed", 1)
    return sum_shards(d_table, "data").astype(table.dtype)

  gradient = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(_TABLE, token_spec, embedding_spec),
    out_specs=_TABLE,
    check_vma=False,
  )
  return gradient(table, tokens, d_out), None


embedding_lookup.defvjp(_forward, _backward)


def _layout(tokens: jax.Array, mesh: Mesh) -> tuple:
  """Returns the specs of tokens and embeddings, and whether positions are split."""
  split = divisible_axis(mesh, tokens.shape[2], "sequence")
  return partition_spec(("batch",)), partition_spec(("batch", None, split)), split is not None
