"""Random keys: one per use and step, so no two uses share a random stream."""

from __future__ import annotations

import enum

import jax


class KeyStream(enum.IntEnum):
  """The uses of random keys. The numbers are part of a run's reproducibility and never change."""

  INIT = 0
  SAMPLE = 1
  EVALUATE = 2
  GUIDE = 3


def key_for(seed: int, stream: KeyStream, step: int = 0) -> jax.Array:
  """Returns the typed PRNG key of one use at one step (or generation batch)."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)
