"""The whole configuration of a run: its sections, what is checked across them, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Algorithm
from gtpo_jax.config.sections import (
  LEARNING,
  AlgorithmSection,
  BatchSection,
  CheckpointSection,
  DataSection,
  EvalSection,
  FrozenSection,
  GuardSection,
  LogSection,
  MeshSection,
  ModelSection,
  ProfileSection,
  RewardSection,
  SamplingSection,
  WarmStartSection,
)
from gtpo_jax.data.sources import is_source
from gtpo_jax.data.tasks import TASKS, Task, make_task
from gtpo_jax.models.folder import find, read_config
from gtpo_jax.models.presets import PRESETS, Lora, ModelConfig
from gtpo_jax.runtime.errors import UserError, nearest
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import EngineConfig
from gtpo_jax.training.state import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run.

  Attributes:
    seed: of initialisation, data order and sampling.
    steps: rollouts, each followed by its update; the optimizer's schedule counts them too.
  """

  seed: int = 0
  steps: int = 50
  model: ModelSection = ModelSection()
  mesh: MeshSection = MeshSection()
  data: DataSection = DataSection()
  batch: BatchSection = BatchSection()
  sampling: SamplingSection = SamplingSection()
  reward: RewardSection = RewardSection()
  algorithm: AlgorithmSection = AlgorithmSection()
  guide: FrozenSection = FrozenSection()
  reference: FrozenSection = FrozenSection()
  optimizer: OptimizerConfig = LEARNING
  warm_start: WarmStartSection = WarmStartSection()
  eval: EvalSection = EvalSection()
  checkpoint: CheckpointSection = CheckpointSection()
  guards: GuardSection = GuardSection()
  log: LogSection = LogSection()
  profile: ProfileSection = ProfileSection()

  def __post_init__(self):
    at_least = {
      "steps": 1,
      "batch.prompts": 1,
      "batch.minibatches": 1,
      "batch.epochs": 1,
      "batch.micro_batches": 1,
      "batch.head_chunk": 1,
      "batch.max_gen_batches": 1,
      "sampling.max_tokens": 2,
      "data.max_prompt_tokens": 1,
      "warm_start.steps": 0,
      "warm_start.batch": 1,
      "warm_start.slips": 0,
      "eval.every": 0,
      "eval.problems": 1,
      "eval.samples": 1,
      "eval.batch": 1,
      "checkpoint.every": 1,
      "checkpoint.keep": 1,
      "guards.skipped": 1,
      "guards.stall_s": 0,
      "log.samples": 0,
      "log.credit_every": 0,
      "log.credit_groups": 1,
      "seed": 0,
      "data.bad_rows": 0,
      "reward.code_memory_mb": 16,
    }
    if self.seed >= 2**32:
      raise UserError(f"seed must be below 2**32, got {self.seed}")
    values = flatten(to_dict(self))
    for name, least in at_least.items():
      if not values[name] >= least:  # NaN too
        raise UserError(f"{name} must be at least {least}, got {values[name]}")
    if self.batch.group < 2:
      raise UserError(
        f"batch.group must be at least 2, got {self.batch.group}: a completion is judged against its group"
      )
    if self.sampling.temperature == 0:
      raise UserError(
        "sampling.temperature must be above 0 while learning, got 0: greedy completions of a prompt are all the same"
      )
    if not 0 <= self.eval.temperature < float("inf"):
      raise UserError(
        f"eval.temperature must be at least 0 and finite, got {self.eval.temperature}"
      )
    if not 0 < self.eval.top_p <= 1:
      raise UserError(f"eval.top_p must be in (0, 1], got {self.eval.top_p}")
    if self.model.preset not in PRESETS:
      raise UserError(
        f"unknown model.preset {self.model.preset!r}{nearest(self.model.preset, PRESETS)}; valid are {', '.join(PRESETS)}"
      )
    for name in (*(name for name, _ in self.train_sources), self.eval_name):
      if name not in TASKS and not is_source(name):
        raise UserError(
          f"unknown task {name!r} in data{nearest(name, TASKS)}; valid are {', '.join(TASKS)}, or a source: a .jsonl or "
          f".parquet file, hf:ID, tfds:NAME"
        )
    if not self.data.eval and self.train_task is None:
      raise UserError(
        f"data.eval must name the problems to evaluate on, since data.train = {self.data.train!r} holds none out"
      )
    if self.warm_start.steps and self.train_task is None:
      raise UserError(
        f"warm_start.steps = {self.warm_start.steps} needs a task with a teacher ({', '.join(TASKS)}), not "
        f"data.train = {self.data.train!r}; set it to 0 and model.path to a model"
      )
    if "{prompt}" not in self.data.template:
      raise UserError(f"data.template must hold {{prompt}}, got {self.data.template!r}")
    # Made once here, so that a value that one of them refuses is refused now.
    for part in (
      "model_config",
      "sampling_params",
      "eval_sampling_params",
      "train_task",
      "eval_task",
      "algorithm_built",
    ):
      getattr(self, part)
    if (
      length := self.data.max_prompt_tokens + self.sampling.max_tokens
    ) > self.model_config.longest:
      raise UserError(
        f"data.max_prompt_tokens + sampling.max_tokens = {length} is over the model's context of {self.model_config.longest}"
      )
    settings = self.algorithm_built.settings
    if settings.overlong_buffer >= self.sampling.max_tokens:
      raise UserError(
        f"algorithm.overlong_buffer must be below sampling.max_tokens = {self.sampling.max_tokens}, "
        f"got {settings.overlong_buffer}"
      )
    if self.policy_completions < 2:
      raise UserError(
        f"algorithm.guide_completions must leave two of batch.group = {self.batch.group} to the policy itself, "
        f"got {settings.guide_completions}"
      )
    if self.guide.path and not settings.guide_completions:
      raise UserError(
        f"guide.path is set, but algorithm {self.algorithm.name!r} has no guide; use 'dapo_mixed', or leave it out"
      )
    if self.reference.path and not settings.kl_weight:
      raise UserError(
        "reference.path is set, but algorithm.kl_weight is 0; give it a weight, or leave the path out"
      )

  @property
  def model_config(self) -> ModelConfig:
    """The preset's or the folder's architecture, in this run's number formats."""
    m = self.model
    shape = read_config(find(m.path), m.param_dtype) if m.path else PRESETS[m.preset]
    lora = Lora(
      m.lora_rank, m.lora_alpha, tuple(filter(None, m.lora_targets.replace(" ", "").split(",")))
    )
    return dataclasses.replace(
      shape,
      param_dtype=m.param_dtype,
      compute_dtype=m.compute_dtype,
      matmul_precision=m.matmul_precision,
      remat=m.remat,
      attention=m.attention,
      lora=lora,
    )

  @property
  def policy_completions(self) -> int:
    """How many completions of a prompt the policy itself writes; a guide writes the others."""
    return self.batch.group - (self.algorithm_built.settings.guide_completions or 0)

  @property
  def sampling_params(self) -> SamplingParams:
    """How rollouts are drawn."""
    return _part(SamplingParams, self.sampling)

  @property
  def engine_config(self) -> EngineConfig:
    """How much is sampled at once."""
    return _part(EngineConfig, self.sampling)

  @property
  def eval_sampling_params(self) -> SamplingParams:
    """How evaluation draws."""
    return SamplingParams(self.eval.temperature, top_p=self.eval.top_p)

  @property
  def train_sources(self) -> list[tuple[str, float]]:
    """What is learned from, with weights."""
    if len(parts := self.data.train.split(",")) == 1 and "*" not in self.data.train:
      return [(self.data.train, 1.0)]
    pairs = [part.strip().rpartition("*") for part in parts]
    try:
      weighted = [(name, float(weight)) for name, _, weight in pairs]
    except ValueError:
      weighted = []
    if not weighted or not all(name and 0 < weight < float("inf") for name, weight in weighted):
      raise UserError(
        f"data.train names several sources as a.jsonl*2,b.parquet*1 with weights above 0, got {self.data.train!r}"
      )
    return weighted

  @property
  def train_task(self) -> Task | None:
    """The task learned; None where it is a source."""
    return (
      make_task(self.data.train, self.data.terms, self.data.largest)
      if self.data.train in TASKS
      else None
    )

  @property
  def eval_name(self) -> str:
    """The task or source evaluated."""
    return self.data.eval or self.data.train

  @property
  def eval_task(self) -> Task | None:
    """The task evaluated; None where it is a source."""
    return (
      make_task(self.eval_name, self.data.terms, self.data.largest)
      if self.eval_name in TASKS
      else None
    )

  @property
  def algorithm_built(self) -> Algorithm:
    """The recipe with this run's settings."""
    given = dataclasses.asdict(self.algorithm)
    name = given.pop("name")
    return algorithms.make(
      name, **{key: value for key, value in given.items() if value is not None}
    )


def _part(kind: type, whole: Any) -> Any:
  """An object of a dataclass, with the values that another has under the same names."""
  return kind(**{field.name: getattr(whole, field.name) for field in dataclasses.fields(kind)})


def to_dict(config: Config) -> dict[str, Any]:
  """The config as nested plain dicts, ready for JSON; `freeze` is the way back."""
  return dataclasses.asdict(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one, keys joined with dots."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= (
      flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    )
  return flat
