"""Objectives that clip the importance ratio, or log-ratios."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives.base import (
  CLIP_RANGE,
  Objective,
  ObjectiveInputs,
  ObjectiveOutputs,
  RatioObjective,
)
from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.fields import ABOVE_0, INFINITY, SHARE, number, setting

_LOG_RANGE = "the log-ratio of a token is clipped to [-eps_low, eps_high]."


def dual_clip_setting(default: float) -> float:
  """Returns the declaration of the setting `dual_clip`."""
  return setting(
    default,
    "lower bound of the objective of tokens with a negative advantage, as a multiple of the "
    "advantage (1912.09729, eq. 5); 0 for off.",
    number(lambda x: x == 0 or 1 < x < INFINITY, "above 1 and finite, or 0 for off"),
  )


def clip_ratio(ratio: jax.Array, advantages: jax.Array, lowest: float, highest: float) -> jax.Array:
  """Returns `min(r A, clip(r, lowest, highest) A)`, with the shape of both arrays."""
  return jnp.minimum(ratio * advantages, jnp.clip(ratio, lowest, highest) * advantages)


@dataclasses.dataclass(frozen=True)
class Clip(RatioObjective):
  """`min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)` (PPO, DAPO).

  With `dual_clip` = c > 1, the objective is at least `c A` where `A < 0`: a token with a negative
  advantage has no gradient once it is more than c times as likely as when it was sampled.
  """

  name: ClassVar[str] = "clip"
  paper: ClassVar[str] = "1707.06347, 2503.14476"

  eps_low: float = setting(0.2, CLIP_RANGE, SHARE)
  eps_high: float = setting(0.28, CLIP_RANGE, ABOVE_0)
  dual_clip: float = dual_clip_setting(0.0)

  def __post_init__(self):
    super().__post_init__()
    self._check_order("eps_low", "eps_high")

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    lowest = 1 - self.eps_low
    highest = 1 + self.eps_high
    objective = clip_ratio(x.ratio, x.advantages, lowest, highest)
    if self.dual_clip:
      bounded = jnp.maximum(objective, self.dual_clip * x.advantages)
      objective = jnp.where(x.advantages < 0, bounded, objective)
    return objective, {
      "clip/low": (x.ratio < lowest) & (x.advantages < 0),
      "clip/high": (x.ratio > highest) & (x.advantages > 0),
    }


@dataclasses.dataclass(frozen=True)
class Gmpo(Objective):
  """`A exp(mean_t(s min(s l_t, s clip(l_t, -eps_low, eps_high))))` (GMPO, 2507.20673).

  l_t is the log-ratio of token t of the completion and s the sign of A. All tokens of a completion
  have the same objective.
  """

  name: ClassVar[str] = "gmpo"
  paper: ClassVar[str] = "2507.20673"
  per_token: ClassVar[bool] = False
  per_completion: ClassVar[bool] = True

  eps_low: float = setting(0.4, _LOG_RANGE, SHARE)
  eps_high: float = setting(0.4, _LOG_RANGE, ABOVE_0)

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    sign = jnp.sign(x.advantages)
    log_ratio = jnp.where(x.mask, x.log_ratio, 0.0)
    clipped = jnp.clip(log_ratio, -self.eps_low, self.eps_high)
    bounded = sign * jnp.minimum(sign * log_ratio, sign * clipped)
    ratio = jnp.exp(masked_mean(bounded, x.mask, -1, keepdims=True))
    return ratio * x.advantages, {
      "clip/low": (log_ratio < -self.eps_low) & (x.advantages < 0),
      "clip/high": (log_ratio > self.eps_high) & (x.advantages > 0),
    }
