"""The hyperparameters of every recipe, validated at construction."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from gtpo_jax.algorithms.advantages import NORM_SCOPE
from gtpo_jax.algorithms.loss_aggregation import LOSS_AGGREGATIONS
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS
from gtpo_jax.algorithms.relative_entropy import COMPARE
from gtpo_jax.algorithms.units import MEANS
from gtpo_jax.runtime.errors import UserError

LENGTH_PENALTIES = ("overlong", "r_length", "group_relative")
INFINITY = float("inf")

# Settings of earlier versions and their current names.
RENAMED = {"average": "loss_aggregation"}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Every hyperparameter of every recipe. A recipe reads those in its row; the rest stay None.

  Attributes:
    alpha1, alpha2: final token-level form: the base reward and the weight of the entropy share
      (eqs. 3, 5).
    alpha: token-level form of v1 and v2: the weight of the entropy share, added to a base of 1 (v1,
      eq. 2).
    beta1, beta2: final sequence-level form: the base reward and the weight of the entropy share
      (eqs. 8, 10).
    beta: sequence-level form of v1 and v2: the weight of the entropy share, added to a base of 1
      (v1, eq. 5).
    kappa: caps the shaped reward on O+ at base + base / kappa (v1, eqs. 11-12); 0 for no cap.
    floor: lower bound of the shaped reward on O+ (v1, eqs. 11-12): 1, or the paper's alternative,
      alpha1.
    compare: "position", "sequence" or "matrix": the entropies that a token's entropy is compared
      with.
    scope: "group" or "batch": the completions that are compared.
    norm_scope: "group" or "batch": the set over which advantages are z-scored.
    h_floor: lowest entropy in 1/H, in nats; lower entropies count as this value.
    sign_guard: clamp advantages: no correct unit gets a negative one, no incorrect one a positive.
    mean: "arithmetic" or "geometric": how token entropies become the entropy of a completion.
    ratio: "arithmetic" or "geometric": how token ratios become the ratio of a completion.
    loss_aggregation: how the tokens' objectives become the loss: "token" (mean over all tokens of
      the batch), "completion" (over tokens, then completions), "group" (over the tokens of each
      group, then groups) or "constant" (their sum divided by completions x longest length).
    eps_low, eps_high: the clip range [1 - eps_low, 1 + eps_high].
    dual_clip: lower bound of the objective where A < 0, as a multiple of A (1912.09729); above 1,
      or 0 for off.
    forking_share: fraction of the batch's loss tokens to learn from: those of highest entropy
      (2506.01939).
    kl_weight: weight of the k3 estimate of the KL divergence to a frozen reference, added to the
      loss (GRPO, 2402.03300, eq. 4); 0 for off.
    tis_cap: weighs tokens by min(pi_trainer / pi_sampler, tis_cap), two computations of the policy
      that sampled, to correct for differences between sampler and trainer; 0 turns this off, and
      with it the extra pass that rescores the rollouts.
    length_penalty: "overlong" (DAPO's soft punishment; "r_length", R(i) of v1, section 4.5.1, is
      the same function) or "group_relative" (final paper, appendix D).
    overlong_buffer: number of tokens before the length limit over which "overlong" falls from 0 to
      -1; 0 for off.
    gamma: for "group_relative": a group is easy if this share of it is correct, hard if this share
      is incorrect.
    overlong_filter: exclude completions that were cut off from the loss and from the statistics of
      their group.
    dynamic_sampling: replace groups without contrast by groups of further prompts (DAPO).
    guide_completions: number of completions per group that the frozen guide writes (2507.12931).
    guide_cap: upper bound of the importance ratio pi / pi_guide.
    lambda_zero: weight of the groups in which the guide is correct and the policy never is.
  """

  alpha1: float | None = None
  alpha2: float | None = None
  alpha: float | None = None
  beta1: float | None = None
  beta2: float | None = None
  beta: float | None = None
  kappa: float | None = None
  floor: float | None = None
  compare: str | None = None
  scope: str | None = None
  norm_scope: str | None = None
  h_floor: float | None = None
  sign_guard: bool | None = None
  mean: str | None = None
  ratio: str | None = None
  loss_aggregation: str | None = None
  eps_low: float | None = None
  eps_high: float | None = None
  dual_clip: float | None = None
  forking_share: float | None = None
  kl_weight: float | None = None
  tis_cap: float | None = None
  length_penalty: str | None = None
  overlong_buffer: int | None = None
  gamma: float | None = None
  overlong_filter: bool | None = None
  dynamic_sampling: bool | None = None
  guide_completions: int | None = None
  guide_cap: float | None = None
  lambda_zero: float | None = None

  def __post_init__(self):
    for field in dataclasses.fields(Settings):
      value = getattr(self, field.name)
      bound = BOUNDS[field.name]
      if value is not None and not bound.accepts(value):
        raise UserError(f"algorithm.{field.name} must be {bound.description}, got {value!r}")
    if self.eps_low is not None and self.eps_high is not None and self.eps_low > self.eps_high:
      raise UserError(
        f"algorithm.eps_low must be in (0, eps_high], got {self.eps_low} > {self.eps_high}"
      )
    self._check_length_penalty()
    self._check_clip_range()

  def _check_length_penalty(self) -> None:
    if self.length_penalty == "group_relative" and self.overlong_buffer:
      raise UserError(
        f"algorithm.overlong_buffer = {self.overlong_buffer} is not read by "
        "length_penalty = 'group_relative'; remove one of the two"
      )
    if self.length_penalty == "r_length" and self.overlong_buffer == 0:
      raise UserError(
        "algorithm.length_penalty = 'r_length' needs overlong_buffer, the number of tokens before "
        "the limit over which it falls; got 0"
      )

  def _check_clip_range(self) -> None:
    """Refuses an empty range [floor, alpha1 + alpha1 / kappa] for the reward on O+."""
    if not self.kappa or self.floor is None or self.alpha1 is None:
      return
    upper = self.alpha1 + self.alpha1 / self.kappa
    least = self.floor * self.kappa / (self.kappa + 1)
    if self.alpha1 < least:
      raise UserError(
        f"algorithm.alpha1 must be at least floor * kappa / (kappa + 1) = {least:.4g}, "
        f"got {self.alpha1}: the clip range [floor, alpha1 + alpha1/kappa] = "
        f"[{self.floor:g}, {upper:.4g}] is empty"
      )


