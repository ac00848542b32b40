"""The hyperparameters of all recipes, validated at construction."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from gtpo_jax.algorithms.advantages import NORM_SCOPE
from gtpo_jax.algorithms.corrections import BEHAVIOURS, TIS_LEVELS
from gtpo_jax.algorithms.loss_aggregation import LOSS_AGGREGATIONS
from gtpo_jax.algorithms.objectives import OBJECTIVES
from gtpo_jax.algorithms.ratios import RATIOS
from gtpo_jax.algorithms.relative_entropy import COMPARE
from gtpo_jax.algorithms.units import MEANS
from gtpo_jax.runtime.errors import UserError

LENGTH_PENALTIES = ("overlong", "r_length", "group_relative")
INFINITY = float("inf")

# Settings of earlier versions and their current names.
RENAMED = {"average": "loss_aggregation"}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The hyperparameters of all recipes. A recipe reads those in its `settings`; others are None.

  O+ and O- are the correct and the incorrect completions of a batch, or their tokens. "Final paper"
  and "v1" are the final and the first version of 2508.04349.

  Attributes:
    objective: the surrogate objective, a name from `OBJECTIVES`. Each objective has settings of its
      own, which are marked with its name below.
    contrast: whether groups without contrast, in which all completions are correct or all are
      incorrect, are excluded from the loss and from all statistics. Algorithm 1 of v1, as printed,
      does not exclude them.
    alpha1, alpha2: `gtpo`, `gtpo_v1_clipped`: the base reward and the weight of the entropy term
      (final paper, eqs. 3, 5).
    alpha: `gtpo_v1`, `gtpo_v2`: the weight of the entropy term, which is added to a base reward of
      1 (v1, eq. 2).
    beta1, beta2: `grpo_s`: the base reward and the weight of the entropy term (final paper, eqs. 8,
      10).
    beta: `grpo_s_v1`, `grpo_s_v2`: the weight of the entropy term, which is added to a base reward
      of 1 (v1, eq. 5).
    kappa: upper bound of the shaped reward on O+: base + base / kappa (v1, eqs. 11-12); 0 for no
      bound. Above 1 in `gtpo_v1_clipped`.
    floor: lower bound of the shaped reward on O+ (v1, eqs. 11-12). The paper uses 1, or
      alternatively alpha1.
    compare: which tokens a token's entropy is compared with: "position" (those at the same position
      in all completions), "sequence" (those of its own completion) or "matrix" (all tokens). Tokens
      of O+ are compared only with O+, those of O- only with O-.
    scope: whether "all" in `compare` means the completions of the same prompt ("group") or of all
      prompts ("batch"). In `grpo_s*`: the completions that a completion is compared with.
    norm_scope: "group" or "batch": the completions over which the mean and std of the advantages
      are computed.
    h_floor: lower bound in nats that is applied to entropies before 1/H and before the geometric
      mean.
    sign_guard: clamp advantages to be >= 0 for correct units and <= 0 for incorrect ones.
    mean: "arithmetic" or "geometric": the mean over a completion's token entropies that is used as
      the entropy of the completion.
    ratio: the importance ratio: "token" (each token's own), "arithmetic" or "geometric" (the mean
      over the token ratios of a completion; these need one advantage per completion), or
      "gspo_token" (the value of "geometric", with a gradient per token).
    loss_aggregation: how the objectives of the tokens are combined into the loss: "token" (mean
      over all tokens of the batch), "completion" (mean over the tokens of each completion, then
      over completions), "group" (mean over the tokens of each group, then over groups) or
      "constant" (sum over tokens, divided by completions x maximum length).
    eps_low, eps_high: `clip`, `clip_cov`, `stare`: the clip range [1 - eps_low, 1 + eps_high] of
      the importance ratio. `cispo`: the same range, for the weight of a token; eps_low = 1 for no
      lower bound. `gmpo`: the clip range [-eps_low, eps_high] of the log-ratio.
    dual_clip: `clip`, `clip_cov`, `stare`: lower bound of the objective of tokens with a negative
      advantage, as a multiple of the advantage (1912.09729); above 1, or 0 for off.
    tau_positive, tau_negative: `sapo`: the temperature of the gate for tokens with a positive
      advantage, and for all others.
    delta_low, delta_high: `dppo`: how far the probability of a token may fall or rise, in the
      direction of its advantage, before the token has no gradient.
    ratio_cap: `dppo`: upper bound of the importance ratio.
    selected_share: the fraction of the tokens of a gradient update that the objective selects: of
      all tokens (`clip_cov`, `kl_cov`) or of those with a positive advantage (`stare`).
    cov_low, cov_high: `clip_cov`: tokens are selected if their covariance term lies between these.
    kl_cov_coef: `kl_cov`: the weight of |log r| for the selected tokens.
    surprise_weight: `stare`: multiplies the objective of the selected tokens.
    entropy_gate: `stare`: select tokens only while the mean entropy is below this value, in nats.
    bonus_alpha, bonus_kappa: `entropy_advantage`: min(bonus_alpha * H, |A| / bonus_kappa) is added
      to the advantage of each token (2506.14758, eq. 5).
    entropy_coef: the weight of the policy's entropy, which is added to the objective; with
      `entropy_target`, its initial value. 0 for no entropy bonus.
    entropy_target: adapt the weight of the entropy to this mean entropy of the sampled tokens, in
      nats (2505.22312): at each gradient update, the weight rises by `entropy_coef_delta` if the
      entropy is at most the target, and falls by as much otherwise. The bonus applies only in the
      first case. 0 for a constant weight.
    entropy_coef_delta: the change of the weight of the entropy at each gradient update.
    entropy_coef_max: the upper bound of the adapted weight.
    forking_share: train on only this fraction of the loss tokens, those with the highest entropy in
      the batch (2506.01939).
    kl_weight: weight of the k3 estimate of the KL divergence to a frozen reference, added to the
      loss (GRPO, 2402.03300, eq. 4); 0 for off.
    tis_cap: truncated importance sampling: weights each token by min(pi_trainer / pi_sampler,
      tis_cap). pi_trainer is the policy's probability before the update, computed by the trainer;
      the ratio of the update is then relative to it (the decoupled objective, 2505.24298).
      pi_sampler is the probability when the token was drawn, computed by the sampler. 0 for off,
      which also saves the pass over the batch that computes pi_trainer.
    tis_level: "token" (each token's probabilities) or "sequence" (those of its whole completion).
    mask_low, mask_high: leave completions out of the loss for which the geometric mean of
      pi_trainer / pi_sampler over their tokens is outside of [mask_low, mask_high]; 0 for no bound.
    behaviour: what pi_sampler is: "policy" (the sampling policy's probability, at its temperature)
      or "drawn" (that of the distribution the token was drawn from, after penalty, top-k, top-p and
      min-p).
    length_penalty: "overlong" (DAPO's soft punishment), "r_length" (another name for "overlong",
      which equals R(i) of v1, section 4.5.1) or "group_relative" (final paper, appendix D).
    overlong_buffer: number of tokens before the length limit over which "overlong" falls from 0 to
      -1; 0 for off.
    gamma: for "group_relative": a group is easy if at least this fraction of its completions is
      correct, and hard if at least this fraction is incorrect.
    overlong_filter: exclude completions that were cut off at the length limit from the loss and
      from the statistics of their group.
    dynamic_sampling: replace all-correct and all-wrong groups by groups of further prompts (DAPO).
    guide_completions: number of completions per group that are sampled from the frozen guide
      (2507.12931).
    guide_cap: upper bound of the importance ratio pi / pi_guide.
    lambda_zero: loss weight of the groups in which the guide is correct and the policy never is.
  """

  objective: str | None = None
  contrast: bool | None = None
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
  tau_positive: float | None = None
  tau_negative: float | None = None
  delta_low: float | None = None
  delta_high: float | None = None
  ratio_cap: float | None = None
  selected_share: float | None = None
  cov_low: float | None = None
  cov_high: float | None = None
  kl_cov_coef: float | None = None
  surprise_weight: float | None = None
  entropy_gate: float | None = None
  bonus_alpha: float | None = None
  bonus_kappa: float | None = None
  entropy_coef: float | None = None
  entropy_target: float | None = None
  entropy_coef_delta: float | None = None
  entropy_coef_max: float | None = None
  forking_share: float | None = None
  kl_weight: float | None = None
  tis_cap: float | None = None
  tis_level: str | None = None
  mask_low: float | None = None
  mask_high: float | None = None
  behaviour: str | None = None
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
      check = CHECKS[field.name]
      if value is not None and not check.accepts(value):
        raise UserError(f"algorithm.{field.name} must be {check.description}, got {value!r}")
    self._check_bounds()
    self._check_length_penalty()
    self._check_clip_range()
    self._check_corrections()

  @property
  def masks_completions(self) -> bool:
    """Whether completions that the policy is too far from are left out of the loss."""
    return bool(self.mask_low or self.mask_high)

  @property
  def needs_rescoring(self) -> bool:
    """Whether the trainer's log-probs of the sampled tokens are needed before the update."""
    return bool(self.tis_cap) or self.masks_completions

  def _check_corrections(self) -> None:
    """Rejects settings of corrections that are off."""
    if self.mask_low and self.mask_high and self.mask_low > self.mask_high:
      raise UserError(
        f"algorithm.mask_low must be at most mask_high = {self.mask_high}, got {self.mask_low}"
      )
    if self.tis_level == "sequence" and not self.tis_cap:
      raise UserError(
        "algorithm.tis_level = 'sequence' needs importance weights; set tis_cap, for example to 2"
      )
    if self.behaviour == "drawn" and not self.needs_rescoring:
      raise UserError(
        "algorithm.behaviour = 'drawn' needs a correction; set tis_cap, for example to 2, or "
        "mask_low and mask_high"
      )

  def _check_bounds(self) -> None:
    """Rejects ranges whose lower bound is above the upper one."""
    ordered = [("cov_low", "cov_high")]
    if self.objective in ("clip", "clip_cov", "stare"):
      ordered.append(("eps_low", "eps_high"))
    if self.entropy_target:
      ordered.append(("entropy_coef", "entropy_coef_max"))
    for low, high in ordered:
      lower = getattr(self, low)
      upper = getattr(self, high)
      if None not in (lower, upper) and lower > upper:
        raise UserError(f"algorithm.{low} must be at most {high} = {upper}, got {lower}")

  def _check_length_penalty(self) -> None:
    if self.length_penalty == "group_relative" and self.overlong_buffer:
      raise UserError(
        f"algorithm.overlong_buffer = {self.overlong_buffer} has no effect with length_penalty = "
        "'group_relative'; set overlong_buffer = 0, or length_penalty = 'overlong'"
      )
    if self.length_penalty == "r_length" and self.overlong_buffer == 0:
      raise UserError(
        "algorithm.length_penalty = 'r_length' needs overlong_buffer > 0, the number of tokens "
        "before the length limit over which the penalty falls from 0 to -1; got 0"
      )

  def _check_clip_range(self) -> None:
    """Rejects settings of `gtpo_v1_clipped` that eqs. 11-12 of v1 do not allow.

    Some of them would make the range [floor, alpha1 + alpha1 / kappa] on O+ empty.
    """
    if self.floor is None or self.alpha1 is None or self.alpha2 is None:
      return
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


