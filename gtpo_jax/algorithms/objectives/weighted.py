"""Objectives that give each token a weight, instead of clipping its ratio."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutputs, RatioObjective
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_1, SHARE, setting

_WEIGHT_RANGE = "the weight of a token is clipped to [1 - eps_low, 1 + eps_high]."
_DELTA = (
  "how far the probability of a token may fall (delta_low) or rise (delta_high), in the direction "
  "of its advantage, before the token has no gradient."
)


def clip_weight(x: ObjectiveInputs, lowest: float, highest: float) -> jax.Array:
  """Returns `sg(clip(r, lowest, highest)) A log pi`, f32[n, g, t]."""
  weight = jax.lax.stop_gradient(jnp.clip(x.ratio, lowest, highest))
  return weight * x.advantages * x.log_probs


@dataclasses.dataclass(frozen=True)
class Cispo(RatioObjective):
  """`sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi` (CISPO, 2506.13585, eqs. 4-5).

  Every token keeps a gradient; only its weight is clipped.
  """

  name: ClassVar[str] = "cispo"
  paper: ClassVar[str] = "2506.13585"

  eps_low: float = setting(1.0, _WEIGHT_RANGE, SHARE)  # 1: no lower bound
  eps_high: float = setting(4.0, _WEIGHT_RANGE, ABOVE_0)

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    lowest = 1 - self.eps_low
    highest = 1 + self.eps_high
    return clip_weight(x, lowest, highest), {
      "clip/low": x.ratio < lowest,
      "clip/high": x.ratio > highest,
    }


@dataclasses.dataclass(frozen=True)
class Sapo(RatioObjective):
  """`(4 / tau) sigmoid(tau (r - 1)) A` (SAPO, 2511.20347).

  tau is `tau_positive` where `A > 0` and `tau_negative` elsewhere. The derivative with respect to r
  is A at r = 1 and decays smoothly to 0 on both sides. `clip/soft` counts the tokens for which its
  absolute value is below `|A| / 2`.
  """

  name: ClassVar[str] = "sapo"
  paper: ClassVar[str] = "2511.20347"

  tau_positive: float = setting(
    1.0, "the temperature of the gate for tokens with a positive advantage.", ABOVE_0
  )
  tau_negative: float = setting(
    1.05, "the temperature of the gate for tokens without a positive advantage.", ABOVE_0
  )

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    tau = jnp.where(x.advantages > 0, self.tau_positive, self.tau_negative)
    gate = jax.nn.sigmoid(tau * (x.ratio - 1))
    return 4 / tau * gate * x.advantages, {"clip/soft": 4 * gate * (1 - gate) < 0.5}


@dataclasses.dataclass(frozen=True)
class Dppo(RatioObjective):
  """`sg(min(r, ratio_cap)) A log pi`, or 0 outside the trust region (DPPO, 2602.04879).

  A token is outside if its probability has changed too much in the direction of its advantage:
  `pi - pi_old > delta_high` where `A > 0`, and `pi - pi_old < -delta_low` elsewhere. This is the
  binary approximation of the total variation (eq. 13).
  """

  name: ClassVar[str] = "dppo"
  paper: ClassVar[str] = "2602.04879"
  ratios: ClassVar[tuple[str, ...]] = ("token",)

  delta_low: float = setting(0.2, _DELTA, SHARE)
  delta_high: float = setting(0.2, _DELTA, SHARE)
  ratio_cap: float = setting(5.0, "upper bound of the importance ratio.", AT_LEAST_1)

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    change = jnp.exp(x.log_probs) - jnp.exp(x.log_probs_old)
    too_high = (x.advantages > 0) & (change > self.delta_high)
    too_low = (x.advantages <= 0) & (change < -self.delta_low)
    weight = jnp.where(too_high | too_low, 0.0, jnp.minimum(x.ratio, self.ratio_cap))
    return jax.lax.stop_gradient(weight) * x.advantages * x.log_probs, {
      "clip/low": too_low,
      "clip/high": too_high,
      "clip/cap": x.ratio > self.ratio_cap,
    }
