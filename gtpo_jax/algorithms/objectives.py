"""Surrogate objectives, which are maximised.

An objective is a frozen dataclass of its settings, with their published values as defaults. In the
formulas, r is the importance ratio, A the advantage, pi and pi_old the probability of the token
under the trained and under the sampling policy, and sg(x) is x without a gradient.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.ratios import LOG_RATIO_BOUND, RATIOS, bounded_exp
from gtpo_jax.algorithms.relative_entropy import discounted_future
from gtpo_jax.algorithms.selection import covariance_band, highest_covariance, top_share
from gtpo_jax.arrays import Needed, masked_mean
from gtpo_jax.runtime.fields import (
  ABOVE_0,
  AT_LEAST_0,
  AT_LEAST_1,
  BELOW_1,
  FINITE,
  INFINITY,
  SHARE,
  Checked,
  number,
  one_of,
  setting,
)

CLIP_RANGE = "the importance ratio is clipped to [1 - eps_low, 1 + eps_high]."
SELECTED = "the fraction of the tokens of a gradient update that are selected."


class ObjectiveInputs(NamedTuple):
  """The inputs of an objective. Values where `mask` is False have no meaning."""

  ratio: jax.Array  # f32[n, g, t], the importance ratio that the algorithm uses
  log_probs: jax.Array  # f32[n, g, t], nats, of the policy being trained
  log_probs_old: jax.Array  # f32[n, g, t], nats, of the policy that sampled the tokens
  advantages: jax.Array  # f32[n, g, t]
  mask: jax.Array  # bool[n, g, t], tokens in the loss
  selected: Needed = None  # bool[n, g, t], from the objective's `select`
  entropy: Needed = None  # f32[n, g, t], nats, of the sampling policy, for `select`

  @property
  def log_ratio(self) -> jax.Array:
    """f32[n, g, t], nats: log pi - log pi_old, clamped to +-20."""
    return jnp.clip(self.log_probs - self.log_probs_old, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# The objective f32[n, g, t], and {metric name: the tokens that it counts, bool[n, g, t]}.
ObjectiveOutputs = tuple[jax.Array, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective(Checked):
  """The base of the objectives that compute their own ratio from the log-probs.

  Attributes:
    name: the objective's name in `OBJECTIVES`.
    paper: the source.
    per_token: whether a token's objective depends only on that token's inputs.
    per_completion: whether all tokens of a completion must have the same advantage.
    select_needs: the inputs of `select`, of "entropy" and "key"; empty if the objective treats all
      tokens of a gradient update alike.
    ratios: the values of the setting `ratio` that the objective is defined for; empty if it has no
      such setting.
    ratio: the ratio whose diagnostics are logged, and with which a guide's tokens are trained.
  """

  prefix: ClassVar[str] = "algorithm."
  name: ClassVar[str]
  paper: ClassVar[str]
  per_token: ClassVar[bool] = True
  per_completion: ClassVar[bool] = False
  select_needs: ClassVar[tuple[str, ...]] = ()
  ratios: ClassVar[tuple[str, ...]] = ()
  ratio: ClassVar[str] = "token"

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    """Returns the objective of each token, and the tokens that the metrics count."""
    raise NotImplementedError

  def select(self, x: ObjectiveInputs, key: Needed) -> jax.Array:
    """Returns which tokens of a gradient update are treated differently, bool[n, g, t]."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RatioObjective(Objective):
  """The base of the objectives of an importance ratio, which can be chosen."""

  ratios: ClassVar[tuple[str, ...]] = tuple(RATIOS)

  ratio: str = setting(
    "token",
    'the importance ratio: "token" (each token\'s own), "arithmetic" or "geometric" (the mean over '
    'the token ratios of a completion; these need one advantage per completion), or "gspo_token" '
    '(the value of "geometric", with a gradient per token).',
    one_of(RATIOS),
  )


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


_BAND = "tokens are selected if their covariance term lies between cov_low and cov_high."


