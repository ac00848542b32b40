"""Surrogate objectives, to be maximised: functions of ratio, advantages and settings."""

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
    function: (ratio f32[n, g, t], advantages f32[n, g, t], settings) -> the objective of each token
      f32[n, g, t], and by metric name the tokens counted by that metric, bool[n, g, t].
    per_token: whether a token's objective depends only on that token's ratio and advantage.
  """

  function: Callable[[jax.Array, jax.Array, Settings], tuple[jax.Array, dict[str, jax.Array]]]
  per_token: bool


def clipped_objective(
  ratio: jax.Array, advantages: jax.Array, settings: Settings
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns `min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)`, and the tokens clipped (PPO, DAPO).

  With `dual_clip` c > 1 the objective is at least `c A` where A < 0 (1912.09729, eq. 5), which
  bounds the gradient of an incorrect token that has become likely.
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
  """Returns `min(w, cap) A`, the objective of a guide's tokens (2507.12931).

  The guide is not close to the policy, so a clip range around 1 would not fit.
  """
  return jnp.minimum(ratio, cap) * advantages


OBJECTIVES: dict[str, Objective] = {"clip": Objective(clipped_objective, per_token=True)}
