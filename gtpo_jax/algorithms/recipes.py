"""The recipes: for each algorithm, the parts that it consists of, with their published settings.

GTPO here is the method of arXiv 2508.04349. It is not "Group-relative Trajectory-based Policy
Optimization" (arXiv 2508.03772).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gtpo_jax.algorithms.advantages import (
  NEEDS,
  Advantage,
  Distillation,
  GroupNormalisation,
  Normalisation,
  QuantileBaseline,
  SideWeights,
  TwoSidedNormalisation,
  best_margin,
  joint_centred,
  joint_zscore,
  leave_one_out,
  mean_normalised,
  no_credit,
  optimal_token_baseline,
  part_zscores,
  quantile_zscore,
  two_sided_zscore,
  value_gain,
  weighted_sides,
  whitened,
)
from gtpo_jax.algorithms.continuations import (
  LineContinuations,
  NoContinuations,
  UncertainContinuations,
)
from gtpo_jax.algorithms.corrections import Corrections
from gtpo_jax.algorithms.loss import Aggregation, EntropyBonus, Guide, NoGuide, ReferencePenalty
from gtpo_jax.algorithms.modulation import (
  AdvantageBonus,
  ConfidenceModulation,
  NoModulation,
  TeacherModulation,
)
from gtpo_jax.algorithms.objectives import (
  CHOICE,
  OBJECTIVES,
  Aspo,
  Cispo,
  Clip,
  ClipCov,
  Dppo,
  Fipo,
  Gmpo,
  KlCov,
  Objective,
  Sapo,
  Stare,
)
from gtpo_jax.algorithms.ratios import RATIOS
from gtpo_jax.algorithms.selection import ForkingSelection, Selection
from gtpo_jax.algorithms.shaping import (
  GrpoSShaping,
  GrpoSV1Shaping,
  GrpoSV2Shaping,
  GtpoShaping,
  GtpoV1ClippedShaping,
  GtpoV1Shaping,
  GtpoV2Shaping,
  LengthPenalty,
  PassKShaping,
  PlainReward,
  TokenReward,
)
from gtpo_jax.algorithms.turn_credit import TurnCredit
from gtpo_jax.runtime.fields import Checked


@dataclasses.dataclass(frozen=True)
class Recipe:
  """An algorithm as parts, each a frozen dataclass of the settings that it reads.

  A setting belongs to exactly one part. `make` replaces the values that a user changes.

  Attributes:
    paper: the source.
    advantage: computes advantages from shaped rewards.
    rewards: the rewards of an incorrect and of a correct completion, without penalties.
    shaping: computes shaped rewards and diagnostics from units of credit.
    objective: the surrogate objective.
    normalisation: over which completions advantages are normalised.
    continuations: where completions are cut, and how often each prefix is continued.
    turns: the credit of an episode's turns beside their completion.
    modulation: changes the advantages of single tokens by their entropy, or by a teacher.
    aggregation: how the objectives of the tokens are combined into the loss.
    selection: which groups, completions and tokens are trained on.
    reference: the KL divergence to a reference, in the loss.
    entropy_bonus: the policy's entropy, in the loss.
    corrections: importance weights and masks for tokens that another distribution has drawn.
    length_penalty: the penalty for long completions, in the reward.
    guide: the frozen policy that samples some of the completions.
    distillation: adds a teacher's divergence to the advantages; None without one. Its settings are
      those of the config's section `distill`.
  """

  paper: str
  advantage: Advantage
  rewards: tuple[float, float] = (0.0, 1.0)
  shaping: PlainReward = PlainReward()
  objective: Objective = Clip()
  normalisation: GroupNormalisation = GroupNormalisation()
  continuations: NoContinuations = NoContinuations()
  turns: TurnCredit = TurnCredit()
  modulation: NoModulation = NoModulation()
  aggregation: Aggregation = Aggregation()
  selection: Selection = Selection()
  reference: ReferencePenalty = ReferencePenalty()
  entropy_bonus: EntropyBonus = EntropyBonus()
  corrections: Corrections = Corrections()
  length_penalty: LengthPenalty = LengthPenalty()
  guide: Any = NoGuide()  # or a Guide
  distillation: Distillation | Any = None

  @property
  def parts(self) -> dict[str, Checked]:
    """The parts with settings of the config's section `algorithm`, by the names of their fields."""
    parts = {name: part for name, part in vars(self).items() if isinstance(part, Checked)}
    return {name: part for name, part in parts.items() if part is not self.distillation}

  @functools.cached_property
  def settings(self) -> dict[str, Any]:
    """The settings that the recipe reads, with their values; `objective` is its name."""
    values = {"objective": self.objective.name}
    for part in self.parts.values():
      values |= dataclasses.asdict(part)
    return values

  @property
  def needs(self) -> tuple[str, ...]:
    """The fields of `Signals` that only this algorithm's advantages need; see also `turns`."""
    return NEEDS.get(self.advantage, ())

  @property
  def selects(self) -> bool:
    """Whether the loss needs `selected`, from `Algorithm.select`."""
    return bool(self.objective.select_needs)

  @property
  def per_token(self) -> bool:
    """Whether each token's term of the loss depends only on that token's log-prob and signals.

    If so, the tokens of a batch can be split in any way, and the loss is the sum of
    `Algorithm.token_loss` over the parts.
    """
    return RATIOS[self.objective.ratio].per_token and self.objective.per_token

  @property
  def matches_distributions(self) -> bool:
    """Whether the loss has a divergence between the policy's and a teacher's distributions."""
    return self.distillation is not None and not self.distillation.sampled

  @property
  def per_token_credit(self) -> bool:
    """Whether the tokens of a completion can have different advantages."""
    of_tokens = self.turns or self.modulation.per_token
    of_tokens = of_tokens or (self.distillation and self.distillation.sampled)
    return not self.shaping.per_completion or bool(of_tokens)

  def with_objective(self, name: str) -> Recipe:
    """Returns the recipe with the objective `name` and the settings published for it.

    The recipe's own objective keeps its settings. Another one keeps the recipe's ratio if it is
    defined for it.
    """
    if name == self.objective.name:
      return self
    objective = OBJECTIVES[name]()
    if self.objective.ratio in objective.ratios:
      objective = dataclasses.replace(objective, ratio=self.objective.ratio)
    return dataclasses.replace(self, objective=objective)

  def with_settings(self, settings: dict[str, Any]) -> Recipe:
    """Returns the recipe with the values in `settings` for settings that it reads."""
    parts = {}
    for name, part in self.parts.items():
      own = {field.name for field in dataclasses.fields(part)} & settings.keys()
      parts[name] = dataclasses.replace(part, **{key: settings[key] for key in own})
    return dataclasses.replace(self, **parts)


