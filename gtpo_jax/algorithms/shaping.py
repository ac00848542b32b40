"""Rewards shaped per unit of credit: a token (u = t) or a whole completion (u = 1). All arrays are [n, g, u]."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import COMPARE, inverse_entropy, relative_entropy
from gtpo_jax.arrays import masked_mean


class Signals(NamedTuple):
  """What is known of every unit when rewards are shaped."""

  entropy: jax.Array  # f32[n, g, u], nats
  mask: jax.Array     # bool[n, g, u]
  correct: jax.Array  # bool[n, g, 1]
  reward: jax.Array   # f32[n, g, 1]
  penalty: jax.Array  # f32[n, g, 1]


class Shaped(NamedTuple):
  """Shaped rewards in two collections: `plus` is zero on O-, `minus` is zero on O+."""

  plus: jax.Array   # f32[n, g, u]
  minus: jax.Array  # f32[n, g, u]


def completion_entropy(entropy: jax.Array, mask: jax.Array, mean: str, h_floor: float) -> jax.Array:
  """The entropy of each whole completion, f32[n, g, 1] from f32[n, g, t]: the arithmetic or the geometric mean over its tokens."""
  if mean == "geometric":
    return jnp.exp(masked_mean(jnp.log(jnp.maximum(entropy, h_floor)), mask, -1, keepdims=True))
  return masked_mean(entropy, mask, -1, keepdims=True)


def entropy_credit(signals: Signals, *, base: float, bonus: float, compare: str, scope: str, h_floor: float) -> Shaped:
  """Credit where the entropy is (final paper, eqs. 3-7 for tokens, 8-11 for completions).

  O+ gets `base + bonus * share(H)`: a correct completion is paid most where it hesitated. O- gets
  `-base - bonus * share(1 / H)`: a wrong one is charged most where it was sure.
  """
  axes = COMPARE[compare, scope]
  right, wrong = signals.mask & signals.correct, signals.mask & ~signals.correct
  plus = base + bonus * relative_entropy(signals.entropy, right, axes)
  minus = -base - bonus * relative_entropy(inverse_entropy(signals.entropy, h_floor), wrong, axes)
  return Shaped(jnp.where(right, plus, 0.0), jnp.where(wrong, minus, 0.0))
