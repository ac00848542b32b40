"""Rewards shaped per unit of credit: a token (u = t) or a whole completion (u = 1). All arrays are [n, g, u]."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import inverse_entropy, relative_entropy
from gtpo_jax.arrays import masked_mean

MEANS = ("arithmetic", "geometric")


class Signals(NamedTuple):
  """What is known of every unit when rewards are shaped."""

  entropy: jax.Array  # f32[n, g, u], nats
  mask: jax.Array  # bool[n, g, u]
  correct: jax.Array  # bool[n, g, 1]
  reward: jax.Array  # f32[n, g, 1]
  penalty: jax.Array  # f32[n, g, 1]


class Shaped(NamedTuple):
  """Shaped rewards in two collections: `plus` is zero on O-, `minus` is zero on O+."""

  plus: jax.Array  # f32[n, g, u]
  minus: jax.Array  # f32[n, g, u]


class EntropyBonus(NamedTuple):
  """How entropy becomes reward: O+ earns `base + bonus * share(H)`, O- `-base - bonus * share(1 / H)`."""

  right: tuple[float, float]  # base and bonus of O+
  wrong: tuple[float, float]  # base and bonus of O-
  axes: tuple[int, ...]  # of one set of entropies that are compared, from COMPARE
  h_floor: float  # nats, the least entropy in 1 / H
  clip: tuple[float, float]  # what O+ earns is held within


def completion_entropy(entropy: jax.Array, mask: jax.Array, mean: str, h_floor: float) -> jax.Array:
  """The entropy of each whole completion, f32[n, g, 1] from f32[n, g, t]: the arithmetic or the geometric mean over its tokens."""
  if mean == "geometric":
    return jnp.exp(masked_mean(jnp.log(jnp.maximum(entropy, h_floor)), mask, -1, keepdims=True))
  return masked_mean(entropy, mask, -1, keepdims=True)


def entropy_shares(x: Signals, credit: EntropyBonus) -> Shaped:
  """The shares alone: of the entropy in O+, of its inverse in O-. Each sums to the size of its set (eqs. 2, 13)."""
  right = x.mask & x.correct
  wrong = x.mask & ~x.correct
  return Shaped(
    relative_entropy(x.entropy, right, credit.axes),
    relative_entropy(inverse_entropy(x.entropy, credit.h_floor), wrong, credit.axes),
  )


def entropy_credit(x: Signals, credit: EntropyBonus) -> Shaped:
  """Credit where the entropy is (final paper, eqs. 3-7 for tokens, 8-11 for completions; v1, eqs. 2-8 and 11-19).

  A correct completion is paid most where it hesitated, a wrong one is charged most where it was sure. The length penalty is
  added to both.
  """
  share = entropy_shares(x, credit)
  (base, bonus) = credit.right
  (cost, charge) = credit.wrong
  plus = jnp.clip(base + bonus * share.plus, *credit.clip) + x.penalty
  minus = -cost - charge * share.minus + x.penalty
  return Shaped(
    jnp.where(x.mask & x.correct, plus, 0.0), jnp.where(x.mask & ~x.correct, minus, 0.0)
  )


def plain_reward(x: Signals) -> Shaped:
  """The verifier's reward and the length penalty, the same for every unit of a completion."""
  reward = jnp.where(x.mask, x.reward + x.penalty, 0.0)
  return Shaped(jnp.where(x.correct, reward, 0.0), jnp.where(x.correct, 0.0, reward))
