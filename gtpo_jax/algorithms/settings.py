"""The hyperparameters of every recipe, checked when they are set."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from gtpo_jax.algorithms.advantages import NORM_SCOPE
from gtpo_jax.algorithms.losses import AVERAGES
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS
from gtpo_jax.algorithms.relative_entropy import COMPARE
from gtpo_jax.algorithms.shaping import MEANS
from gtpo_jax.runtime.errors import UserError

LENGTH_PENALTIES = ("overlong", "r_length", "group_relative")
INFINITY = float("inf")


@dataclasses.dataclass(frozen=True)
class Settings:
  """Every hyperparameter of every recipe; a recipe reads those that its row lists, the others stay None.

  Attributes:
    alpha1, alpha2: token level, final form: the base reward, and the weight of the entropy share (eqs. 3, 5).
    alpha: token level, v1 and v2: the weight of the entropy share beside a base of 1 (v1, eq. 2).
    beta1, beta2: the final form at the sequence level (eqs. 8, 10).
    beta: v1 and v2 at the sequence level (v1, eq. 5).
    kappa: the shaped reward of O+ ends at base + base / kappa (v1, eqs. 11-12); 0 sets no end.
    floor: the shaped reward of O+ begins here (v1, eqs. 11-12): 1, or the paper's other choice, alpha1.
    compare: "position", "sequence" or "matrix": which entropies a token's is compared with.
    scope: "group" or "batch": whose completions are compared.
    norm_scope: "group" or "batch": over what advantages are z-scored.
    h_floor: nats; entropies below it count as it in 1/H.
    sign_guard: no correct unit gets a negative advantage, no wrong one a positive.
    mean: "arithmetic" or "geometric": the entropy of a whole completion.
    ratio: "arithmetic" or "geometric": the importance ratio of a whole completion.
    average: how the tokens' objectives become the loss: "token" (all tokens of the batch alike), "completion" (tokens, then
      completions), "group" (tokens of each group, then groups) or "constant" (their sum over completions x longest length).
    eps_low, eps_high: the clip range [1 - eps_low, 1 + eps_high].
    dual_clip: where A < 0 the objective is at least dual_clip * A (1912.09729); above 1, 0 switches it off.
    forking_share: the share of the batch's loss tokens, those of highest entropy, that are learned from (2506.01939).
    kl_weight: of the k3 estimate of the KL to a frozen reference, added to the loss (GRPO, 2402.03300 eq. 4); 0 switches it off.
    tis_cap: tokens weigh min(pi_trainer / pi_sampler, tis_cap), both of the policy that sampled, against a sampler that
      computes otherwise than the trainer; 0 switches it off, and with it the pass that scores the rollouts again.
    length_penalty: "overlong" (DAPO's soft punishment; "r_length", R(i) of v1 section 4.5.1, is the same function) or
      "group_relative" (final paper, appendix D).
    overlong_buffer: tokens before the length limit over which "overlong" falls from 0 to -1; 0 switches it off.
    gamma: "group_relative": a group is easy when this share of it is right, hard when this share is wrong.
    overlong_filter: completions that were cut off take no part, in the loss or in their group's statistics.
    dynamic_sampling: groups without contrast are replaced by others, sampled from further prompts (DAPO).
    guide_completions: how many of a group's completions the frozen guide writes (2507.12931).
    guide_cap: the largest importance ratio pi / pi_guide.
    lambda_zero: the weight of the groups whose own completions are all wrong and in which the guide was right.
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
  average: str | None = None
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
      if value is not None and not _valid(field.name, value):
        raise UserError(f"algorithm.{field.name} must be {_bound(field.name)}, got {value!r}")
    if self.eps_low is not None and self.eps_high is not None and self.eps_low > self.eps_high:
      raise UserError(
        f"algorithm.eps_low must be in (0, eps_high], got {self.eps_low} > {self.eps_high}"
      )
    if self.length_penalty == "group_relative" and self.overlong_buffer:
      raise UserError(
        f"algorithm.overlong_buffer = {self.overlong_buffer} is not read by length_penalty = 'group_relative'; "
        f"leave one of them out"
      )
    if self.length_penalty == "r_length" and self.overlong_buffer == 0:
      raise UserError(
        "algorithm.length_penalty = 'r_length' needs overlong_buffer, the tokens before the limit over which it falls; got 0"
      )
    if self.kappa and self.floor is not None and self.alpha1 is not None:
      end = self.alpha1 + self.alpha1 / self.kappa
      least = self.floor * self.kappa / (self.kappa + 1)
      if self.alpha1 < least:
        raise UserError(
          f"algorithm.alpha1 must be at least floor * kappa / (kappa + 1) = {least:.4g}, got {self.alpha1}: the clip range "
          f"[floor, alpha1 + alpha1/kappa] = [{self.floor:g}, {end:.4g}] is empty"
        )


def _valid(name: str, value: Any) -> bool:
  bound = BOUNDS[name]
  if isinstance(bound, tuple):
    return isinstance(value, str) and value in bound
  if bound is bool or isinstance(value, bool):
    return bound is bool and isinstance(value, bool)
  test, _ = bound.check
  return isinstance(value, numbers.Integral if bound.whole else numbers.Real) and bool(test(value))


def _bound(name: str) -> str:
  bound = BOUNDS[name]
  if isinstance(bound, tuple):
    return f"one of {', '.join(bound)}"
  return "True or False" if bound is bool else bound.check[1]


@dataclasses.dataclass(frozen=True)
class _Number:
  """What a number must be: the test, and its words."""

  check: tuple[Any, str]
  whole: bool = False


_AT_LEAST_0 = _Number((lambda x: 0 <= x < INFINITY, "at least 0 and finite"))
_ABOVE_0 = _Number((lambda x: 0 < x < INFINITY, "above 0 and finite"))
_OFF_OR_ABOVE_1 = _Number(
  (lambda x: x == 0 or 1 < x < INFINITY, "above 1 and finite, or 0 for off")
)

# What each setting may be: a choice of words, a truth value, or a number.
BOUNDS: dict[str, tuple[str, ...] | type | _Number] = {
  **dict.fromkeys(
    (
      "alpha1",
      "alpha2",
      "alpha",
      "beta1",
      "beta2",
      "beta",
      "kappa",
      "floor",
      "kl_weight",
      "tis_cap",
      "lambda_zero",
    ),
    _AT_LEAST_0,
  ),
  **dict.fromkeys(("eps_high", "guide_cap"), _ABOVE_0),
  "h_floor": _Number(
    (lambda x: 1e-30 <= x < INFINITY, "at least 1e-30 (its inverse must be a float32) and finite")
  ),
  **dict.fromkeys(("sign_guard", "overlong_filter", "dynamic_sampling"), bool),
  "compare": tuple(dict.fromkeys(compare for compare, _ in COMPARE)),
  "scope": tuple(dict.fromkeys(scope for _, scope in COMPARE)),
  "norm_scope": tuple(NORM_SCOPE),
  "mean": tuple(MEANS),
  "ratio": tuple(SEQUENCE_RATIOS),
  "average": tuple(AVERAGES),
  "length_penalty": LENGTH_PENALTIES,
  "eps_low": _Number((lambda x: 0 < x < 1, "in (0, 1)")),
  "dual_clip": _OFF_OR_ABOVE_1,
  "forking_share": _Number((lambda x: 0 < x <= 1, "in (0, 1]")),
  "gamma": _Number((lambda x: 0.5 < x <= 1, "in (0.5, 1]")),
  "overlong_buffer": _Number((lambda x: x >= 0, "at least 0, in whole tokens"), whole=True),
  "guide_completions": _Number((lambda x: x >= 1, "at least 1, a whole number"), whole=True),
}