@dataclasses.dataclass(frozen=True)
class ClipCov(Clip):
  """The clipped objective, and 0 for the selected tokens (Clip-Cov, 2505.22617).

  These are random tokens that are not clipped and whose covariance term lies in a band.
  """

  name: ClassVar[str] = "clip_cov"
  paper: ClassVar[str] = "2505.22617"
  select_needs: ClassVar[tuple[str, ...]] = ("key",)

  eps_high: float = setting(0.2, CLIP_RANGE, ABOVE_0)
  selected_share: float = setting(2e-4, SELECTED, SHARE)
  cov_low: float = setting(1.0, _BAND, FINITE)
  cov_high: float = setting(5.0, _BAND, FINITE)

  def __post_init__(self):
    super().__post_init__()
    self._check_order("cov_low", "cov_high")

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    objective, metrics = super().__call__(x)
    return jnp.where(x.selected, 0.0, objective), metrics | {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: Needed) -> jax.Array:
    _, clipped = super().__call__(x)
    free = x.mask & ~clipped["clip/low"] & ~clipped["clip/high"]
    band = (self.cov_low, self.cov_high)
    return covariance_band(x.advantages, x.log_probs, x.mask, free, band, self.selected_share, key)


@dataclasses.dataclass(frozen=True)
class KlCov(RatioObjective):
  """`r A`, minus `kl_cov_coef |log r|` for the selected tokens (KL-Cov, 2505.22617).

  The selected tokens are those with the largest covariance terms.
  """

  name: ClassVar[str] = "kl_cov"
  paper: ClassVar[str] = "2505.22617"
  select_needs: ClassVar[tuple[str, ...]] = ("key",)

  selected_share: float = setting(2e-3, SELECTED, SHARE)  # of 7B; 2e-4 for 32B
  kl_cov_coef: float = setting(1.0, "the weight of |log r| for the selected tokens.", AT_LEAST_0)

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    # |log r| with the derivative 0 at r = 1, as in PyTorch.
    sign = jax.lax.stop_gradient(jnp.sign(x.log_ratio))
    penalty = self.kl_cov_coef * sign * x.log_ratio
    objective = x.ratio * x.advantages - jnp.where(x.selected, penalty, 0.0)
    return objective, {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: Needed) -> jax.Array:
    return highest_covariance(x.advantages, x.log_probs, x.mask, self.selected_share, key)


@dataclasses.dataclass(frozen=True)
class Stare(Clip):
  """The clipped objective, times `surprise_weight` for the selected tokens (STARE, 2606.19236).

  The selected tokens are the most surprising ones of those with a positive advantage.
  """

  name: ClassVar[str] = "stare"
  paper: ClassVar[str] = "2606.19236"
  select_needs: ClassVar[tuple[str, ...]] = ("entropy",)

  selected_share: float = setting(
    0.1, "the fraction of the tokens with a positive advantage that are selected.", SHARE
  )
  surprise_weight: float = setting(1.1, "multiplies the objective of the selected tokens.", ABOVE_0)
  entropy_gate: float = setting(
    0.3, "select tokens only while the mean entropy is below this value, in nats.", AT_LEAST_0
  )

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    objective, metrics = super().__call__(x)
    weight = jnp.where(x.selected, self.surprise_weight, 1.0)
    return weight * objective, metrics | {"clip/selected": x.selected}

  def select(self, x: ObjectiveInputs, key: Needed) -> jax.Array:
    rewarded = x.mask & (x.advantages > 0)
    chosen = top_share(-x.log_probs, rewarded, self.selected_share)
    return chosen & (masked_mean(x.entropy, x.mask) < self.entropy_gate)


_WEIGHT_RANGE = "the weight of a token is clipped to [1 - eps_low, 1 + eps_high]."
_DELTA = (
  "how far the probability of a token may fall (delta_low) or rise (delta_high), in the direction "
  "of its advantage, before the token has no gradient."
)


