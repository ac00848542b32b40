"""The configuration: one frozen dataclass a section, checked when it is made.

A config file is an ml_collections file with `get_config()`; it starts from `default_config()` and changes what it wants.
`freeze` turns the ConfigDict, once, into the dataclasses below. Everything after that reads attributes that exist.
"""
from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict, config_flags

from gtpo_jax import algorithms
from gtpo_jax.algorithms import Algorithm, Settings
from gtpo_jax.data.tasks import TASKS, Task, make_task
from gtpo_jax.errors import UserError, nearest
from gtpo_jax.models.presets import PRESETS, ModelConfig
from gtpo_jax.sampling.filters import Sampler
from gtpo_jax.training.state import OptimizerConfig

LEARNING = OptimizerConfig()
IMITATION = OptimizerConfig(learning_rate=1.5e-3, schedule="cosine", warmup_steps=50, b2=0.99)


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """Which architecture, and the number formats it runs in.

  Attributes:
    preset: a name from `models.PRESETS`.
    param_dtype: of the master weights.
    compute_dtype: of activations and matrix products.
    matmul_precision: "default", "high" or "highest".
    remat: "full" recomputes each layer in the backward pass, "none" keeps its residuals.
  """

  preset: str = "tiny"
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"


@dataclasses.dataclass(frozen=True)
class MeshSection:
  """How devices are arranged; one axis may be -1 and takes what is left.

  Attributes:
    data: replicas of the parameters.
    fsdp: shards of the parameters, gathered when used.
    tensor: shards of heads, MLP and vocabulary.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DataSection:
  """What is learned and what is held out.

  Attributes:
    train: a task: "sums" or "countdown".
    eval: the task evaluated, on its held-out part; "" for the same as `train`.
    terms: difficulty: additions (sums) or numbers (countdown) a problem; 0 for the task's own.
    largest: difficulty: the largest addend or number; 0 for the task's own.
    max_prompt_tokens: every prompt is padded to this; a longer one is refused.
  """

  train: str = "sums"
  eval: str = ""
  terms: int = 0
  largest: int = 0
  max_prompt_tokens: int = 32


@dataclasses.dataclass(frozen=True)
class BatchSection:
  """How much is learned from in one step.

  Attributes:
    prompts: prompts a step (n).
    group: completions a prompt (g), at least 2.
    micro_batches: parts the prompts are cut into for gradients; memory falls, the result does not change.
    head_chunk: about how many tokens' logits are held at once, all devices together; at least one position of every row is.
  """

  prompts: int = 16
  group: int = 16
  micro_batches: int = 1
  head_chunk: int = 4096


@dataclasses.dataclass(frozen=True)
class SamplingSection:
  """How completions are drawn while learning.

  Attributes:
    max_tokens: the longest completion, stop token included.
    temperature: above 0; entropies and log-probs are of the distribution at this temperature.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    min_p: keep tokens at least this fraction as probable as the most probable; 0 keeps all.
  """

  max_tokens: int = 40
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class WarmStartSection:
  """Supervised imitation of the task's imperfect teacher: it makes the base model that RL starts from.

  Attributes:
    steps: updates; 0 starts from random parameters.
    batch: demonstrations an update.
    slips: scales how often the teacher errs.
    optimizer: AdamW of the imitation alone.
  """

  steps: int = 0
  batch: int = 16
  slips: float = 1.0
  optimizer: OptimizerConfig = IMITATION


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """Held-out evaluation: before the first step, every so often, and at the end.

  Attributes:
    every: steps between evaluations; 0 for the first and last alone.
    problems: held-out problems.
    samples: completions a problem, for mean@n and pass@k.
    batch: problems sampled at once.
    temperature: of the sampled completions; a greedy pass is made besides.
  """

  every: int = 10
  problems: int = 500
  samples: int = 8
  batch: int = 64
  temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
  """When the state is saved.

  Attributes:
    every: steps between checkpoints; the last step is always saved.
    keep: newest checkpoints kept.
  """

  every: int = 10
  keep: int = 2


@dataclasses.dataclass(frozen=True)
class LogSection:
  """What is written besides metrics.jsonl.

  Attributes:
    tensorboard: write event files into WORKDIR/tensorboard.
    samples: completions a step written into WORKDIR/samples.jsonl.
  """

  tensorboard: bool = True
  samples: int = 4


@dataclasses.dataclass(frozen=True)
class AlgorithmSection(Settings):
  """The algorithm's name, and its hyperparameters beside it; None takes the published value.

  Attributes:
    name: one of `algorithms.RECIPES`.
  """

  name: str = "gtpo"


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run.

  Attributes:
    seed: of initialisation, data order and sampling.
    steps: rollouts, each followed by one update.
  """

  seed: int = 0
  steps: int = 50
  model: ModelSection = ModelSection()
  mesh: MeshSection = MeshSection()
  data: DataSection = DataSection()
  batch: BatchSection = BatchSection()
  sampling: SamplingSection = SamplingSection()
  algorithm: AlgorithmSection = AlgorithmSection()
  optimizer: OptimizerConfig = LEARNING
  warm_start: WarmStartSection = WarmStartSection()
  eval: EvalSection = EvalSection()
  checkpoint: CheckpointSection = CheckpointSection()
  log: LogSection = LogSection()

  def __post_init__(self):
    at_least = {"steps": 1, "batch.prompts": 1, "batch.micro_batches": 1, "batch.head_chunk": 1, "sampling.max_tokens": 2,
                "data.max_prompt_tokens": 1, "warm_start.steps": 0, "warm_start.batch": 1, "warm_start.slips": 0, "eval.every": 0,
                "eval.problems": 1, "eval.samples": 1, "eval.batch": 1, "checkpoint.every": 1, "checkpoint.keep": 1,
                "log.samples": 0, "seed": 0}
    if self.seed >= 2**32:
      raise UserError(f"seed must be below 2**32, got {self.seed}")
    values = flatten(to_dict(self))
    for name, least in at_least.items():
      if not values[name] >= least:  # NaN too
        raise UserError(f"{name} must be at least {least}, got {values[name]}")
    if self.batch.group < 2:
      raise UserError(f"batch.group must be at least 2, got {self.batch.group}: a completion is judged against its group")
    if self.sampling.temperature == 0:
      raise UserError("sampling.temperature must be above 0 while learning, got 0: greedy completions of a prompt are all the same")
    if not 0 <= self.eval.temperature < float("inf"):
      raise UserError(f"eval.temperature must be at least 0 and finite, got {self.eval.temperature}")
    if self.model.preset not in PRESETS:
      raise UserError(f"unknown model.preset {self.model.preset!r}{nearest(self.model.preset, PRESETS)}; valid are {', '.join(PRESETS)}")
    for name in {self.data.train, self.data.eval or self.data.train}:
      if name not in TASKS:
        raise UserError(f"unknown task {name!r} in data{nearest(name, TASKS)}; valid are {', '.join(TASKS)}")
    # Made once here, so that a value that one of them refuses is refused now.
    for part in ("model_config", "sampler", "eval_sampler", "train_task", "eval_task", "algorithm_object"):
      getattr(self, part)
    if (buffer := self.algorithm_object.settings.overlong_buffer or 0) >= self.sampling.max_tokens:
      raise UserError(f"algorithm.overlong_buffer must be below sampling.max_tokens = {self.sampling.max_tokens}, got {buffer}")

  @property
  def model_config(self) -> ModelConfig:
    """The preset in this run's number formats."""
    formats = {key: value for key, value in dataclasses.asdict(self.model).items() if key != "preset"}
    return dataclasses.replace(PRESETS[self.model.preset], **formats)

  @property
  def sampler(self) -> Sampler:
    """How rollouts are drawn."""
    s = self.sampling
    return Sampler(s.temperature, s.top_k, s.top_p, s.min_p)

  @property
  def eval_sampler(self) -> Sampler:
    """How evaluation draws."""
    return Sampler(self.eval.temperature)

  @property
  def train_task(self) -> Task:
    """The task learned."""
    return make_task(self.data.train, self.data.terms, self.data.largest)

  @property
  def eval_task(self) -> Task:
    """The task evaluated."""
    return make_task(self.data.eval or self.data.train, self.data.terms, self.data.largest)

  @property
  def algorithm_object(self) -> Algorithm:
    """The recipe with this run's settings."""
    given = dataclasses.asdict(self.algorithm)
    name = given.pop("name")
    return algorithms.make(name, **{key: value for key, value in given.items() if value is not None})


