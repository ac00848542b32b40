"""Reward shaping: from units of credit to shaped rewards and diagnostics.

A shaping is a frozen dataclass of its settings, with published values as defaults. All arrays are
[n, g, u], where a unit of credit is a token (u = t) or a completion (u = 1). O+ and O- are the
units of correct and of incorrect completions. rel(x) is x divided by its mean over the comparison
set (`relative_entropy`). "Final paper" and "v1" are the final and the first version of 2508.04349.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import (
  COMPARE,
  MEANS,
  BaseAndWeight,
  EntropyWeights,
  ShapedRewards,
  Units,
  drawn_columns,
  entropy_shares,
  has_gaps,
  shape_by_entropy,
  share_metrics,
)
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import (
  AT_LEAST_0,
  INFINITY,
  Checked,
  Condition,
  number,
  one_of,
  setting,
)

LENGTH_PENALTIES = ("overlong", "group_relative")

# The shaped rewards, and diagnostics f32[] by metric name.
ShapingOutputs = tuple[ShapedRewards, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class PlainReward(Checked):
  """The reward plus the penalty, equal for all units of a completion. The base of all shapings.

  Attributes:
    from_verdict: whether rewards come from `correct` instead of from `reward`.
    per_completion: whether the unit of credit is a completion instead of a token.
    mean: the mean over a completion's token entropies, one of `MEANS`.
    h_floor: lower bound in nats that is applied to entropies before the geometric mean.
  """

  prefix: ClassVar[str] = "algorithm."
  from_verdict: ClassVar[bool] = False
  per_completion: ClassVar[bool] = True
  mean: ClassVar[str] = "arithmetic"
  h_floor: ClassVar[float] = 0.0

  def __call__(self, x: Units) -> ShapingOutputs:
    reward = jnp.where(x.mask, x.reward + x.penalty, 0.0)
    plus = jnp.where(x.correct, reward, 0.0)
    minus = jnp.where(x.correct, 0.0, reward)
    return ShapedRewards(plus, minus), {}


@dataclasses.dataclass(frozen=True)
class TokenReward(PlainReward):
  """The same, with a token as the unit of credit."""

  per_completion: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class EntropyShaping(PlainReward):
  """The base of the shapings of GTPO and GRPO-S, which differ in `plus` and `minus`.

  Attributes:
    compare, floor, kappa: the values for shapings without these settings. The lower bound 0 has no
      effect, because the reward is never negative before the penalty.
  """

  from_verdict: ClassVar[bool] = True
  compare: ClassVar[str] = "position"
  floor: ClassVar[float] = 0.0
  kappa: ClassVar[float] = 0.0

  scope: str = setting(
    "group",
    'whether "all" in `compare` means the completions of the same prompt ("group") or of all '
    'prompts ("batch"). In `grpo_s*`: the completions that a completion is compared with.',
    one_of(dict.fromkeys(scope for _, scope in COMPARE)),
  )
  h_floor: float = setting(
    1e-2,
    "lower bound in nats that is applied to entropies before 1/H and before the geometric mean.",
    number(
      lambda x: 1e-30 <= x < INFINITY, "at least 1e-30 (1/h_floor must fit float32) and finite"
    ),
  )

  def __post_init__(self):
    super().__post_init__()
    if not any((*self.plus, *self.minus)):
      names = [f"algorithm.{x}" for x in ("alpha1", "alpha2", "beta1", "beta2") if hasattr(self, x)]
      raise UserError(
        f"{' and '.join(names)} are both 0, so every reward is 0 and nothing is learned; set one "
        "above 0"
      )

  @property
  def plus(self) -> BaseAndWeight:
    """The base reward and the weight of the entropy term on O+."""
    raise NotImplementedError

  @property
  def minus(self) -> BaseAndWeight:
    """The same on O-, as magnitudes: the shaped rewards are their negatives."""
    return 0.0, 0.0

  @property
  def weights(self) -> EntropyWeights:
    """The parameters of `shape_by_entropy`."""
    base, _ = self.plus
    highest = base + base / self.kappa if self.kappa else INFINITY
    sets = COMPARE[self.compare, self.scope]
    return EntropyWeights(self.plus, self.minus, sets, self.h_floor, (self.floor, highest))

  def __call__(self, x: Units) -> ShapingOutputs:
    weights = self.weights
    weights = weights._replace(sets=x.known(weights.sets))
    return shape_by_entropy(x, weights), share_metrics(x, weights.sets, weights.h_floor)


@dataclasses.dataclass(frozen=True)
class TokenShaping(EntropyShaping):
  """The base of the shapings whose unit of credit is a token."""

  per_completion: ClassVar[bool] = False

  compare: str = setting(
    "position",
    'which tokens a token\'s entropy is compared with: "position" (the k-th token that the policy '
    'drew with the k-th of all completions), "turn" (the k-th token of a turn with the k-th of the '
    'same turn of all completions), "state" (the k-th token of a turn with the k-th of turns '
    'of the prompt that began in an equal state; with turn_credit), "sequence" (those of its own '
    'completion) or "matrix" (all tokens). Tokens of O+ are compared only with O+, those of O- '
    "only with O-.",
    one_of(dict.fromkeys(compare for compare, _ in COMPARE)),
  )

  def __call__(self, x: Units) -> ShapingOutputs:
    return self._compared(super().__call__, x)

  def shares(self, x: Units) -> jax.Array:
    """Returns rel(H) on O+ and rel(1/H) on O-, f32[n, g, t]; 0 where the mask is False."""
    sets = COMPARE[self.compare, self.scope]
    shape = lambda x: (entropy_shares(x, x.known(sets), self.h_floor), {})
    shares, _ = self._compared(shape, x)
    return shares.plus + shares.minus

  def _compared(self, shape: Callable[[Units], ShapingOutputs], x: Units) -> ShapingOutputs:
    """Returns `shape(x)`, with the k-th drawn tokens of all completions in one column."""
    if self.compare != "position" or x.gaps is False:
      return shape(x)

    def without_gaps(x: Units) -> ShapingOutputs:  # moves the drawn tokens to the front
      columns = drawn_columns(x.mask)
      front = lambda values: jnp.put_along_axis(values, columns, values, -1, inplace=False)
      arrays = {name: front(getattr(x, name)) for name in ("entropy", "mask", "tokens")}
      shaped, metrics = shape(x._replace(**arrays))
      return jax.tree.map(lambda r: jnp.take_along_axis(r, columns, -1), shaped), metrics

    return jax.lax.cond(has_gaps(x.mask), without_gaps, shape, x)


@dataclasses.dataclass(frozen=True)
class CompletionShaping(EntropyShaping):
  """The base of the shapings whose unit of credit is a completion."""

  mean: str = setting(
    "arithmetic",
    '"arithmetic" or "geometric": the mean over a completion\'s token entropies that is used as '
    "the entropy of the completion.",
    one_of(MEANS),
  )


_ALPHA1 = "the base reward (final paper, eqs. 3, 5)."
_ALPHA2 = "the weight of the entropy term (final paper, eqs. 3, 5)."
_ALPHA = "the weight of the entropy term, which is added to a base reward of 1 (v1, eq. 2)."
_BETA = "the weight of the entropy term, which is added to a base reward of 1 (v1, eq. 5)."
_KAPPA = "upper bound of the shaped reward on O+: base + base / kappa (v1, eqs. 11-12); 0 for none."


@dataclasses.dataclass(frozen=True)
class GtpoShaping(TokenShaping):
  """`alpha1 + alpha2 rel(H)` on O+, `-alpha1 - alpha2 rel(1/H)` on O- (final paper, eqs. 3-7)."""

  alpha1: float = setting(1.0, _ALPHA1, AT_LEAST_0)
  alpha2: float = setting(0.1, _ALPHA2, AT_LEAST_0)

  @property
  def plus(self) -> BaseAndWeight:
    return self.alpha1, self.alpha2

  @property
  def minus(self) -> BaseAndWeight:
    return self.plus


@dataclasses.dataclass(frozen=True)
class GtpoV1Shaping(TokenShaping):
  """`1 + alpha rel(H)` on O+, 0 on O- (v1, eqs. 2-4)."""

  alpha: float = setting(0.1, _ALPHA, AT_LEAST_0)

  @property
  def plus(self) -> BaseAndWeight:
    return 1.0, self.alpha


@dataclasses.dataclass(frozen=True)
class GtpoV1ClippedShaping(TokenShaping):
  """`alpha1 + alpha2 rel(H)`, clipped, on O+, 0 on O- (v1, eqs. 11-12)."""

  alpha1: float = setting(0.9, _ALPHA1, AT_LEAST_0)
  alpha2: float = setting(0.1, _ALPHA2, AT_LEAST_0)
  kappa: float = setting(3.0, _KAPPA, AT_LEAST_0)
  floor: float = setting(
    1.0,
    "lower bound of the shaped reward on O+ (v1, eqs. 11-12). The paper uses 1, or alternatively "
    "alpha1.",
    AT_LEAST_0,
  )

  def __post_init__(self):
    """Rejects settings that eqs. 11-12 do not allow, such as an empty range of the clip."""
    super().__post_init__()
    if abs(self.alpha1 + self.alpha2 - 1) > 1e-6:
      raise UserError(
        "algorithm.alpha1 and algorithm.alpha2 must sum to 1 (v1, eq. 11), got "
        f"{self.alpha1} + {self.alpha2}"
      )
    if not self.kappa:
      return
    if self.kappa <= 1:
      raise UserError(
        f"algorithm.kappa must be above 1 (v1, eq. 11), or 0 for no upper bound, got {self.kappa}"
      )
    upper = self.alpha1 + self.alpha1 / self.kappa
    least = self.floor * self.kappa / (self.kappa + 1)
    if self.alpha1 < least:
      raise UserError(
        f"algorithm.alpha1 must be at least floor * kappa / (kappa + 1) = {least:.4g}, "
        f"got {self.alpha1}: the clip range [floor, alpha1 + alpha1/kappa] = "
        f"[{self.floor:g}, {upper:.4g}] is empty"
      )

  @property
  def plus(self) -> BaseAndWeight:
    return self.alpha1, self.alpha2


@dataclasses.dataclass(frozen=True)
class GtpoV2Shaping(GtpoV1Shaping):
  """`1 + alpha rel(H)` on O+, `-rel(1/H)` on O- (v1, eqs. 13-16)."""

  kappa: float = setting(0.0, _KAPPA, AT_LEAST_0)

  @property
  def minus(self) -> BaseAndWeight:
    return 0.0, 1.0


@dataclasses.dataclass(frozen=True)
class GrpoSShaping(CompletionShaping):
  """`beta1 + beta2 rel(H)` on O+, `-beta1 - beta2 rel(1/H)` on O- (final paper, eqs. 8-11)."""

  beta1: float = setting(1.0, "the base reward (final paper, eqs. 8, 10).", AT_LEAST_0)
  beta2: float = setting(
    0.1, "the weight of the entropy term (final paper, eqs. 8, 10).", AT_LEAST_0
  )

  @property
  def plus(self) -> BaseAndWeight:
    return self.beta1, self.beta2

  @property
  def minus(self) -> BaseAndWeight:
    return self.plus


@dataclasses.dataclass(frozen=True)
class GrpoSV1Shaping(CompletionShaping):
  """`1 + beta rel(H)` on O+, 0 on O- (v1, eqs. 5-8)."""

  beta: float = setting(0.1, _BETA, AT_LEAST_0)

  @property
  def plus(self) -> BaseAndWeight:
    return 1.0, self.beta


@dataclasses.dataclass(frozen=True)
class GrpoSV2Shaping(GrpoSV1Shaping):
  """`1 + beta rel(H)` on O+, `-rel(1/H)` on O- (v1, eqs. 17-19)."""

  @property
  def minus(self) -> BaseAndWeight:
    return 0.0, 1.0


@dataclasses.dataclass(frozen=True)
class PassKShaping(PlainReward):
  """The reward of a completion is that of the groups of k that it can be in (2508.10751).

  With N completions, of which M are incorrect, a random group of k has the mean reward
  `R = 1 - C(M, k) / C(N, k)` and the standard deviation `s = sqrt(R (1 - R))`. The mean reward of
  the groups with a given completion is 1 on O+ and `1 - C(M - 1, k - 1) / C(N - 1, k - 1)` on O-.
  The shaped reward is this plus the penalty, divided by s. Its mean over the completions is R / s
  plus that of the penalties. It is 0 where s is 0: if all groups of k succeed, or all fail.
  """

  from_verdict: ClassVar[bool] = True

  pass_k: int = setting(
    4,
    "the number of completions of which one must be correct; 1 for GRPO's advantages.",
    number(lambda x: x >= 1, "an integer >= 1", numbers.Integral),
  )

  def __call__(self, x: Units) -> ShapingOutputs:
    k = min(self.pass_k, x.mask.shape[1])
    count = x.mask.sum((1, 2), keepdims=True)
    wrong = x.minus.sum((1, 2), keepdims=True)
    all_wrong = none_correct(wrong, count, k)
    std = jnp.sqrt(all_wrong * (1.0 - all_wrong))
    scale = jnp.where(std > 0, 1.0 / jnp.where(std > 0, std, 1.0), 0.0)
    others_wrong = none_correct(wrong - 1, count - 1, k - 1)
    plus = jnp.where(x.plus, scale * (1.0 + x.penalty), 0.0)
    minus = jnp.where(x.minus, scale * (1.0 - others_wrong + x.penalty), 0.0)
    return ShapedRewards(plus, minus), {}


def none_correct(wrong: jax.Array, count: jax.Array, k: int) -> jax.Array:
  """Returns the probability that k of `count` completions, or all if there are fewer, are wrong.

  It is `C(wrong, k) / C(count, k)`, f32 of the shape of both counts.
  """
  drawn = jnp.arange(k)
  left = jnp.maximum(count[..., None] - drawn, 1)
  factors = jnp.where(drawn < count[..., None], (wrong[..., None] - drawn) / left, 1.0)
  return jnp.prod(jnp.maximum(factors, 0.0), -1)


@dataclasses.dataclass(frozen=True)
class LengthPenalty(Checked):
  """The penalty for long completions, which is added to their rewards (`rewards/length.py`)."""

  prefix: ClassVar[str] = "algorithm."
  read_if: ClassVar[Mapping[str, Condition]] = {
    "overlong_buffer": Condition(
      "length_penalty = 'overlong'", lambda x: x.length_penalty == "overlong"
    ),
    "gamma": Condition(
      "length_penalty = 'group_relative'", lambda x: x.length_penalty == "group_relative"
    ),
  }

  length_penalty: str = setting(
    "overlong",
    '"overlong" (DAPO\'s soft punishment, which equals R(i) of v1, section 4.5.1) or '
    '"group_relative" (final paper, appendix D).',
    one_of(LENGTH_PENALTIES),
  )
  overlong_buffer: int = setting(
    0,
    'number of tokens before the length limit over which "overlong" falls from 0 to -1; 0 for off.',
    number(lambda x: x >= 0, "an integer >= 0 (tokens)", numbers.Integral),
  )
  gamma: float = setting(
    0.75,
    'for "group_relative": a group is easy if at least this fraction of its completions is '
    "correct, and hard if at least this fraction is incorrect.",
    number(lambda x: 0.5 < x <= 1, "in (0.5, 1]"),
  )
