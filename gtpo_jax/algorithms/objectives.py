"""Surrogate objectives, which are maximised: functions of ratio, advantages and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.settings import Settings


@dataclasses.dataclass(frozen=True)
class Objective:
  """A surrogate objective.

  Attributes:
    function: (ratio f32[n, g, t], advantages f32[n, g, t], settings) -> (objective f32[n, g, t] of
      each token, {metric name: tokens that the metric counts, bool[n, g, t]}).
    per_token: whether a token's objective depends only on that token's ratio and advantage.
  """

  function: Callable[[jax.Array, jax.Array, Settings], tuple[jax.Array, dict[str, jax.Array]]]
  per_token: bool


def clipped_objective(
  ratio: jax.Array, advantages: jax.Array, settings: Settings
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns `min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)` and the clipped tokens (PPO, DAPO).

  w is the ratio and A the advantage. With `dual_clip` = c > 1, the objective is at least `c A`
  where A < 0 (1912.09729, eq. 5): a token with a negative advantage has no gradient once it is more
  than c times as likely as when it was sampled.
  """
  lowest = 1 - settings.eps_low
  highest = 1 + settings.eps_high
  objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, lowest, highest) * advantages)
  if settings.dual_clip:
    bounded = jnp.maximum(objective, settings.dual_clip * advantages)
    objective = jnp.where(advantages < 0, bounded, objective)
  return objective, {
    "clip/low": (ratio < lowest) & (advantages < 0),
    "clip/high": (ratio > highest) & (advantages > 0),
  }


def capped_objective(ratio: jax.Array, advantages: jax.Array, cap: float) -> jax.Array:
  """Returns `min(w, cap) A`, the objective of the guide's tokens (2507.12931).

  w is the ratio and A the advantage. A clip range around 1 would not work here, because the guide
  is not close to the policy.
  """
  return jnp.minimum(ratio, cap) * advantages


OBJECTIVES: dict[str, Objective] = {"clip": Objective(clipped_objective, per_token=True)}
