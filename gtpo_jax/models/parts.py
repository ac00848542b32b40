"""Which queries of a stream a shard of the context axis attends with: causal attention costs the late ones more."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.runtime.mesh import mesh_axes, shard_number


class Part(NamedTuple):
  """A shard's queries among all of a stream."""

  places: np.ndarray  # i32[parts, s], where the queries of each part stand
  number: jax.Array  # i32[], the part that is here


def contiguous(length: int, parts: int) -> Part:
  """Within `shard_map`: a stream of `length` positions in as many runs as the context axis has shards."""
  return Part(np.arange(length, dtype=np.int32).reshape(parts, -1), shard_number("position"))


def paired(length: int, parts: int) -> Part:
  """As `contiguous`, but that a shard has one run of the first half and one of the second, so that all see as many keys together.

  Of 2 parts runs, number i is together with the i-th from the end (2407.21783, section 3.3.2); `exchange` brings them there.
  """
  runs = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
  return Part(np.concatenate([runs[::2], runs[1::2][::-1]], axis=1), shard_number("position"))


def exchange(x: jax.Array, parts: int) -> jax.Array:
  """Within `shard_map`: queries or what they saw [n, g, h, s, e], from `contiguous` parts to `paired` ones, and from these back.

  Every shard keeps its first half; the second halves change places, the first shard's with the last's.
  """
  kept, sent = jnp.split(x, 2, axis=3)
  return jnp.concatenate(
    [
      kept,
      jax.lax.ppermute(sent, mesh_axes("position"), [(i, parts - 1 - i) for i in range(parts)]),
    ],
    axis=3,
  )