@dataclasses.dataclass(frozen=True)
class _Bound:
  """Which values a setting accepts, as a test and in words."""

  accepts: Callable[[Any], bool]
  description: str


def _number(test: Callable[[Any], bool], description: str, kind: type = numbers.Real) -> _Bound:
  accepts = lambda x: isinstance(x, kind) and not isinstance(x, bool) and bool(test(x))
  return _Bound(accepts, description)


def _choice(names: Iterable[str]) -> _Bound:
  choices = tuple(dict.fromkeys(names))  # without duplicates, in order
  return _Bound(lambda x: isinstance(x, str) and x in choices, f"one of {', '.join(choices)}")


_FLAG = _Bound(lambda x: isinstance(x, bool), "True or False")
_AT_LEAST_0 = _number(lambda x: 0 <= x < INFINITY, "at least 0 and finite")
_ABOVE_0 = _number(lambda x: 0 < x < INFINITY, "above 0 and finite")

BOUNDS: dict[str, _Bound] = {
  "alpha1": _AT_LEAST_0,
  "alpha2": _AT_LEAST_0,
  "alpha": _AT_LEAST_0,
  "beta1": _AT_LEAST_0,
  "beta2": _AT_LEAST_0,
  "beta": _AT_LEAST_0,
  "kappa": _AT_LEAST_0,
  "floor": _AT_LEAST_0,
  "compare": _choice(compare for compare, _ in COMPARE),
  "scope": _choice(scope for _, scope in COMPARE),
  "norm_scope": _choice(NORM_SCOPE),
  "h_floor": _number(
    lambda x: 1e-30 <= x < INFINITY, "at least 1e-30 (its inverse must be a float32) and finite"
  ),
  "sign_guard": _FLAG,
  "mean": _choice(MEANS),
  "ratio": _choice(SEQUENCE_RATIOS),
  "loss_aggregation": _choice(LOSS_AGGREGATIONS),
  "eps_low": _number(lambda x: 0 < x < 1, "in (0, 1)"),
  "eps_high": _ABOVE_0,
  "dual_clip": _number(lambda x: x == 0 or 1 < x < INFINITY, "above 1 and finite, or 0 for off"),
  "forking_share": _number(lambda x: 0 < x <= 1, "in (0, 1]"),
  "kl_weight": _AT_LEAST_0,
  "tis_cap": _AT_LEAST_0,
  "length_penalty": _choice(LENGTH_PENALTIES),
  "overlong_buffer": _number(lambda x: x >= 0, "at least 0, in whole tokens", numbers.Integral),
  "gamma": _number(lambda x: 0.5 < x <= 1, "in (0.5, 1]"),
  "overlong_filter": _FLAG,
  "dynamic_sampling": _FLAG,
  "guide_completions": _number(lambda x: x >= 1, "at least 1, a whole number", numbers.Integral),
  "guide_cap": _ABOVE_0,
  "lambda_zero": _AT_LEAST_0,
}
