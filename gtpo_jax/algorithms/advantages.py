"""Advantages, computed from shaped rewards.

All arrays are [n, g, u], where a unit of credit is a token (u = t) or a completion (u = 1). Means
and standard deviations are over the entries where `mask` is True. O+ and O- are the units of
correct and of incorrect completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import ShapedRewards, Units, sum_by_place
from gtpo_jax.algorithms.selection import quantile
from gtpo_jax.arrays import masked_mean, masked_sum
from gtpo_jax.runtime.fields import (
  ABOVE_0,
  AT_LEAST_0,
  FLAG,
  SHARE,
  Checked,
  Condition,
  at_least,
  number,
  one_of,
  setting,
)

# The axes of [n, g, u] over which one mean and standard deviation are computed.
NORM_SCOPE: dict[str, tuple[int, ...]] = {"group": (1, 2), "batch": (0, 1, 2)}
NORM_SIDES = ("all", "own")


@dataclasses.dataclass(frozen=True)
class GroupNormalisation(Checked):
  """Advantages are normalised over each group, and their signs are not guarded (the baselines)."""

  prefix: ClassVar[str] = "algorithm."
  norm_scope: ClassVar[str] = "group"
  norm_sides: ClassVar[str] = "all"
  sign_guard: ClassVar[bool] = False

  @property
  def axes(self) -> tuple[int, ...]:
    """The axes of [n, g, u] over which one mean and standard deviation are computed."""
    return NORM_SCOPE[self.norm_scope]


@dataclasses.dataclass(frozen=True)
class Normalisation(GroupNormalisation):
  """Over which completions advantages are normalised, and whether their signs are guarded."""

  norm_scope: str = setting(
    "group",
    '"group" or "batch": the completions over which the mean and std of the advantages are '
    "computed.",
    one_of(NORM_SCOPE),
  )
  sign_guard: bool = setting(
    False, "clamp advantages to be >= 0 for correct units and <= 0 for incorrect ones.", FLAG
  )


@dataclasses.dataclass(frozen=True)
class TwoSidedNormalisation(Normalisation):
  """The same for rewards of correct and of incorrect completions that are normalised separately."""

  norm_sides: str = setting(
    "all",
    'what the shaped rewards of O+ and of O- are z-scored over: "all" (all units, with zeros for '
    'the other side) or "own" (the units of their own side, as public implementations of GTPO do: '
    "correct completions are then not preferred to incorrect ones).",
    one_of(NORM_SIDES),
  )


@dataclasses.dataclass(frozen=True)
class QuantileBaseline(GroupNormalisation):
  """The baseline of a group is a quantile of its rewards."""

  baseline_quantile: float = setting(
    0.4,
    "the baseline of a group: its smallest reward that at least this fraction of its rewards do "
    "not exceed (2509.22611).",
    SHARE,
  )


@dataclasses.dataclass(frozen=True)
class SideWeights(GroupNormalisation):
  """Rewards are advantages, without a baseline."""

  positive_weight: float = setting(
    0.1,
    "multiplies the rewards of correct completions (2506.01347); 0 to learn only from incorrect "
    "ones.",
    AT_LEAST_0,
  )


# (shaped, units, normalisation) -> advantages f32[n, g, u].
Advantage = Callable[[ShapedRewards, Units, Any], jax.Array]  # with a normalisation

CREDITS = ("uniform", "entropy")
DIVERGENCES = ("sampled", "reverse_kl", "forward_kl", "jsd")


@dataclasses.dataclass(frozen=True)
class Distillation(Checked):
  """How the policy learns from a teacher, if there is one (`teacher.path`, `teacher.policy`).

  Attributes:
    coef: the weight of the divergence from the teacher. With "opd" nothing else is learned; with
      other algorithms the divergence is added to their advantages or to their loss.
    credit: "uniform", or "entropy" to multiply each token's divergence with the share that GTPO
      gives it: its entropy in correct completions and its inverse entropy in incorrect ones,
      relative to the mean of the tokens that it is compared with.
    divergence: "sampled" (the advantage of a token is the teacher's log-prob minus the policy's
      when it was sampled), or a divergence between the two distributions over the vocabulary at
      each sampled token, in the loss: "reverse_kl" (from the policy to the teacher), "forward_kl"
      (from the teacher to the policy) or "jsd" (generalised Jensen-Shannon, 2306.13649).
    beta: the weight of the teacher in the mixture of "jsd".
    top_k: with a divergence over the vocabulary, the teacher's most probable ids that are compared
      one by one; all others count as one id. 0 compares all ids.
  """

  prefix: ClassVar[str] = "distill."
  read_if: ClassVar[Mapping[str, Condition]] = {
    "beta": Condition("divergence = 'jsd'", lambda x: x.divergence == "jsd"),
    "top_k": Condition("a divergence over the vocabulary", lambda x: not x.sampled),
  }

  coef: float = setting(1.0, bound=ABOVE_0)
  credit: str = setting("uniform", bound=one_of(CREDITS))
  divergence: str = setting("sampled", bound=one_of(DIVERGENCES))
  beta: float = setting(0.5, bound=number(lambda x: 0 < x < 1, "in (0, 1)"))
  top_k: int = setting(0, bound=at_least(0))

  @property
  def sampled(self) -> bool:
    """Whether the sampled tokens are enough; if not, the loss needs the teacher's distributions."""
    return self.divergence == "sampled"

  def weights(self, mask: jax.Array, shares: jax.Array | None) -> jax.Array:
    """Returns `coef * share`, f32[n, g, t]; 0 where `mask` is False.

    Args:
      mask: bool[n, g, t], tokens that the policy has sampled.
      shares: f32[n, g, t], with credit "entropy"; otherwise None.
    """
    return jnp.where(mask, self.coef if shares is None else self.coef * shares, 0.0)