def weighted_log_probs(x: ObjectiveInputs, weight: jax.Array) -> jax.Array:
  """Returns `sg(weight) A log pi`, f32[n, g, t]."""
  return jax.lax.stop_gradient(weight) * x.advantages * x.log_probs


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
    return weighted_log_probs(x, jnp.clip(x.ratio, lowest, highest)), {
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
    return weighted_log_probs(x, weight), {
      "clip/low": too_low,
      "clip/high": too_high,
      "clip/cap": x.ratio > self.ratio_cap,
    }


@dataclasses.dataclass(frozen=True)
class Aspo(RatioObjective):
  """`sg(w) A log pi`, where w is 1 / r if `A > 0` and r elsewhere (ASPO, 2510.06062).

  w is at most `ratio_cap`, and such a token keeps its gradient. A token that PPO clips has none:
  `r > 1 + eps_high` where `A > 0`, and `r < 1 - eps_low` elsewhere. Tokens with `A > 0` that the
  policy has made less likely are so trained most, those that it has made more likely least. The
  gradient is that of the authors' public code, whose loss has other values.
  """

  name: ClassVar[str] = "aspo"
  paper: ClassVar[str] = "2510.06062"
  ratios: ClassVar[tuple[str, ...]] = ("token",)

  eps_low: float = setting(0.2, CLIP_RANGE, SHARE)
  eps_high: float = setting(0.2, CLIP_RANGE, ABOVE_0)
  ratio_cap: float = setting(
    3.0, "upper bound of the weight: of 1 / r where A > 0, of r elsewhere.", AT_LEAST_1
  )

  def __post_init__(self):
    super().__post_init__()
    self._check_order("eps_low", "eps_high")

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    rewarded = x.advantages > 0
    too_high = rewarded & (x.ratio > 1 + self.eps_high)
    too_low = ~rewarded & (x.ratio < 1 - self.eps_low)
    weight = jnp.where(rewarded, 1.0 / x.ratio, x.ratio)
    kept = jnp.where(too_high | too_low, 0.0, jnp.minimum(weight, self.ratio_cap))
    return weighted_log_probs(x, kept), {
      "clip/low": too_low,
      "clip/high": too_high,
      "clip/cap": weight > self.ratio_cap,
    }


@dataclasses.dataclass(frozen=True)
class Fipo(Clip):
  """The clipped objective with the advantage A f, where f is the token's influence (2603.19835).

  `f_t = sg(clip(exp(F_t), 1 - influence_low, 1 + influence_high))`. F_t is the sum of the
  log-ratios of the token and of those after it, with a discount that halves over `half_life`
  tokens: it is positive if the update makes the rest of the completion more likely. Only tokens
  that the policy has drawn count, also in the discount.

  As in the public code of the authors, a token whose ratio is above `dual_clip` does not enter F,
  and f is at most 1 for a token with a negative advantage whose ratio is above `safe_ratio`. That
  code also ignores completions with several tokens beyond the dual clip; this is left out here. At
  the first gradient update on a batch all ratios are 1, and so is f.
  """

  name: ClassVar[str] = "fipo"
  paper: ClassVar[str] = "2603.19835"
  per_token: ClassVar[bool] = False
  ratios: ClassVar[tuple[str, ...]] = ("token",)

  dual_clip: float = dual_clip_setting(10.0)
  half_life: float = setting(
    32.0, "the tokens over which the discount of the log-ratios after a token halves.", ABOVE_0
  )
  influence_low: float = setting(
    0.0, "the influence of a token is at least 1 - influence_low; 0: it only adds.", BELOW_1
  )
  influence_high: float = setting(
    0.2, "the influence of a token is at most 1 + influence_high.", ABOVE_0
  )
  safe_ratio: float = setting(
    4.0,
    "the influence is at most 1 for tokens with a negative advantage and a larger ratio than this.",
    AT_LEAST_1,
  )

  def __call__(self, x: ObjectiveInputs) -> ObjectiveOutputs:
    log_ratio = jax.lax.stop_gradient(jnp.where(x.mask, x.log_ratio, 0.0))
    if self.dual_clip:
      log_ratio = jnp.where(x.ratio > self.dual_clip, 0.0, log_ratio)
    raw = bounded_exp(discounted_future(log_ratio, x.mask, 2 ** (-1 / self.half_life)))
    influence = jnp.clip(raw, 1 - self.influence_low, 1 + self.influence_high)
    unsafe = (x.advantages < 0) & (x.ratio > self.safe_ratio)
    influence = jnp.where(unsafe, jnp.minimum(influence, 1.0), influence)
    clipped = x.mask & (influence != raw)
    influence = jax.lax.stop_gradient(influence)
    objective, metrics = super().__call__(x._replace(advantages=influence * x.advantages))
    return objective, metrics | {"clip/influence": clipped}


OBJECTIVES: dict[str, type[Objective]] = {
  cls.name: cls for cls in (Clip, Cispo, Sapo, Gmpo, Dppo, ClipCov, KlCov, Stare, Fipo, Aspo)
}

# The setting that chooses one of them.
CHOICE = setting(
  "clip", "the surrogate objective; each has settings of its own.", one_of(OBJECTIVES)
)
