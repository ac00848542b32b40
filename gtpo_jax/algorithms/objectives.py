"""Surrogate objectives, which are maximised: functions of ratios, log-probs and advantages.

In the formulas, r is the importance ratio, A the advantage, pi and pi_old the probability of the
token under the trained and under the sampling policy, and sg(x) is x without a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.ratios import LOG_RATIO_BOUND
from gtpo_jax.algorithms.selection import covariance_band, highest_covariance, top_share
from gtpo_jax.arrays import masked_mean

if TYPE_CHECKING:
  from gtpo_jax.algorithms.settings import Settings


class ObjectiveInputs(NamedTuple):
  """What an objective is computed from. Values where `mask` is False have no meaning."""

  ratio: jax.Array  # f32[n, g, t], the importance ratio that the algorithm uses
  log_probs: jax.Array  # f32[n, g, t], nats, of the policy being trained
  log_probs_old: jax.Array  # f32[n, g, t], nats, of the policy that sampled the tokens
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss
  selected: jax.Array | None = None  # bool[n, g, t], from the objective's `select`

  @property
  def log_ratio(self) -> jax.Array:
    """f32[n, g, t], nats: log pi - log pi_old, clamped to +-20."""
    return jnp.clip(self.log_probs - self.log_probs_old, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# The objective f32[n, g, t] of each token, and {metric name: the tokens it counts, bool[n, g, t]}.
ObjectiveOutputs = tuple[jax.Array, dict[str, jax.Array]]
# (inputs, entropy f32[n, g, t] of the sampling policy in nats, settings, PRNG key) -> bool[n, g, t]
Select = Callable[[ObjectiveInputs, jax.Array | None, "Settings", jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """A surrogate objective.

  Attributes:
    function: (inputs, settings) -> (objective, metrics).
    settings: the hyperparameters that the objective reads, with their published values.
    paper: the source.
    per_token: whether a token's objective depends only on that token's inputs.
    select: chooses the tokens that the objective treats differently, from all tokens of a gradient
      update; None if the objective treats all tokens alike.
    random: whether `select` needs a PRNG key.
    ratios: the values of the setting `ratio` that the objective is defined for; empty if the
      objective computes its own ratio.
    per_completion: whether all tokens of a completion must have the same advantage.
  """

  function: Callable[[ObjectiveInputs, Settings], ObjectiveOutputs]
  settings: Mapping[str, Any]
  paper: str
  per_token: bool = True
  select: Select | None = None
  random: bool = False
  ratios: tuple[str, ...] = ("token", "arithmetic", "geometric", "gspo_token")
  per_completion: bool = False


def clipped_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)` (PPO, DAPO).

  With `dual_clip` = c > 1, the objective is at least `c A` where `A < 0` (1912.09729, eq. 5): a
  token with a negative advantage has no gradient once it is more than c times as likely as when it
  was sampled.
  """
  lowest = 1 - settings.eps_low
  highest = 1 + settings.eps_high
  clipped = jnp.clip(x.ratio, lowest, highest)
  objective = jnp.minimum(x.ratio * x.advantages, clipped * x.advantages)
  if settings.dual_clip:
    bounded = jnp.maximum(objective, settings.dual_clip * x.advantages)
    objective = jnp.where(x.advantages < 0, bounded, objective)
  return objective, {
    "clip/low": (x.ratio < lowest) & (x.advantages < 0),
    "clip/high": (x.ratio > highest) & (x.advantages > 0),
  }