def default_config() -> ConfigDict:
  """Every field at its default, as a ConfigDict: what `configs/base.py` returns."""
  return _to_config_dict(Config())


def to_dict(config: Config) -> dict[str, Any]:
  """The config as nested plain dicts, ready for JSON; `freeze` is the way back."""
  return dataclasses.asdict(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one, keys joined with dots."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
  return flat


def freeze(values: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict or nested dict, and makes the dataclasses of it.

  Raises:
    UserError: an unknown key (with the nearest valid one), a value of the wrong type, or one out of its bounds.
  """
  values = values.to_dict() if isinstance(values, ConfigDict) else values
  return _build(Config, values, "")


def load(path: str, overrides: Sequence[str] = ()) -> Config:
  """Reads a config file and applies command-line overrides, `--config.a.b=VALUE` each.

  Raises:
    UserError: no such file, an error inside it, an unknown key or a value of the wrong type.
  """
  file = path.split(":", 1)[0]
  if Path(file).is_dir():
    raise UserError(f"--config={file} is a folder; name a file in it, such as configs/tiny.py")
  if not Path(file).is_file():
    beside = [str(found) for found in sorted(Path(file).parent.glob("*.py"))] if Path(file).parent.is_dir() else []
    raise UserError(f"no config file at {file!r}{nearest(file, beside)}")
  valid = flatten(to_dict(Config()))
  for override in overrides:
    key, equals, _ = override.removeprefix("--config.").partition("=")
    if fields := [name for name in valid if name.startswith(f"{key}.")]:
      raise UserError(f"config key {key!r} is a section; set one of its fields, such as --config.{fields[0]}=VALUE")
    if key not in valid:
      raise UserError(_unknown(key, valid))
    if not equals:
      raise UserError(f"config key {key!r} needs a value: --config.{key}=VALUE")
  from absl import flags
  argv = ["gtpo", f"--config={path}", *overrides]
  parser = flags.FlagValues()
  holder = config_flags.DEFINE_config_file("config", flag_values=parser, sys_argv=argv)
  try:
    parser(argv)
    values = holder.value
  except (flags.Error, TypeError, ValueError, KeyError, AttributeError) as error:
    raise UserError(f"config {file}: {_one_line(error)}") from error
  except (Exception, SystemExit) as error:  # the user's file is a program; whatever it raises is theirs to read
    raise UserError(f"config {file} raised {type(error).__name__}: {_one_line(error)}") from error
  if not isinstance(values, ConfigDict):
    raise UserError(f"config {file}: get_config() must return a ConfigDict, got {type(values).__name__}")
  return freeze(values)


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """The fields in which two configs differ, by dotted name."""
  a, b = flatten(to_dict(old)), flatten(to_dict(new))
  return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
  hints = typing.get_type_hints(cls)
  for key in values:
    if key not in hints:
      raise UserError(_unknown(f"{prefix}{key}", flatten(to_dict(Config()))))
  made = {}
  for key, value in values.items():
    hint = hints[key]
    if dataclasses.is_dataclass(hint):
      if not isinstance(value, Mapping):
        raise UserError(f"{prefix}{key} is a section with fields, got {value!r}")
      try:
        made[key] = _build(hint, value, f"{prefix}{key}.")
      except UserError as error:  # the optimizer's own complaints say "optimizer."; here it is whose
        raise UserError(prefix + str(error)) if str(error).startswith("optimizer.") else error from None
    else:
      made[key] = _typed(value, hint, f"{prefix}{key}")
  return cls(**made)


def _typed(value: Any, hint: Any, name: str) -> Any:
  kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  if value is None and type(None) in kinds:
    return None
  kind = kinds[0]
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise UserError(f"{name} must be of type {kind.__name__}, got {value!r}")
  return value


def _unknown(key: str, valid: Mapping[str, Any]) -> str:
  sections = {name.rsplit(".", 1)[0] for name in valid if "." in name}
  close = difflib.get_close_matches(key, [*valid, *sections], n=1, cutoff=0.5)
  if not close:  # the right name in another section
    close = [name for name in valid if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
  return f"unknown config key {key!r}" + (f", did you mean {close[0]!r}?" if close else "")


def _one_line(error: Exception) -> str:
  text = str(error).strip() or type(error).__name__
  if "Traceback (most recent call last)" in text:  # ml_collections puts one into its message; the last line says it
    text = text.splitlines()[-1]
  return re.sub(r"\s+", " ", text).strip()


def _to_config_dict(section: Any) -> ConfigDict:
  out = ConfigDict()
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      value = _to_config_dict(value)
    elif value is None:
      hint = typing.get_type_hints(type(section))[field.name]
      value = config_dict.placeholder(typing.get_args(hint)[0])
    out[field.name] = value
  return out
