"""The loss besides the objective: weights of tokens, penalties, bonuses, and diagnostics.

The weights of the tokens are computed from the complete batch of a gradient update. Each
micro-batch uses its slice of them, so the losses and gradients of the micro-batches add up to those
of the batch.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.objectives import Objective, ObjectiveInputs
from gtpo_jax.algorithms.ratios import LOG_RATIO_BOUND, RATIOS, k3, token_ratio
from gtpo_jax.algorithms.selection import quantile, token_covariance
from gtpo_jax.arrays import Signals, masked_mean, mean_or_nan
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_0, Checked, Condition, number, one_of, setting


def token_mean(mask: jax.Array) -> jax.Array:
  """Averages over all tokens of the batch (DAPO, GTPO)."""
  return mask / jnp.maximum(mask.sum(), 1)


def completion_mean(mask: jax.Array) -> jax.Array:
  """Averages over the tokens of each completion, then over completions (GRPO, GRPO-S)."""
  completions = jnp.maximum(mask.any(-1).sum(), 1)
  return mask / jnp.maximum(mask.sum(-1, keepdims=True), 1) / completions


def group_mean(mask: jax.Array) -> jax.Array:
  """Averages over all tokens of each group, then over groups."""
  groups = jnp.maximum(mask.any((1, 2)).sum(), 1)
  return mask / jnp.maximum(mask.sum((1, 2), keepdims=True), 1) / groups


def constant_divisor(mask: jax.Array) -> jax.Array:
  """Divides the sum over tokens by n * g * t, independent of the lengths (Dr. GRPO)."""
  return mask / mask.size


# Functions from the loss mask bool[n, g, t] to token weights f32[n, g, t].
LOSS_AGGREGATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "token": token_mean,
  "completion": completion_mean,
  "group": group_mean,
  "constant": constant_divisor,
}


@dataclasses.dataclass(frozen=True)
class Aggregation(Checked):
  """How the objectives of the tokens are combined into the loss."""

  prefix: ClassVar[str] = "algorithm."

  loss_aggregation: str = setting(
    "token",
    'how the objectives of the tokens are combined into the loss: "token" (mean over all tokens of '
    'the batch), "completion" (mean over the tokens of each completion, then over completions), '
    '"group" (mean over the tokens of each group, then over groups) or "constant" (sum over '
    "tokens, divided by completions x maximum length).",
    one_of(LOSS_AGGREGATIONS),
  )

  def __call__(self, mask: jax.Array) -> jax.Array:
    """Returns the weights of the tokens in `mask`, f32[n, g, t]."""
    return LOSS_AGGREGATIONS[self.loss_aggregation](mask)


KL_ESTIMATORS = ("k3", "k2", "k3_ratio")


@dataclasses.dataclass(frozen=True)
class ReferencePenalty(Checked):
  """An estimate of the KL divergence to a frozen reference, which is added to the loss."""

  prefix: ClassVar[str] = "algorithm."
  read_if: ClassVar[Mapping[str, Condition]] = {
    "kl_estimator": Condition("kl_weight above 0", lambda x: x.kl_weight)
  }

  kl_weight: float = setting(
    0.0,
    "weight of the estimate of the KL divergence to a frozen reference, added to the loss (GRPO, "
    "2402.03300, eq. 4); 0 for off.",
    AT_LEAST_0,
  )
  kl_estimator: str = setting(
    "k3",
    'how the KL divergence is estimated from a sampled token: "k3" (as GRPO published it; its '
    'gradient is that of KL(reference || policy)), "k2" or "k3_ratio" (k3 times the importance '
    "ratio). The gradients of the last two are those of KL(policy || reference).",
    one_of(KL_ESTIMATORS),
  )

  def divergence(self, log_probs: jax.Array, x: Signals) -> jax.Array:
    """Returns the estimate of each token, f32[n, g, t] in nats; 0 outside `x.own`.

    All estimators assume samples from the policy, and the ratio to the reference can be huge on a
    guide's tokens.

    Args:
      log_probs: f32[n, g, t], nats, of the policy being trained.
      x: the signals of the tokens in the loss.
    """
    if self.kl_estimator == "k2":
      gap = jnp.where(x.own, log_probs - x.log_probs_reference, 0.0)
      return 0.5 * jnp.square(jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    divergence = k3(log_probs, x.log_probs_reference, x.own)
    if self.kl_estimator == "k3_ratio":
      divergence *= token_ratio(log_probs, x.log_probs_old, x.own)
    return divergence


@dataclasses.dataclass(frozen=True)
class EntropyBonus(Checked):
  """The policy's entropy, which is added to the objective with a constant or adapted weight."""

  prefix: ClassVar[str] = "algorithm."
  read_if: ClassVar[Mapping[str, Condition]] = dict.fromkeys(
    ("entropy_coef_delta", "entropy_coef_max"),
    Condition("entropy_target above 0", lambda x: x.entropy_target),
  )

  entropy_coef: float = setting(
    0.0,
    "the weight of the policy's entropy, which is added to the objective; with `entropy_target`, "
    "its initial value. 0 for no entropy bonus.",
    AT_LEAST_0,
  )
  entropy_target: float = setting(
    0.0,
    "adapt the weight of the entropy to this mean entropy of the sampled tokens, in nats "
    "(2505.22312): at each gradient update, the weight rises by `entropy_coef_delta` if the "
    "entropy is at most the target, and falls by as much otherwise. The bonus applies only in the "
    "first case. 0 for a constant weight.",
    AT_LEAST_0,
  )
  entropy_coef_delta: float = setting(
    0.005, "the change of the weight of the entropy at each gradient update.", AT_LEAST_0
  )
  entropy_coef_max: float = setting(1.0, "the upper bound of the adapted weight.", AT_LEAST_0)

  def __post_init__(self):
    super().__post_init__()
    if self.entropy_target:
      self._check_order("entropy_coef", "entropy_coef_max")

  def __bool__(self) -> bool:
    """Whether the loss has an entropy bonus, and so needs the policy's entropies."""
    return bool(self.entropy_coef or self.entropy_target)

  @property
  def initial_coef(self) -> float | None:
    """The initial weight of the entropy bonus if it is adapted, and otherwise None."""
    return self.entropy_coef if self.entropy_target else None

  def next_coef(
    self, coef: jax.Array, entropy_old: jax.Array, mask: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the entropy weight of this gradient update, and the coefficient of the next one.

    Without `entropy_target`, the weight is `entropy_coef`, and `coef` is returned unchanged.

    Args:
      coef: f32[], the current coefficient.
      entropy_old: f32[n, g, t], nats, of the sampling policy.
      mask: bool[n, g, t], from `Algorithm.loss_mask`.

    Returns:
      f32[] each.
    """
    if not self.entropy_target:
      return jnp.float32(self.entropy_coef), coef
    low = masked_mean(entropy_old, mask) <= self.entropy_target
    change = jnp.where(low, self.entropy_coef_delta, -self.entropy_coef_delta)
    return jnp.where(low, coef, 0.0), jnp.clip(coef + change, 0.0, self.entropy_coef_max)


@dataclasses.dataclass(frozen=True)
class NoGuide(Checked):
  """All completions of a group are the policy's own."""

  prefix: ClassVar[str] = "algorithm."
  guide_completions: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class Guide(NoGuide):
  """A frozen policy that samples some of the completions of a group (2507.12931)."""

  guide_completions: int = setting(
    4,
    "number of completions per group that are sampled from the frozen guide (2507.12931).",
    number(lambda x: x >= 1, "an integer >= 1", numbers.Integral),
  )
  guide_cap: float = setting(2.0, "upper bound of the importance ratio pi / pi_guide.", ABOVE_0)
  lambda_zero: float = setting(
    0.5,
    "loss weight of the groups in which the guide is correct and the policy never is.",
    AT_LEAST_0,
  )

  def objective(self, ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """Returns `min(r, guide_cap) A` of the guide's tokens, f32[n, g, t].

    A clip range around 1 would not work here, because the guide is not close to the policy.
    """
    return jnp.minimum(ratio, self.guide_cap) * advantages


def objective_inputs(objective: Objective, log_probs: jax.Array, x: Signals) -> ObjectiveInputs:
  """Returns the inputs of an objective, with zeros where the mask is False.

  Args:
    objective: the objective, which says what its ratio is.
    log_probs: f32[n, g, t], nats, of the policy being trained.
    x: the signals of the tokens in the loss.
  """
  mask = x.mask
  ratio = RATIOS[objective.ratio].function(log_probs, x.log_probs_old, mask)
  masked = lambda y: jnp.where(mask, y, 0.0)
  old, advantages = masked(x.log_probs_old), masked(x.advantages)
  return ObjectiveInputs(ratio, masked(log_probs), old, advantages, mask, x.selected, x.entropy)


def token_objectives(
  objective: Objective, guide: Any, log_probs: jax.Array, x: Signals
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns each token's objective f32[n, g, t], and metrics of the ratios and the objective.

  Args:
    objective: the objective of the policy's own tokens.
    guide: has the objective of a guide's tokens.
    log_probs: f32[n, g, t], nats, of the policy being trained.
    x: the signals of the tokens in the loss.
  """
  inputs = objective_inputs(objective, log_probs, x)
  values, counted = objective(inputs)
  metrics = {name: mean_or_nan(flags, x.own) for name, flags in counted.items()}
  constants = jax.lax.stop_gradient((inputs.ratio, inputs.advantages, inputs.log_probs))
  metrics |= ratio_metrics(*constants, x.own)
  if x.guided is None:
    return values, metrics
  guided = x.guided[..., None]
  metrics["clip/guide"] = mean_or_nan(inputs.ratio > guide.guide_cap, inputs.mask & guided)
  of_guide = guide.objective(inputs.ratio, inputs.advantages)
  return jnp.where(guided, of_guide, values), metrics


# The quantiles of the importance ratio that are logged.
RATIO_QUANTILES = {"ratio/p01": 0.01, "ratio/p50": 0.5, "ratio/p99": 0.99}


def ratio_metrics(
  ratio: jax.Array, advantages: jax.Array, log_probs: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Returns diagnostics of a gradient update, f32[] each.

  `ratio/mean` and `ratio/p*` are the mean and quantiles of the importance ratio. `ratio/ess` is the
  effective sample size as a fraction of the tokens, `(sum r)^2 / (N sum r^2)`: 1 if all ratios are
  equal. `covariance/mean` is the covariance of advantages and log-probs (2505.22617, eq. 10), which
  predicts how fast the entropy falls. All are NaN if the mask is empty.

  Args:
    ratio: f32[n, g, t].
    advantages: f32[n, g, t].
    log_probs: f32[n, g, t], nats, of the policy being trained.
    mask: bool[n, g, t].
  """
  metrics = {
    "ratio/mean": masked_mean(ratio, mask),
    "ratio/ess": effective_sample_size(ratio, mask),
    "covariance/mean": masked_mean(token_covariance(advantages, log_probs, mask), mask),
    **{name: quantile(ratio, mask, share) for name, share in RATIO_QUANTILES.items()},
  }
  return {name: jnp.where(mask.any(), value, jnp.nan) for name, value in metrics.items()}


def effective_sample_size(weights: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `(sum w)^2 / (N sum w^2)` over the N weights where `mask` is True, f32[] in (0, 1].

  1 if all weights are equal, 1 / N if one outweighs all others; 1 if the mask is empty.
  """
  weights = jnp.where(mask, weights, 0.0)
  # Divided by the largest weight, so the squares fit float32.
  scaled = weights / jnp.maximum(weights.max(), 1.0)
  squares = jnp.square(scaled).sum()
  share = jnp.square(scaled.sum()) / jnp.where(squares > 0, squares * mask.sum(), 1.0)
  return jnp.where(mask.any(), jnp.minimum(share, 1.0), 1.0)  # sums of float32 may exceed 1


def surprise_metrics(
  entropy: jax.Array, log_probs: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Returns the mean entropy of the tokens in each quartile of surprise, f32[] each, in nats.

  The surprise of a token is -log pi. `entropy/surprise_q1` is the mean over the least surprising
  quarter of the tokens, `entropy/surprise_q4` over the most surprising one. Ties go to the lower
  quartile.

  Args:
    entropy: f32[n, g, t], nats, of the sampling policy.
    log_probs: f32[n, g, t], nats, of the sampled tokens under that policy.
    mask: bool[n, g, t].
  """
  surprise = jnp.where(mask, -log_probs, 0.0)
  bounds = [quantile(surprise, mask, share) for share in (0.25, 0.5, 0.75)]
  quartile = sum((surprise > bound).astype(jnp.int32) for bound in bounds)
  return {
    f"entropy/surprise_q{i + 1}": mean_or_nan(entropy, mask & (quartile == i)) for i in range(4)
  }