def cispo_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi` (CISPO, 2506.13585, eqs. 4-5).

  Every token keeps a gradient; only its weight is clipped.
  """
  lowest = 1 - settings.eps_low
  highest = 1 + settings.eps_high
  weight = jax.lax.stop_gradient(jnp.clip(x.ratio, lowest, highest))
  return weight * x.advantages * x.log_probs, {
    "clip/low": x.ratio < lowest,
    "clip/high": x.ratio > highest,
  }


def sapo_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `(4 / tau) sigmoid(tau (r - 1)) A` (SAPO, 2511.20347).

  tau is `tau_positive` where `A > 0` and `tau_negative` elsewhere. The derivative with respect to r
  is A at r = 1 and decays smoothly to 0 on both sides. `clip/soft` counts the tokens for which its
  absolute value is below `|A| / 2`.
  """
  tau = jnp.where(x.advantages > 0, settings.tau_positive, settings.tau_negative)
  gate = jax.nn.sigmoid(tau * (x.ratio - 1))
  return 4 / tau * gate * x.advantages, {"clip/soft": 4 * gate * (1 - gate) < 0.5}


def gmpo_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `A exp(mean_t(s min(s l_t, s clip(l_t, -eps_low, eps_high))))` (GMPO, 2507.20673).

  l_t is the log-ratio of token t of the completion and s the sign of A. All tokens of a completion
  have the same objective.
  """
  sign = jnp.sign(x.advantages)
  log_ratio = jnp.where(x.mask, x.log_ratio, 0.0)
  clipped = jnp.clip(log_ratio, -settings.eps_low, settings.eps_high)
  bounded = sign * jnp.minimum(sign * log_ratio, sign * clipped)
  ratio = jnp.exp(masked_mean(bounded, x.mask, -1, keepdims=True))
  return ratio * x.advantages, {
    "clip/low": (log_ratio < -settings.eps_low) & (x.advantages < 0),
    "clip/high": (log_ratio > settings.eps_high) & (x.advantages > 0),
  }


def dppo_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `sg(min(r, ratio_cap)) A log pi`, or 0 outside the trust region (DPPO, 2602.04879).

  A token is outside if its probability has changed too much in the direction of its advantage:
  `pi - pi_old > delta_high` where `A > 0`, and `pi - pi_old < -delta_low` elsewhere. This is the
  binary approximation of the total variation (eq. 13).
  """
  change = jnp.exp(x.log_probs) - jnp.exp(x.log_probs_old)
  too_high = (x.advantages > 0) & (change > settings.delta_high)
  too_low = (x.advantages <= 0) & (change < -settings.delta_low)
  weight = jnp.where(too_high | too_low, 0.0, jnp.minimum(x.ratio, settings.ratio_cap))
  return jax.lax.stop_gradient(weight) * x.advantages * x.log_probs, {
    "clip/low": too_low,
    "clip/high": too_high,
    "clip/cap": x.ratio > settings.ratio_cap,
  }


def clip_cov_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns the clipped objective, and 0 for the selected tokens (Clip-Cov, 2505.22617)."""
  objective, metrics = clipped_objective(x, settings)
  return jnp.where(x.selected, 0.0, objective), metrics | {"clip/selected": x.selected}


def kl_cov_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns `r A`, minus `kl_cov_coef |log r|` for the selected tokens (KL-Cov, 2505.22617)."""
  # |log r| with the derivative 0 at r = 1, as in PyTorch.
  sign = jax.lax.stop_gradient(jnp.sign(x.log_ratio))
  penalty = settings.kl_cov_coef * sign * x.log_ratio
  objective = x.ratio * x.advantages - jnp.where(x.selected, penalty, 0.0)
  return objective, {"clip/selected": x.selected}


def stare_objective(x: ObjectiveInputs, settings: Settings) -> ObjectiveOutputs:
  """Returns the clipped objective, times `surprise_weight` for the selected tokens (2606.19236)."""
  objective, metrics = clipped_objective(x, settings)
  weight = jnp.where(x.selected, settings.surprise_weight, 1.0)
  return weight * objective, metrics | {"clip/selected": x.selected}


def capped_objective(ratio: jax.Array, advantages: jax.Array, cap: float) -> jax.Array:
  """Returns `min(r, cap) A`, the objective of the guide's tokens (2507.12931).

  A clip range around 1 would not work here, because the guide is not close to the policy.
  """
  return jnp.minimum(ratio, cap) * advantages


def _select_clip_cov(
  x: ObjectiveInputs, entropy: jax.Array | None, settings: Settings, key: jax.Array | None
) -> jax.Array:
  _, clipped = clipped_objective(x, settings)
  free = x.mask & ~clipped["clip/low"] & ~clipped["clip/high"]
  band = (settings.cov_low, settings.cov_high)
  return covariance_band(
    x.advantages, x.log_probs, x.mask, free, band, settings.selected_share, key
  )


def _select_kl_cov(
  x: ObjectiveInputs, entropy: jax.Array | None, settings: Settings, key: jax.Array | None
) -> jax.Array:
  return highest_covariance(x.advantages, x.log_probs, x.mask, settings.selected_share, key)


def _select_stare(
  x: ObjectiveInputs, entropy: jax.Array | None, settings: Settings, key: jax.Array | None
) -> jax.Array:
  rewarded = x.mask & (x.advantages > 0)
  chosen = top_share(-x.log_probs, rewarded, settings.selected_share)
  return chosen & (masked_mean(entropy, x.mask) < settings.entropy_gate)


_CLIP = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 0.0}

OBJECTIVES: dict[str, Objective] = {
  "clip": Objective(clipped_objective, _CLIP, paper="1707.06347, 2503.14476"),
  "cispo": Objective(cispo_objective, {"eps_low": 1.0, "eps_high": 4.0}, paper="2506.13585"),
  "sapo": Objective(
    sapo_objective, {"tau_positive": 1.0, "tau_negative": 1.05}, paper="2511.20347"
  ),
  "gmpo": Objective(
    gmpo_objective,
    {"eps_low": 0.4, "eps_high": 0.4},
    paper="2507.20673",
    per_token=False,
    ratios=(),
    per_completion=True,
  ),
  "dppo": Objective(
    dppo_objective,
    {"delta_low": 0.2, "delta_high": 0.2, "ratio_cap": 5.0},
    paper="2602.04879",
    ratios=("token",),
  ),
  "clip_cov": Objective(
    clip_cov_objective,
    {**_CLIP, "eps_high": 0.2, "selected_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    paper="2505.22617",
    select=_select_clip_cov,
    random=True,
  ),
  "kl_cov": Objective(
    kl_cov_objective,
    {"selected_share": 2e-3, "kl_cov_coef": 1.0},
    paper="2505.22617",
    select=_select_kl_cov,
    random=True,
  ),
  "stare": Objective(
    stare_objective,
    {**_CLIP, "selected_share": 0.1, "surprise_weight": 1.1, "entropy_gate": 0.3},
    paper="2606.19236",
    select=_select_stare,
  ),
}
