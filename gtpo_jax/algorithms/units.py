"""The unit of credit: a token (u = t) or a whole completion (u = 1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

MEANS = ("arithmetic", "geometric")


class Units(NamedTuple):
  """What shaping knows about each unit of credit."""

  entropy: jax.Array  # f32[n, g, u], nats
  mask: jax.Array  # bool[n, g, u]
  correct: jax.Array  # bool[n, g, 1]
  reward: jax.Array  # f32[n, g, 1]
  penalty: jax.Array  # f32[n, g, 1], <= 0; length shaping

  @property
  def plus(self) -> jax.Array:
    """bool[n, g, u], the units of O+: those of correct completions."""
    return self.mask & self.correct

  @property
  def minus(self) -> jax.Array:
    """bool[n, g, u], the units of O-: those of incorrect completions."""
    return self.mask & ~self.correct


class ShapedRewards(NamedTuple):
  """Shaped rewards as two collections: R+ is zero on O-, R- is zero on O+."""

  plus: jax.Array  # f32[n, g, u]
  minus: jax.Array  # f32[n, g, u]


def completion_entropy(entropy: jax.Array, mask: jax.Array, mean: str, h_floor: float) -> jax.Array:
  """Returns the mean entropy of each completion over its tokens, in nats.

  Args:
    entropy: f32[n, g, t], nats.
    mask: bool[n, g, t].
    mean: one of `MEANS`.
    h_floor: nats; the geometric mean counts entropies below it as `h_floor`.

  Returns:
    f32[n, g, 1].
  """
  if mean == "geometric":
    return jnp.exp(masked_mean(jnp.log(jnp.maximum(entropy, h_floor)), mask, -1, keepdims=True))
  return masked_mean(entropy, mask, -1, keepdims=True)
