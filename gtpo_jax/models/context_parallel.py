"""The queries of each context shard: causal attention costs more for late positions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.runtime.mesh import mesh_axes, shard_index


class QueryShard(NamedTuple):
  """The positions of a stream that this shard's queries have."""

  positions: np.ndarray  # i32[shards, s], the positions of every shard's queries
  index: jax.Array  # i32[], this shard


def contiguous_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: splits `length` positions into one contiguous run per context shard."""
  positions = np.arange(length, dtype=np.int32).reshape(shards, -1)
  return QueryShard(positions, shard_index("position"))


def balanced_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: gives each shard one early and one late run, so that all see as many keys.

  Of 2 * shards runs, run i is paired with the i-th from the end (2407.21783, section 3.3.2).
  `exchange_halves` moves the queries from `contiguous_queries`.
  """
  runs = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
  positions = np.concatenate([runs[::2], runs[1::2][::-1]], axis=1)
  return QueryShard(positions, shard_index("position"))


def exchange_halves(x: jax.Array, shards: int) -> jax.Array:
  """Within `shard_map`: moves `x` [n, g, h, s, e] between contiguous and balanced positions.

  It is its own inverse. Every shard keeps its first half; the second halves change places between
  the first shard and the last, the second and the last but one, and so on.
  """
  first, second = jnp.split(x, 2, axis=3)
  pairs = [(i, shards - 1 - i) for i in range(shards)]
  second = jax.lax.ppermute(second, mesh_axes("position"), pairs)
  return jnp.concatenate([first, second], axis=3)