_FINAL = "2508.04349, final"
_V1 = "2508.04349, v1"
_BATCH = Normalisation(norm_scope="batch")
_GROUP = Normalisation(norm_scope="group")
_TWO_SIDED_BATCH = TwoSidedNormalisation(norm_scope="batch")
_TWO_SIDED_GROUP = TwoSidedNormalisation(norm_scope="group")
_COMPLETIONS = Aggregation("completion")
_ALL_GROUPS = Selection(contrast=False)
_DYNAMIC = Selection(dynamic_sampling=True)
_PPO = Clip(eps_low=0.2, eps_high=0.2)

_token_credit = functools.partial(Recipe, normalisation=_BATCH)
_completion_credit = functools.partial(
  Recipe, objective=Clip(ratio="arithmetic"), normalisation=_GROUP, aggregation=_COMPLETIONS
)
_grpo = functools.partial(Recipe, aggregation=_COMPLETIONS, selection=_ALL_GROUPS)
_reinforce = functools.partial(Recipe, objective=_PPO, selection=_ALL_GROUPS)
_dapo = functools.partial(Recipe, rewards=(-1.0, 1.0), selection=_DYNAMIC)

# Values that a row does not name are the defaults of its parts.
RECIPES: dict[str, Recipe] = {
  "gtpo": _token_credit(
    f"{_FINAL}, eqs. 3-7",
    two_sided_zscore,
    shaping=GtpoShaping(alpha1=1.0, alpha2=0.1),
    normalisation=_TWO_SIDED_BATCH,
  ),
  "gtpo_v1": _token_credit(f"{_V1}, eqs. 2-4", joint_zscore, shaping=GtpoV1Shaping(alpha=0.1)),
  "gtpo_v1_clipped": _token_credit(
    f"{_V1}, eqs. 11-12",
    joint_zscore,
    shaping=GtpoV1ClippedShaping(alpha1=0.9, alpha2=0.1, kappa=3.0, floor=1.0),
  ),
  "gtpo_v2": _token_credit(
    f"{_V1}, eqs. 13-16",
    two_sided_zscore,
    shaping=GtpoV2Shaping(alpha=0.1, kappa=0.0),
    normalisation=_TWO_SIDED_GROUP,
  ),
  "grpo_s": _completion_credit(
    f"{_FINAL}, eqs. 8-11",
    two_sided_zscore,
    shaping=GrpoSShaping(beta1=1.0, beta2=0.1),
    normalisation=_TWO_SIDED_GROUP,
  ),
  "grpo_s_v1": _completion_credit(
    f"{_V1}, eqs. 5-8", joint_zscore, shaping=GrpoSV1Shaping(beta=0.1)
  ),
  "grpo_s_v2": _completion_credit(
    f"{_V1}, eqs. 17-19",
    two_sided_zscore,
    shaping=GrpoSV2Shaping(beta=0.1),
    normalisation=_TWO_SIDED_GROUP,
  ),
  "grpo": _grpo("2402.03300", joint_zscore, objective=_PPO),
  "dapo": _dapo("2503.14476", joint_zscore, objective=Clip(eps_low=0.2, eps_high=0.28)),
  "dapo_forking": _dapo(
    "2506.01939", joint_zscore, selection=ForkingSelection(dynamic_sampling=True, forking_share=0.2)
  ),
  "dr_grpo": _grpo(
    "2503.20783", joint_centred, objective=_PPO, aggregation=Aggregation("constant")
  ),
  "gspo": _grpo(
    "2507.18071", joint_zscore, objective=Clip(ratio="geometric", eps_low=3e-4, eps_high=4e-4)
  ),
  "dapo_mixed": _dapo(
    "2507.12931", joint_zscore, guide=Guide(guide_completions=4, guide_cap=2.0, lambda_zero=0.5)
  ),
  "cispo": Recipe(
    "2506.13585", joint_zscore, objective=Cispo(eps_low=1.0, eps_high=4.0), selection=_ALL_GROUPS
  ),
  "sapo": _grpo("2511.20347", joint_zscore, objective=Sapo(tau_positive=1.0, tau_negative=1.05)),
  "gmpo": _grpo("2507.20673", joint_zscore, objective=Gmpo(eps_low=0.4, eps_high=0.4)),
  "gspo_token": _grpo(
    "2507.18071, section 4.3",
    joint_zscore,
    objective=Clip(ratio="gspo_token", eps_low=3e-4, eps_high=4e-4),
  ),
  "dppo": Recipe(
    "2602.04879",
    joint_centred,
    objective=Dppo(delta_low=0.2, delta_high=0.2, ratio_cap=5.0),
    selection=_ALL_GROUPS,
  ),
  "clip_cov": Recipe(
    "2505.22617",
    joint_zscore,
    objective=ClipCov(selected_share=2e-4, cov_low=1.0, cov_high=5.0),
    selection=_ALL_GROUPS,
  ),
  "kl_cov": Recipe(
    "2505.22617",
    joint_zscore,
    objective=KlCov(selected_share=2e-3, kl_cov_coef=1.0),
    selection=_ALL_GROUPS,
  ),
  "rloo": _reinforce("2402.14740", leave_one_out),
  "reinforce_pp": _reinforce("2501.03262", whitened),
  "max_rl": _reinforce("2602.02710", mean_normalised),
  "qae": _dapo("2509.22611", quantile_zscore, normalisation=QuantileBaseline()),
  "otb": _reinforce("2602.07078", optimal_token_baseline, shaping=TokenReward()),
  "vineppo": _reinforce(
    "2410.01679", value_gain, shaping=TokenReward(), continuations=LineContinuations()
  ),
  "spo_chain": _reinforce(
    "2505.23564", value_gain, shaping=TokenReward(), continuations=UncertainContinuations()
  ),
  "gdpo": _reinforce("2601.05242", part_zscores),
  "pass_at_k": _grpo("2508.10751", joint_centred, shaping=PassKShaping(), objective=_PPO),
  "pass_k_max": _reinforce("2503.19595", best_margin),
  "w_reinforce": _reinforce(
    "2506.01347", weighted_sides, rewards=(-1.0, 1.0), normalisation=SideWeights()
  ),
  "entropy_advantage": _dapo(
    "2506.14758", joint_zscore, modulation=AdvantageBonus(bonus_alpha=0.4, bonus_kappa=2.0)
  ),
  "stare": Recipe(
    "2606.19236",
    joint_zscore,
    objective=Stare(selected_share=0.1, surprise_weight=1.1, entropy_gate=0.3),
    selection=_DYNAMIC,
  ),
  "aspo": _dapo("2510.06062", joint_zscore, objective=Aspo()),
  "fipo": _dapo("2603.19835", joint_zscore, objective=Fipo()),
  "empg": _dapo("2509.09265", joint_zscore, modulation=ConfidenceModulation()),
  "gigpo": _reinforce("2505.10978", joint_zscore, turns=TurnCredit("state", turn_discount=0.95)),
  "turn_return": _reinforce(
    "2511.14846", joint_zscore, turns=TurnCredit("return", outcome_weight=0.0)
  ),
  "mt_grpo": _reinforce("2505.11821", joint_zscore, turns=TurnCredit("reward")),
  "rlsd": _grpo(
    "2604.03128",
    joint_zscore,
    objective=_PPO,
    modulation=TeacherModulation(),
    distillation=Distillation(),
  ),
  "opd": _reinforce("2306.13649, 2306.08543", no_credit, distillation=Distillation()),
}


