"""Reward shaping: functions (units, settings) -> (shaped rewards, diagnostics).

All arrays are [n, g, u], where a unit of credit is a token (u = t) or a completion (u = 1). O+ and
O- are the units of correct and of incorrect completions. rel(x) is x divided by its mean over the
comparison set (`relative_entropy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import (
  COMPARE,
  effective_participants,
  inverse_entropy,
  relative_entropy,
)
from gtpo_jax.algorithms.settings import Settings
from gtpo_jax.algorithms.units import ShapedRewards, Units

# (units, settings) -> (shaped rewards, diagnostics f32[] by metric name)
Shaping = Callable[[Units, Settings], tuple[ShapedRewards, dict[str, jax.Array]]]

# The base reward and the weight of the entropy term.
BaseAndWeight = tuple[float, float]


class EntropyWeights(NamedTuple):
  """The parameters of `shape_by_entropy`.

  The shaped reward is `base + weight * rel(H)` on O+ and `-base - weight * rel(1 / H)` on O-.
  """

  plus: BaseAndWeight  # on O+
  minus: BaseAndWeight  # on O-
  axes: tuple[int, ...]  # of one comparison set, from COMPARE
  h_floor: float  # nats; lower bound applied to H before 1 / H
  clip: tuple[float, float]  # range of the reward on O+, before `Units.penalty` is added


def plain_reward(x: Units, _: Settings) -> tuple[ShapedRewards, dict[str, jax.Array]]:
  """Returns the reward plus the length penalty, equal for all units of a completion."""
  reward = jnp.where(x.mask, x.reward + x.penalty, 0.0)
  plus = jnp.where(x.correct, reward, 0.0)
  minus = jnp.where(x.correct, 0.0, reward)
  return ShapedRewards(plus, minus), {}


def entropy_shaping(
  plus: Callable[[Settings], BaseAndWeight],
  minus: Callable[[Settings], BaseAndWeight] = lambda s: (0.0, 0.0),
) -> Shaping:
  """Returns the reward shaping of GTPO and GRPO-S with the given base rewards and weights.

  The shaping also reads the settings `compare`, `scope` and `h_floor`, and `floor` and `kappa`, the
  clip range of v1, eqs. 11-12. Without `floor` the lower bound is 0, which has no effect because
  the reward is never negative before the length penalty. Without `kappa`, or with 0, there is no
  upper bound.

  Args:
    plus: settings -> (base reward, weight of the entropy term) on O+.
    minus: the same for O-, as magnitudes: the shaped rewards are their negatives. By default the
      reward on O- is 0.
  """

  def shaping(x: Units, settings: Settings) -> tuple[ShapedRewards, dict[str, jax.Array]]:
    base, _ = plus(settings)
    lowest = settings.floor or 0.0
    highest = base + base / settings.kappa if settings.kappa else float("inf")
    weights = EntropyWeights(
      plus(settings),
      minus(settings),
      COMPARE[settings.compare or "position", settings.scope],
      settings.h_floor,
      (lowest, highest),
    )
    return shape_by_entropy(x, weights), share_metrics(x, weights.axes, weights.h_floor)

  return shaping


def shape_by_entropy(x: Units, weights: EntropyWeights) -> ShapedRewards:
  """Shapes rewards by entropy (2508.04349 final, eqs. 3-11; v1, eqs. 2-8 and 11-19).

  A correct unit earns most where the policy was uncertain; an incorrect unit is penalised most
  where the policy was confident. `Units.penalty` is added on both sides.
  """
  shares = entropy_shares(x, weights.axes, weights.h_floor)
  base, weight = weights.plus
  plus = jnp.clip(base + weight * shares.plus, *weights.clip) + x.penalty
  base, weight = weights.minus
  minus = -base - weight * shares.minus + x.penalty
  return ShapedRewards(jnp.where(x.plus, plus, 0.0), jnp.where(x.minus, minus, 0.0))


def entropy_shares(x: Units, axes: tuple[int, ...], h_floor: float) -> ShapedRewards:
  """Returns rel(H) on O+ and rel(1/H) on O- (v1, eqs. 2 and 13).

  The values of a comparison set sum to its size.
  """
  return ShapedRewards(
    relative_entropy(x.entropy, x.plus, axes),
    relative_entropy(inverse_entropy(x.entropy, h_floor), x.minus, axes),
  )


def share_metrics(x: Units, axes: tuple[int, ...], h_floor: float) -> dict[str, jax.Array]:
  """Returns diagnostics of how the entropy terms distribute the credit, f32[] each.

  `credit/participants_*` is the effective fraction of a comparison set that shares its credit.
  `credit/conservation_residual` compares the sum of rel(H) over O+ with the number of units in O+,
  and that of rel(1/H) over O- with the number in O-. It is the larger absolute difference per unit,
  and differs from 0 only by rounding.
  """
  shares = entropy_shares(x, axes, h_floor)
  residual = lambda share, side: jnp.abs(share.sum() - side.sum()) / jnp.maximum(side.sum(), 1)
  return {
    "credit/participants_correct": effective_participants(shares.plus, x.plus, axes),
    "credit/participants_incorrect": effective_participants(shares.minus, x.minus, axes),
    "credit/conservation_residual": jnp.maximum(
      residual(shares.plus, x.plus), residual(shares.minus, x.minus)
    ),
  }
