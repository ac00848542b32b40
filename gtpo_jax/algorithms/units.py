"""The unit of credit, which is a token (u = t) or a completion (u = 1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

MEANS = ("arithmetic", "geometric")


class Units(NamedTuple):
  """The inputs of reward shaping, per unit of credit."""

  entropy: jax.Array  # f32[n, g, u], nats
  mask: jax.Array  # bool[n, g, u]
  correct: jax.Array  # bool[n, g, 1]
  reward: jax.Array  # f32[n, g, 1]
  penalty: jax.Array  # f32[n, g, 1]; what is added on both sides, such as the length penalty
  tokens: jax.Array  # f32[n, g, u], number of tokens of the unit; 0 where mask is False

  @property
  def plus(self) -> jax.Array:
    """bool[n, g, u], O+: the units of correct completions."""
    return self.mask & self.correct

  @property
  def minus(self) -> jax.Array:
    """bool[n, g, u], O-: the units of incorrect completions."""
    return self.mask & ~self.correct


class ShapedRewards(NamedTuple):
  """The shaped rewards R+ and R- as separate arrays; R+ is 0 on O-, R- is 0 on O+."""

  plus: jax.Array  # f32[n, g, u]
  minus: jax.Array  # f32[n, g, u]


def completion_entropy(entropy: jax.Array, mask: jax.Array, mean: str, h_floor: float) -> jax.Array:
  """Returns the mean entropy of each completion over its tokens, in nats.

  Args:
    entropy: f32[n, g, t], nats.
    mask: bool[n, g, t].
    mean: one of `MEANS`.
    h_floor: nats; lower bound applied to the entropies before the geometric mean.

  Returns:
    f32[n, g, 1].
  """
  if mean == "geometric":
    return jnp.exp(masked_mean(jnp.log(jnp.maximum(entropy, h_floor)), mask, -1, keepdims=True))
  return masked_mean(entropy, mask, -1, keepdims=True)