def declarations() -> dict[str, dict[type, dataclasses.Field]]:
  """Returns the declarations of every setting: its fields, by the parts that have it."""
  found: dict[str, dict[type, dataclasses.Field]] = {"objective": {Objective: CHOICE}}
  parts = [type(part) for recipe in RECIPES.values() for part in recipe.parts.values()]
  for part in dict.fromkeys([*OBJECTIVES.values(), *parts]):
    for field in dataclasses.fields(part):
      found.setdefault(field.name, {})[part] = field
  return found


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings of any algorithm by name; None for settings that it does not read.

  These are all fields that the parts of the recipes and the objectives declare (`declarations`),
  written out for readers and type checkers. A test compares them.
  """

  objective: str | None = None
  ratio: str | None = None
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
  half_life: float | None = None
  influence_low: float | None = None
  influence_high: float | None = None
  safe_ratio: float | None = None
  h_floor: float | None = None
  compare: str | None = None
  scope: str | None = None
  alpha1: float | None = None
  alpha2: float | None = None
  norm_scope: str | None = None
  norm_sides: str | None = None
  sign_guard: bool | None = None
  turn_credit: str | None = None
  step_weight: float | None = None
  outcome_weight: float | None = None
  turn_discount: float | None = None
  turn_norm: str | None = None
  loss_aggregation: str | None = None
  contrast: bool | None = None
  overlong_filter: bool | None = None
  dynamic_sampling: bool | None = None
  kl_weight: float | None = None
  kl_estimator: str | None = None
  entropy_coef: float | None = None
  entropy_target: float | None = None
  entropy_coef_delta: float | None = None
  entropy_coef_max: float | None = None
  tis_cap: float | None = None
  tis_level: str | None = None
  mask_low: float | None = None
  mask_high: float | None = None
  behaviour: str | None = None
  length_penalty: str | None = None
  overlong_buffer: int | None = None
  gamma: float | None = None
  alpha: float | None = None
  floor: float | None = None
  kappa: float | None = None
  mean: str | None = None
  beta1: float | None = None
  beta2: float | None = None
  beta: float | None = None
  forking_share: float | None = None
  guide_completions: int | None = None
  guide_cap: float | None = None
  lambda_zero: float | None = None
  baseline_quantile: float | None = None
  continuations: int | None = None
  cut_probability: float | None = None
  cut_interval: int | None = None
  pass_k: int | None = None
  positive_weight: float | None = None
  bonus_alpha: float | None = None
  bonus_kappa: float | None = None
  step: str | None = None
  confidence_k: float | None = None
  clarity: float | None = None
  clarity_k: float | None = None
  teacher_mix: float | None = None
  teacher_clip: float | None = None