@dataclasses.dataclass(frozen=True)
class _Check:
  """The values that a setting may have."""

  accepts: Callable[[Any], bool]
  description: str  # completes "algorithm.NAME must be ..."


def _number(test: Callable[[Any], bool], description: str, kind: type = numbers.Real) -> _Check:
  accepts = lambda x: isinstance(x, kind) and not isinstance(x, bool) and bool(test(x))
  return _Check(accepts, description)


def _choice(names: Iterable[str]) -> _Check:
  choices = tuple(dict.fromkeys(names))  # without duplicates, in order
  return _Check(lambda x: isinstance(x, str) and x in choices, f"one of {', '.join(choices)}")


_FLAG = _Check(lambda x: isinstance(x, bool), "True or False")
_SHARE = _number(lambda x: 0 < x <= 1, "in (0, 1]")
_AT_LEAST_0 = _number(lambda x: 0 <= x < INFINITY, "at least 0 and finite")
_ABOVE_0 = _number(lambda x: 0 < x < INFINITY, "above 0 and finite")

CHECKS: dict[str, _Check] = {
  "objective": _choice(OBJECTIVES),
  "contrast": _FLAG,
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
    lambda x: 1e-30 <= x < INFINITY, "at least 1e-30 (1/h_floor must fit float32) and finite"
  ),
  "sign_guard": _FLAG,
  "mean": _choice(MEANS),
  "ratio": _choice(RATIOS),
  "loss_aggregation": _choice(LOSS_AGGREGATIONS),
  "eps_low": _SHARE,
  "eps_high": _ABOVE_0,
  "dual_clip": _number(lambda x: x == 0 or 1 < x < INFINITY, "above 1 and finite, or 0 for off"),
  "tau_positive": _ABOVE_0,
  "tau_negative": _ABOVE_0,
  "delta_low": _SHARE,
  "delta_high": _SHARE,
  "ratio_cap": _number(lambda x: 1 <= x < INFINITY, "at least 1 and finite"),
  "selected_share": _SHARE,
  "cov_low": _number(lambda x: abs(x) < INFINITY, "finite"),
  "cov_high": _number(lambda x: abs(x) < INFINITY, "finite"),
  "kl_cov_coef": _AT_LEAST_0,
  "surprise_weight": _ABOVE_0,
  "entropy_gate": _AT_LEAST_0,
  "bonus_alpha": _AT_LEAST_0,
  "bonus_kappa": _number(lambda x: 1 <= x < INFINITY, "at least 1 and finite"),
  "entropy_coef": _AT_LEAST_0,
  "entropy_target": _AT_LEAST_0,
  "entropy_coef_delta": _AT_LEAST_0,
  "entropy_coef_max": _AT_LEAST_0,
  "forking_share": _SHARE,
  "kl_weight": _AT_LEAST_0,
  "tis_cap": _AT_LEAST_0,
  "tis_level": _choice(TIS_LEVELS),
  "mask_low": _AT_LEAST_0,
  "mask_high": _AT_LEAST_0,
  "behaviour": _choice(BEHAVIOURS),
  "length_penalty": _choice(LENGTH_PENALTIES),
  "overlong_buffer": _number(lambda x: x >= 0, "an integer >= 0 (tokens)", numbers.Integral),
  "gamma": _number(lambda x: 0.5 < x <= 1, "in (0.5, 1]"),
  "overlong_filter": _FLAG,
  "dynamic_sampling": _FLAG,
  "guide_completions": _number(lambda x: x >= 1, "an integer >= 1", numbers.Integral),
  "guide_cap": _ABOVE_0,
  "lambda_zero": _AT_LEAST_0,
}
