"""The complete configuration of a run: its sections, checks across them, and derived values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Algorithm, Distillation
from gtpo_jax.config.checks import (
  check_continuations,
  check_data,
  check_env,
  check_model,
  check_reward,
  check_sampling,
  check_teacher,
  check_warm_start,
)
from gtpo_jax.config.data_sections import DataSection, EnvSection, RewardSection, WarmStartSection
from gtpo_jax.config.monitoring import (
  CheckpointSection,
  EvalSection,
  GuardSection,
  LogSection,
  ProfileSection,
)
from gtpo_jax.config.sections import (
  RL_OPTIMIZER,
  AlgorithmSection,
  BatchSection,
  FrozenSection,
  MeshSection,
  ModelSection,
  SamplingSection,
  TeacherSection,
)
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import at_least, check_bounds, setting
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams
from gtpo_jax.training.state import OptimizerConfig

SEED = at_least(0)._replace(largest=2**32 - 1)


STALE_TIS_CAP = 2.0  # docs/experiments.md, "What old tokens do to the gradient"


@dataclasses.dataclass(frozen=True)
class Config:
  """The configuration of a run.

  The constructor checks every value without reading a file or the network. The model that a config
  names is read by `config.resolve_model`.

  Attributes:
    seed: seed of initialisation, data order and sampling.
    steps: number of steps, each a rollout and its gradient updates; the learning-rate schedule
      counts them too.

  Raises:
    UserError: a value is out of bounds, or two values are incompatible.
  """

  seed: int = setting(0, bound=SEED)
  steps: int = setting(50, bound=at_least(1))
  model: ModelSection = ModelSection()
  mesh: MeshSection = MeshSection()
  data: DataSection = DataSection()
  batch: BatchSection = BatchSection()
  sampling: SamplingSection = SamplingSection()
  reward: RewardSection = RewardSection()
  env: EnvSection = EnvSection()
  algorithm: AlgorithmSection = AlgorithmSection()
  guide: FrozenSection = FrozenSection()
  reference: FrozenSection = FrozenSection()
  teacher: TeacherSection = TeacherSection()
  distill: Distillation = Distillation()
  optimizer: OptimizerConfig = RL_OPTIMIZER
  warm_start: WarmStartSection = WarmStartSection()
  eval: EvalSection = EvalSection()
  checkpoint: CheckpointSection = CheckpointSection()
  guards: GuardSection = GuardSection()
  log: LogSection = LogSection()
  profile: ProfileSection = ProfileSection()

  def __post_init__(self):
    check_bounds(self, "")
    check_model(self.model, self.sampling)
    if not self.model.path:
      self.check_context(PRESETS[self.model.preset])
    check_data(self.data, self.eval)
    check_warm_start(self.warm_start, self.data)
    algorithm = self.resolved_algorithm
    check_env(self.env, self.data, self.teacher, algorithm)
    check_sampling(self.sampling, self.batch, algorithm)
    check_continuations(algorithm, self.env, self.sampling, self.reward, self.log)
    check_reward(self.reward, self.batch, algorithm)
    check_teacher(self.teacher, algorithm)

  def check_context(self, architecture: ModelConfig, teacher: bool = False) -> None:
    """Raises UserError if prompt and completion together exceed the context of a model.

    `teacher` says that the model is the teacher, whose prompts can be longer.
    """
    section = "teacher" if teacher and self.teacher.max_prompt_tokens else "data"
    length = getattr(self, section).max_prompt_tokens + self.sampling.max_tokens
    if length > architecture.max_length:
      raise UserError(
        f"{section}.max_prompt_tokens + sampling.max_tokens = {length} is over the model's context "
        f"of {architecture.max_length}"
      )

  @property
  def teacher_prompt_tokens(self) -> int:
    """The longest prompt of the teacher."""
    return self.teacher.max_prompt_tokens or self.data.max_prompt_tokens

  @functools.cached_property
  def resolved_algorithm(self) -> Algorithm:
    """The algorithm with this run's settings, published values filled in.

    Tokens that are two or more updates old are weighted, unless `algorithm.tis_cap` says otherwise.
    """
    settings = dataclasses.asdict(self.algorithm)
    name = settings.pop("name")
    chosen = {key: value for key, value in settings.items() if value is not None}
    if self.sampling.staleness >= 2:
      chosen.setdefault("tis_cap", STALE_TIS_CAP)
    return algorithms.make(name, self.distill if self.teacher.exists else None, **chosen)

  @property
  def conversations(self) -> int | None:
    """The most conversations of a completion, if an agent may hold several; else None."""
    return self.env.max_conversations if self.env.agent else None

  @property
  def policy_completions(self) -> int:
    """Completions per prompt that the policy itself writes; a guide writes the rest of a group."""
    return self.batch.group - (self.resolved_algorithm.settings.guide_completions or 0)

  @property
  def sampling_params(self) -> SamplingParams:
    """How rollouts are drawn."""
    return _select(SamplingParams, self.sampling)

  @property
  def engine_config(self) -> EngineConfig:
    """The settings of the sampling engine."""
    return _select(EngineConfig, self.sampling)

  @property
  def sampling_demand(self) -> Demand:
    """The batches that the run samples, for training and evaluation."""
    own = self.policy_completions
    completions = max(self.pool_size * own, self.eval.batch * self.eval.samples)
    return Demand(completions, own)

  @property
  def needs_drawn_log_probs(self) -> bool:
    """Whether rollouts contain the log-probs of the filtered distribution."""
    return self.resolved_algorithm.settings.behaviour == "drawn"

  @property
  def pool_size(self) -> int:
    """The most groups that are sampled at once, or wait to be trained on."""
    return self.batch.prompts * (1 + self.sampling.staleness)


def _select(cls: type, section: Any) -> Any:
  """Returns an instance of the dataclass `cls` with the fields of the same names in `section`."""
  return cls(**{field.name: getattr(section, field.name) for field in dataclasses.fields(cls)})


def to_dict(config: Config) -> dict[str, Any]:
  """Returns the config as nested plain dicts, ready for JSON; `freeze` is the inverse."""
  return dataclasses.asdict(config)


def resolved_dict(config: Config) -> dict[str, Any]:
  """Returns `to_dict(config)` with the value of every setting that the algorithm reads.

  This is what a run records: a later change of a published default cannot change its meaning.
  """
  values = to_dict(config)
  values["algorithm"] |= config.resolved_algorithm.recipe.settings
  return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns nested dicts as one dict, with keys joined by dots."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
  return flat
