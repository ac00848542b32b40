"""Which queries of a stream a shard of the context axis attends with: causal attention costs the late ones more."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.parallel import mesh_axes, shard_number


class Part(NamedTuple):
  """A shard's queries among all of a stream."""

  places: np.ndarray  # i32[parts, s], where the queries of each part stand
  number: jax.Array   # i32[], the part that is here


def contiguous(length: int, parts: int) -> Part:
  """Within `shard_map`: a stream of `length` positions in as many runs as the context axis has shards."""
  return Part(np.arange(length, dtype=np.int32).reshape(parts, -1), shard_number("position"))


def paired(length: int, parts: int) -> Part:
  """As `contiguous`, but that a shard has one run of the first half and one of the second, so that all see as many keys together.

  Of 2 parts runs, number i is together with the i-th from the end (2407.21783, section 3.3.2); `exchange` brings them there.
  """
  held = np.zeros((parts, 2), int)
  for half, pairs in enumerate(_routes(parts)):
    for source, target in pairs:
      held[target, half] = 2 * source + half
  return Part(np.arange(length, dtype=np.int32).reshape(2 * parts, -1)[held].reshape(parts, -1), shard_number("position"))


def exchange(x: jax.Array, parts: int, back: bool = False) -> jax.Array:
  """Within `shard_map`: queries or what they saw [n, g, h, s, e], from `contiguous` parts to `paired` ones, or back."""
  routes = [[pair[::-1] if back else pair for pair in pairs] for pairs in _routes(parts)]
  halves = zip(jnp.split(x, 2, axis=3), routes, strict=True)
  return jnp.concatenate([jax.lax.ppermute(half, mesh_axes("position"), pairs) for half, pairs in halves], axis=3)


def _routes(parts: int) -> list[list[tuple[int, int]]]:
  """(from, to) of every shard's first half, and of every second half: a permutation of the shards each."""
  return [[(i, min(run, 2 * parts - 1 - run)) for i, run in enumerate(range(half, 2 * parts, 2))] for half in range(2)]
