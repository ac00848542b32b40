"""The complete configuration of a run: its sections, checks across them, and derived values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Algorithm, Distillation
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
from gtpo_jax.data.sources import is_source
from gtpo_jax.data.tasks import FILLER, TASKS, Forks
from gtpo_jax.models.config import ModelConfig
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.fields import at_least, check_bounds, setting
from gtpo_jax.sampling.settings import Demand, EngineConfig, SamplingParams
from gtpo_jax.training.state import OptimizerConfig

SEED = at_least(0)._replace(largest=2**32 - 1)


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
    self._check_bounds()
    self._check_model()
    self._check_data()
    self._check_env()
    self._check_algorithm()

  def _check_bounds(self) -> None:
    check_bounds(self, "")
    if self.sampling.temperature == 0:
      raise UserError(
        "sampling.temperature must be above 0 while learning, got 0: "
        "greedy completions of a prompt are all the same"
      )

  def _check_model(self) -> None:
    preset = self.model.preset
    if preset not in PRESETS:
      raise UserError(
        f"unknown model.preset {preset!r}{did_you_mean(preset, PRESETS)}; "
        f"valid are {', '.join(PRESETS)}"
      )
    m = self.model
    if m.quantize and not m.lora_rank:
      raise UserError(
        f"model.quantize = {m.quantize!r} needs adapters, because quantised matrices are not "
        "trained; set model.lora_rank"
      )
    if m.quantize and self.sampling.weights_dtype:
      raise UserError(
        f"sampling.weights_dtype = {self.sampling.weights_dtype!r} has no effect on the base, "
        f"which is {m.quantize} already (model.quantize); leave it empty"
      )
    architecture = self.model.with_formats(PRESETS[preset], "float32")  # checks formats in any case
    if not self.model.path:
      self.check_context(architecture)

  def _check_data(self) -> None:
    for name in (*(name for name, _ in self.data.sources), *self.data.eval_names):
      if name not in TASKS and not is_source(name):
        raise UserError(
          f"unknown task {name!r} in data{did_you_mean(name, TASKS)}; "
          f"valid are {', '.join(TASKS)}, or a source: a .jsonl or .parquet file, hf:ID, tfds:NAME "
          "or rg:NAME"
        )
    if not self.data.eval and self.data.train_task is None:
      raise UserError(
        "data.eval must name the problems to evaluate on, "
        f"since data.train = {self.data.train!r} has no held-out part"
      )
    if len(self.data.eval_names) > self.eval.problems:
      raise UserError(
        f"eval.problems = {self.eval.problems} is below the number of sources in data.eval, "
        f"{len(self.data.eval_names)}; raise it"
      )
    self._check_warm_start()
    if "{prompt}" not in self.data.template:
      raise UserError(f"data.template must contain {{prompt}}, got {self.data.template!r}")
    _ = self.data.eval_task  # refuses a difficulty that its task does not have
    if self.data.filler != FILLER and not any(
      isinstance(task, Forks) for task in (self.data.train_task, self.data.eval_task)
    ):
      raise UserError(
        f"data.filler = {self.data.filler} only has an effect with data.train = 'forks' or "
        f"'forks_confident'; use one of them, or leave data.filler at {FILLER}"
      )

  def _check_env(self) -> None:
    if not self.env.is_used:
      for task in (self.data.train_task, self.data.eval_task):
        if needs := getattr(task, "needs", ""):
          raise UserError(f"the task {task.name!r} has several turns: set {needs}")
      if "env" in dict(self.reward.weighted):
        raise UserError(
          f"reward.parts = {self.reward.parts!r} has the part env: set env.make or env.tools"
        )
      return
    name = "env.make" if self.env.make else "env.tools"
    if not self.data.chat:
      raise UserError(f"{name} needs the chat template, but data.chat is False; set it to True")
    if self.resolved_algorithm.settings.guide_completions:
      raise UserError(
        f"{name} does not work with algorithm {self.algorithm.name!r}, whose guide writes whole "
        "completions; use another algorithm"
      )
    if self.teacher.prompt:
      raise UserError(
        f"{name} does not work with teacher.prompt, because the environment may add to the prompt; "
        "leave teacher.prompt out"
      )

  def _check_warm_start(self) -> None:
    section = self.warm_start
    if section.data and not section.steps:
      raise UserError(
        f"warm_start.data = {section.data!r} is set, but warm_start.steps is 0; set the steps to "
        "the number of updates, such as 500"
      )
    if section.data and not is_source(section.data):
      raise UserError(
        f"warm_start.data must name a source (a .jsonl or .parquet file, hf:ID, tfds:NAME), "
        f"got {section.data!r}"
      )
    if section.steps and not section.data and self.data.train_task is None:
      raise UserError(
        f"warm_start.steps = {section.steps} needs demonstrations of data.train = "
        f"{self.data.train!r}: set warm_start.data to a file with the columns prompt and "
        "completion, or steps to 0 and model.path to a model"
      )
    _ = self.warm_start.columns

  def _check_algorithm(self) -> None:
    settings = self.resolved_algorithm.settings
    if self.sampling.weights_dtype and not settings.tis_cap:
      raise UserError(
        f"sampling.weights_dtype = {self.sampling.weights_dtype!r} samples from another policy "
        "than the trained one, which must be corrected for: set algorithm.tis_cap, such as 2"
      )
    if settings.overlong_buffer >= self.sampling.max_tokens:
      raise UserError(
        f"algorithm.overlong_buffer must be below sampling.max_tokens = "
        f"{self.sampling.max_tokens}, got {settings.overlong_buffer}"
      )
    if self.policy_completions < 2:
      raise UserError(
        f"algorithm.guide_completions must leave at least two of batch.group = {self.batch.group} "
        f"to the policy itself, got {settings.guide_completions}"
      )
    if self.guide.path and not settings.guide_completions:
      raise UserError(
        f"guide.path is set, but algorithm {self.algorithm.name!r} has no guide; "
        "use 'dapo_mixed', or leave guide.path out"
      )
    if self.reference.path and not settings.kl_weight:
      raise UserError(
        "reference.path is set, but algorithm.kl_weight is 0; "
        "give it a weight, or leave the path out"
      )
    self._check_teacher()

  def _check_teacher(self) -> None:
    teacher = self.teacher
    if teacher.prompt and "{prompt}" not in teacher.prompt:
      raise UserError(f"teacher.prompt must contain {{prompt}}, got {teacher.prompt!r}")
    if teacher.max_prompt_tokens and not teacher.prompt:
      raise UserError(
        f"teacher.max_prompt_tokens = {teacher.max_prompt_tokens} only has an effect with "
        "teacher.prompt; set it, or leave teacher.max_prompt_tokens at 0"
      )
    if teacher.path and teacher.policy:
      raise UserError(
        f"teacher.path = {teacher.path!r} and teacher.policy = {teacher.policy!r} are two "
        "teachers; leave one of them out"
      )
    if teacher.policy == "current" and not teacher.prompt:
      raise UserError(
        "teacher.policy = 'current' is the policy itself unless it reads something else: set "
        "teacher.prompt"
      )
    if teacher.exists:
      return
    if teacher.prompt:
      raise UserError(
        f"teacher.prompt = {teacher.prompt!r} has no effect without a teacher: set teacher.path or "
        "teacher.policy"
      )
    if self.resolved_algorithm.recipe.distillation:
      raise UserError(
        f"algorithm {self.algorithm.name!r} learns from a teacher: set teacher.path to the workdir "
        "of a run, a Hugging Face folder or a hub id"
      )
    if self.distill != Distillation():
      raise UserError("distill has no effect without a teacher: set teacher.path, or leave it out")

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
    """The algorithm with this run's settings, published values filled in."""
    settings = dataclasses.asdict(self.algorithm)
    name = settings.pop("name")
    chosen = {key: value for key, value in settings.items() if value is not None}
    return algorithms.make(name, self.distill if self.teacher.exists else None, **chosen)

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

  @property
  def eval_sampling_params(self) -> SamplingParams:
    """How evaluation draws its samples."""
    return SamplingParams(self.eval.temperature, top_p=self.eval.top_p)


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
