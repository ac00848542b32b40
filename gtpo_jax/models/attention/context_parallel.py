"""Assigns the queries of a sequence to context shards.

Under a causal mask a late query attends to more keys than an early one, so contiguous shards have
unequal work and balanced shards have equal work. The logical axis "position" is the positions of a
sequence within a layer, split over the mesh axis context.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.runtime.mesh import mesh_axes, shard_index


class QueryShard(NamedTuple):
  """The positions in the sequence of the queries on this shard."""

  positions: np.ndarray  # i32[shards, s], the positions of the queries on every shard
  index: jax.Array  # i32[], the index of this shard


def contiguous_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: splits `length` positions into one contiguous run per context shard."""
  positions = np.arange(length, dtype=np.int32).reshape(shards, -1)
  return QueryShard(positions, shard_index("position"))


def balanced_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: gives each shard an early and a late run, so that all have equal work.

  The positions are cut into 2 * shards runs, and run i is paired with the i-th run from the end
  (2407.21783, section 3.3.2). `exchange_halves` moves queries from the positions of
  `contiguous_queries` to these.
  """
  runs = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
  positions = np.concatenate([runs[::2], runs[1::2][::-1]], axis=1)
  return QueryShard(positions, shard_index("position"))


def exchange_halves(x: jax.Array, shards: int) -> jax.Array:
  """Within `shard_map`: moves `x` [n, g, h, s, e] between contiguous and balanced positions.

  Shard i keeps the first half of its positions and exchanges the second half with shard
  `shards - 1 - i`. The exchange is its own inverse.
  """
  first, second = jnp.split(x, 2, axis=3)
  pairs = [(i, shards - 1 - i) for i in range(shards)]
  second = jax.lax.ppermute(second, mesh_axes("position"), pairs)
  return jnp.concatenate([first, second], axis=3)
