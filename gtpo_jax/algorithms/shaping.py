"""Reward shaping: functions (units, settings) -> (shaped rewards, diagnostics).

All arrays are [n, g, u], where a unit of credit is a token (u = t) or a completion (u = 1).
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

# Returns shaped rewards, and diagnostics f32[] by metric name.
Shaping = Callable[[Units, Settings], tuple[ShapedRewards, dict[str, jax.Array]]]

# The base reward and the weight of the entropy share.
BaseAndWeight = tuple[float, float]


class EntropyWeights(NamedTuple):
  """How entropy becomes reward.

  O+ earns `base + weight * share(H)`, O- earns `-base - weight * share(1 / H)`.
  """

  plus: BaseAndWeight  # on O+
  minus: BaseAndWeight  # on O-
  axes: tuple[int, ...]  # of one comparison set, from COMPARE
  h_floor: float  # nats; the lowest entropy in 1 / H
  clip: tuple[float, float]  # bounds of the reward on O+, before the length penalty


def plain_reward(x: Units, _: Settings) -> tuple[ShapedRewards, dict[str, jax.Array]]:
  """Returns the verifier's reward plus the length penalty, equal for all units of a completion."""
  reward = jnp.where(x.mask, x.reward + x.penalty, 0.0)
  plus = jnp.where(x.correct, reward, 0.0)
  minus = jnp.where(x.correct, 0.0, reward)
  return ShapedRewards(plus, minus), {}


def entropy_shaping(
  plus: Callable[[Settings], BaseAndWeight],
  minus: Callable[[Settings], BaseAndWeight] = lambda s: (0.0, 0.0),
) -> Shaping:
  """Returns the shaping of GTPO and GRPO-S with the given base rewards and weights.

  Besides these it reads `compare`, `scope` and `h_floor`, and the clip range of v1, eqs. 11-12:
  `floor` and `kappa`, which are off in recipes without these settings.

  Args:
    plus: settings -> base reward and weight of the entropy share on O+.
    minus: the same on O-; rewards there are negative. Default: O- earns nothing.
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

  A correct unit earns most where the policy hesitated, an incorrect one is charged most where it
  was confident. The length penalty is added to both.
  """
  shares = entropy_shares(x, weights.axes, weights.h_floor)
  base, weight = weights.plus
  plus = jnp.clip(base + weight * shares.plus, *weights.clip) + x.penalty
  base, weight = weights.minus
  minus = -base - weight * shares.minus + x.penalty
  return ShapedRewards(jnp.where(x.plus, plus, 0.0), jnp.where(x.minus, minus, 0.0))


def entropy_shares(x: Units, axes: tuple[int, ...], h_floor: float) -> ShapedRewards:
  """Returns share(H) on O+ and share(1/H) on O- (v1, eqs. 2 and 13).

  Each comparison set's shares sum to its size.
  """
  return ShapedRewards(
    relative_entropy(x.entropy, x.plus, axes),
    relative_entropy(inverse_entropy(x.entropy, h_floor), x.minus, axes),
  )


def share_metrics(x: Units, axes: tuple[int, ...], h_floor: float) -> dict[str, jax.Array]:
  """Returns how the shares spread the credit, f32[] each.

  `credit/participants_*` is the effective fraction of a comparison set that carries its credit.
  `credit/conservation_residual` is the difference between the sum of the shares of O+ or O- and
  their number, per unit; it differs from 0 only by rounding.
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