# Advantages are 0 if their divisor is smaller than this: the std, or the mean in `mean_normalised`.
MIN_STD = 1e-6


def centred(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns x minus its mean over `axes`, and 0 where `mask` is False."""
  mean = masked_mean(x, mask, axes, keepdims=True)
  # The second pass removes the rounding error of the first: equal values have std 0.
  mean += masked_mean(x - mean, mask, axes, keepdims=True)
  return jnp.where(mask, x - mean, 0.0)


def zscore(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns (x - mean) / std, with the mean and the population std over `axes`.

  The result is 0 where the std is below `MIN_STD` and where `mask` is False.
  """
  x = centred(x, mask, axes)
  return _divide(x, _root_mean_square(x, mask, axes))


def joint_zscore(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Z-scores the rewards of O+ and O- together.

  GRPO, DAPO and most other baselines do this, and so do `gtpo_v1`, `gtpo_v1_clipped` and
  `grpo_s_v1` (2508.04349 v1, eqs. 4, 8).

  Args:
    shaped: the shaped rewards R+ and R-, f32[n, g, u] each.
    units: the units of credit.
    normalisation: over what the mean and the std are computed, and whether to clamp the advantages
      to be >= 0 on O+ and <= 0 on O-.

  Returns:
    f32[n, g, u].
  """
  advantages = zscore(shaped.plus + shaped.minus, units.mask, normalisation.axes)
  return _guard_signs(advantages, units, normalisation)


def two_sided_zscore(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Z-scores R+ and R- separately; returns z(R+) on O+ and z(R-) on O-.

  `gtpo`, `grpo_s`, `gtpo_v2` and `grpo_s_v2` use these advantages. Each z-score is over all units,
  including the zeros of the other set. With `norm_sides` = "own" each is over its own set only: the
  advantages of O+ and of O- both have mean 0, and correct completions are not preferred to
  incorrect ones. Arguments and result are as in `joint_zscore`.
  """
  own = normalisation.norm_sides == "own"
  plus = zscore(shaped.plus, units.plus if own else units.mask, normalisation.axes)
  minus = zscore(shaped.minus, units.minus if own else units.mask, normalisation.axes)
  return _guard_signs(jnp.where(units.correct, plus, minus), units, normalisation)


def joint_centred(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Subtracts the mean reward without dividing by the std (Dr. GRPO, 2503.20783).

  Arguments and result are as in `joint_zscore`.
  """
  advantages = centred(shaped.plus + shaped.minus, units.mask, normalisation.axes)
  return _guard_signs(advantages, units, normalisation)


def no_credit(shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation) -> jax.Array:
  """Returns zeros: the rewards are measured, but nothing is learned from them.

  Arguments and result are as in `joint_zscore`.
  """
  return jnp.zeros_like(shaped.plus)


def leave_one_out(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Subtracts the mean reward of the other units (RLOO, 2402.14740).

  A unit without others has advantage 0. Arguments and result are as in `joint_zscore`.
  """
  count = units.mask.sum(normalisation.axes, keepdims=True)
  advantages = centred(shaped.plus + shaped.minus, units.mask, normalisation.axes)
  advantages *= count / jnp.maximum(count - 1, 1)
  return _guard_signs(advantages, units, normalisation)


def whitened(shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation) -> jax.Array:
  """Subtracts the mean over `axes`, then z-scores over all tokens of the batch (REINFORCE++).

  This is the variant with a baseline (2501.03262). The z-score weights each unit by its number of
  tokens, as the public implementations do. Arguments and result are as in `joint_zscore`.
  """
  x = centred(shaped.plus + shaped.minus, units.mask, normalisation.axes)
  return _guard_signs(_zscore_over_tokens(x, units), units, normalisation)


def part_zscores(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Z-scores each part of the reward in its group, and their weighted sum over all tokens (GDPO).

  The penalty is a part with the weight 1. The second z-score is that of `whitened` (2601.05242).
  Result as in `joint_zscore`.
  """
  weights = units.part_weights[:, None]
  x = (weights * zscore(units.parts, units.mask, (1,))).sum(-1, keepdims=True)
  return _zscore_over_tokens(x + zscore(units.penalty, units.mask, (1,)), units)


def _zscore_over_tokens(x: jax.Array, units: Units) -> jax.Array:
  total = jnp.maximum(units.tokens.sum(), 1)
  mean = (units.tokens * x).sum() / total
  std = jnp.sqrt((units.tokens * jnp.square(x - mean)).sum() / total)
  return jnp.where(units.mask, _divide(x - mean, std), 0.0)


def mean_normalised(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Subtracts the mean reward and divides by it (MaxRL, 2602.02710).

  The advantages are 0 where the mean is below `MIN_STD`, as in a group without a reward. Arguments
  and result are as in `joint_zscore`.
  """
  rewards = shaped.plus + shaped.minus
  mean = masked_mean(rewards, units.mask, normalisation.axes, keepdims=True)
  advantages = _divide(centred(rewards, units.mask, normalisation.axes), mean)
  return _guard_signs(advantages, units, normalisation)


def quantile_zscore(
  shaped: ShapedRewards, units: Units, normalisation: QuantileBaseline
) -> jax.Array:
  """Subtracts a quantile of the group's rewards and divides by their std (QAE, 2509.22611, eq. 4).

  With rewards of two values, a group of which at most 1 - `baseline_quantile` is correct teaches
  only its successes, and any other group only its failures. Arguments and result are as in
  `joint_zscore`.
  """
  rewards = shaped.plus + shaped.minus
  of_group = lambda x, mask: quantile(x, mask, normalisation.baseline_quantile)
  baseline = jax.vmap(of_group)(rewards, units.mask)[:, None, None]
  deviation = centred(rewards, units.mask, normalisation.axes)
  std = _root_mean_square(deviation, units.mask, normalisation.axes)
  return jnp.where(units.mask, _divide(rewards - baseline, std), 0.0)


def optimal_token_baseline(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Subtracts a baseline per token, a mean of the group's rewards weighted by W (2602.07078).

  W of a token is the sum of the squared norms of the scores of its completion's tokens up to it.
  The baseline of the t-th token that the policy has drawn is `sum(R W_t) / sum(W_t)` over the
  completions that have such a token, and 0 if only one has. Where all W_t are 0, and with them the
  gradients, it is the mean of R. Arguments and result are as in `joint_zscore`.
  """
  mask = units.mask
  alive = mask.any(-1, keepdims=True)
  reward = jnp.where(alive, units.reward + units.penalty, 0.0)
  # Relative to their mean, so that equal rewards have advantages of exactly 0.
  deviation = centred(reward, alive, (1,))
  weight = jnp.cumsum(jnp.where(mask, units.score_norms, 0.0), -1)
  place = jnp.cumsum(mask, -1) - 1
  if units.gaps is False:
    over_group = lambda x: masked_sum(x, mask, (1,), keepdims=True)
  else:
    over_group = lambda x: sum_by_place(x, mask, place, of_batch=False)
  total = over_group(weight)
  known = total > 0
  baseline = jnp.where(known, over_group(weight * deviation) / jnp.where(known, total, 1.0), 0.0)
  several = over_group(jnp.ones(mask.shape)) > 1
  return jnp.where(mask, jnp.where(several, deviation - baseline, reward), 0.0)


def best_margin(
  shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  """Returns the best reward minus the second best for the best unit of a group, 0 for all others.

  This is the gradient of the largest reward of a group (2503.19595). Two equally good units both
  have advantage 0. Arguments and result are as in `joint_zscore`.
  """
  axes = normalisation.axes
  rewards = shaped.plus + shaped.minus
  highest = lambda among: jnp.where(among, rewards, -jnp.inf).max(axes, keepdims=True)
  best = units.mask & (rewards == highest(units.mask))
  second = highest(units.mask & ~best)
  one_is_best = (best.sum(axes, keepdims=True) == 1) & jnp.isfinite(second)
  return jnp.where(best & one_is_best, rewards - second, 0.0)


def weighted_sides(shaped: ShapedRewards, units: Units, normalisation: SideWeights) -> jax.Array:
  """Returns the rewards, weighted on O+, without a baseline (W-REINFORCE, 2506.01347).

  Arguments and result are as in `joint_zscore`.
  """
  return normalisation.positive_weight * shaped.plus + shaped.minus


def value_gain(shaped: ShapedRewards, units: Units, normalisation: GroupNormalisation) -> jax.Array:
  """Returns what the segment of a token gains in value (VinePPO, 2410.01679; SPO, 2505.23564).

  Tokens of which it is unknown are not in the loss. Arguments and result are as in `joint_zscore`.
  """
  return units.value_gains


def _root_mean_square(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  return jnp.sqrt(masked_mean(jnp.square(x), mask, axes, keepdims=True))


def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """Returns x / divisor, and 0 where the divisor is below `MIN_STD`."""
  enough = divisor >= MIN_STD
  return jnp.where(enough, x / jnp.where(enough, divisor, 1.0), 0.0)


def _guard_signs(
  advantages: jax.Array, units: Units, normalisation: GroupNormalisation
) -> jax.Array:
  if not normalisation.sign_guard:
    return advantages
  return jnp.where(units.correct, jnp.maximum(advantages, 0.0), jnp.minimum(advantages, 0.0))


# The fields of `Signals` that only these advantages need.
NEEDS: dict[Advantage, tuple[str, ...]] = {
  part_zscores: ("parts", "part_weights"),
  optimal_token_baseline: ("score_norms",),
  value_gain: ("value_gains",),
}
