"""The sections of a configuration: frozen dataclasses with the defaults and meanings of fields.

Those that do not change what is trained are in `monitoring.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from gtpo_jax.algorithms import Settings
from gtpo_jax.data.tasks import FILLER
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.formats.compute_dtype import AUTO
from gtpo_jax.rewards.judge.settings import JudgeSettings
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import (
  ABOVE_0,
  AT_LEAST_0,
  FINITE,
  Bound,
  Checked,
  at_least,
  find_problem,
  number,
  one_of,
  setting,
)
from gtpo_jax.sampling.params import EngineConfig, SamplingParams
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop
from gtpo_jax.training.state import OptimizerConfig

MATH_RULES = ("math", "dapo")
INSTRUCTION_MODES = ("strict", "loose")
MAX_STALENESS = 16
AXIS_SIZE = number(lambda x: x == -1 or x >= 1, "at least 1, or -1 for the remaining devices")
STALENESS = number(
  lambda x: 0 <= x <= MAX_STALENESS, f"from 0 (whole batches) to {MAX_STALENESS} updates"
)
STOP = Bound(
  is_stop,
  f"a tuple of at most {MAX_STOP_STRINGS} non-empty strings of valid characters, such as "
  r"""("\nQ:",)""",
)
TIMEOUT = number(lambda x: 0 < x <= 86_400, "above 0 and at most 86400 (a day)")
NO_JUDGE = JudgeSettings()
RL_OPTIMIZER = OptimizerConfig()
IMITATION_OPTIMIZER = OptimizerConfig(
  learning_rate=1.5e-3, schedule="cosine", warmup_steps=50, b2=0.99
)


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """Which architecture to train, and its number formats.

  Attributes:
    preset: a name from `models.PRESETS`: an architecture with random weights and the small
      tokenizer. Ignored if `path` is set.
    path: a Hugging Face folder or hub id to start from: its architecture, weights, tokenizer and
      chat template.
    random_weights: train a large preset from random weights, to measure speed and memory. Without
      it or a warm start, only the tiny presets may start from random weights.
    param_dtype: format of the master weights.
    compute_dtype: format of activations and matrix products: "float32", "bfloat16", "float16", or
      "auto" for the fastest one that the devices have units for.
    matmul_precision: "default", "high" or "highest".
    remat: "full" recomputes each layer in the backward pass, "attention" recomputes everything
      except the attention output, "none" keeps all residuals.
    attention: attention over complete sequences: "splash" (TPU kernel), "cudnn" (GPU kernel,
      16-bit types) or "blocks" (XLA); "" selects the best one for the platform.
    lora_rank: rank of the LoRA adapters, which are then the only trained parameters (in float32,
      whatever param_dtype is); 0 trains all weights.
    lora_alpha: the adapters are scaled by lora_alpha / lora_rank.
    lora_targets: the matrices that get adapters, separated by commas.
    quantize: format of the base matrices under adapters: "int8", "int4", or "" for param_dtype.
  """

  preset: str = "tiny"
  path: str = ""
  random_weights: bool = False
  param_dtype: str = "float32"
  compute_dtype: str = setting(AUTO, bound=one_of((AUTO, *DTYPES)))
  matmul_precision: str = "default"
  remat: str = "full"
  attention: str = ""
  lora_rank: int = setting(0, bound=at_least(0))
  lora_alpha: float = setting(32.0, bound=ABOVE_0)
  lora_targets: str = "q,k,v,o,gate,up,down"
  quantize: str = ""


@dataclasses.dataclass(frozen=True)
class MeshSection:
  """The sizes of the device mesh's axes; one may be -1, and takes the remaining devices.

  Attributes:
    data: replicas of the parameters.
    fsdp: shards of the parameters, gathered when they are used.
    context: shards of a sequence's positions, for long sequences; parameters are sharded over
      this axis too.
    tensor: shards of heads, MLP and vocabulary.
  """

  data: int = setting(-1, bound=AXIS_SIZE)
  fsdp: int = setting(1, bound=AXIS_SIZE)
  context: int = setting(1, bound=AXIS_SIZE)
  tensor: int = setting(1, bound=AXIS_SIZE)


@dataclasses.dataclass(frozen=True)
class DataSection:
  """What to train and evaluate on, and how a problem becomes a prompt.

  Attributes:
    train: a task ("sums", "countdown", "forks", "forks_confident") or a source: a .jsonl or
      .parquet file or a folder of them, hf:ID, tfds:NAME; several sources with weights as
      "a.jsonl*2,b.parquet*1".
    eval: a task, evaluated on its held-out part, or a source; "" for the same task as `train`.
    fields: the columns of a source, such as "prompt=instruction,answer=output,kind=math"; "" for
      the known layouts.
    bad_rows: how many rows of a source may be malformed or have an overlong prompt; such rows are
      skipped.
    system: a system message before every problem that has none; "" for no message.
    template: the prompt text; {prompt} stands for the problem's text.
    chat: apply the chat template; False uses the plain text, for base models.
    terms: difficulty of a task: additions (sums), numbers (countdown) or pairs of digits (forks) in
      a problem; 0 for the task's default.
    largest: difficulty of a task: the largest addend, number or digit; 0 for the task's default.
    filler: mean number of letters before a decision of forks; they decide nothing.
    max_prompt_tokens: the longest prompt; shorter ones are padded to it.
  """

  train: str = "sums"
  eval: str = ""
  fields: str = ""
  bad_rows: int = setting(0, bound=at_least(0))
  system: str = ""
  template: str = "{prompt}"
  chat: bool = True
  terms: int = setting(0, bound=at_least(0))
  largest: int = setting(0, bound=at_least(0))
  filler: int = setting(FILLER, bound=at_least(0))
  max_prompt_tokens: int = setting(32, bound=at_least(1))

  @property
  def sources(self) -> list[tuple[str, float]]:
    """The tasks or sources to train on, with their weights.

    Raises:
      UserError: `train` cannot be parsed.
    """
    if len(parts := self.train.split(",")) == 1 and "*" not in self.train:
      return [(self.train, 1.0)]
    pairs = [part.strip().rpartition("*") for part in parts]
    try:
      weighted = [(name, float(weight)) for name, _, weight in pairs]
    except ValueError:
      weighted = [("", 0.0)]
    if not all(name and not find_problem(weight, ABOVE_0) for name, weight in weighted):
      raise UserError(
        "data.train must name several sources as a.jsonl*2,b.parquet*1, with weights above 0; "
        f"got {self.train!r}"
      )
    return weighted


@dataclasses.dataclass(frozen=True)
class BatchSection:
  """The batch of one step.

  Attributes:
    prompts: prompts per step (n).
    group: completions per prompt (g), at least 2.
    minibatches: gradient updates per pass over the batch, each on its own part of the prompts;
      advantages come from the complete batch.
    epochs: passes over the batch.
    micro_batches: number of parts of each minibatch over which the gradient is accumulated; more
      parts save memory and do not change the result.
    head_chunk: approximate number of tokens whose logits a device has in memory at once; at least
      one position of each of its rows. 0 for as many as the device's memory and speed suggest,
      which `gtpo plan` shows.
    pack: let short completions of a prompt share rows in the trainer, and shorten rows to what the
      longest completion needs. The result does not change. Each of the few array shapes is
      compiled once.
    max_gen_batches: with dynamic sampling, how many batches of `prompts` prompts may be sampled
      for one step.
  """

  prompts: int = setting(16, bound=at_least(1))
  group: int = setting(16, bound=at_least(2, "a completion is compared with its group"))
  max_gen_batches: int = setting(10, bound=at_least(1))
  minibatches: int = setting(1, bound=at_least(1))
  epochs: int = setting(1, bound=at_least(1))
  micro_batches: int = setting(1, bound=at_least(1))
  head_chunk: int = setting(0, bound=at_least(0))
  pack: bool = True

  @property
  def parts(self) -> int:
    """Number of parts of the prompts whose gradients are computed separately."""
    return self.minibatches * self.micro_batches

  @property
  def updates(self) -> int:
    """Gradient updates per step."""
    return self.minibatches * self.epochs


@dataclasses.dataclass(frozen=True)
class SamplingSection(EngineConfig, SamplingParams):
  """How completions are sampled while training.

  The fields of `SamplingParams` (with a temperature above 0), those of `EngineConfig`, and:

  Attributes:
    max_tokens: the longest completion, stop token included.
    staleness: the most updates between the first token of a group and the update that trains on it.
      With 0, every completion of a step's batch is sampled to its end before the update. With more,
      a step ends as soon as `batch.prompts` groups are complete; the others go on in the next step,
      under the updated policy. Up to `batch.prompts * (1 + staleness)` groups are sampled at once.
    stop: strings that end a completion as soon as its text contains one of them, in training and
      evaluation. The text is cut before the earliest match; the tokens up to the one that completed
      it are kept, and the completion counts as finished.
    warm_up: compile every program that sampling may need, for training and evaluation, before the
      first step, instead of each program when it is first used.
  """

  max_tokens: int = setting(40, bound=at_least(2))
  stop: tuple[str, ...] = setting((), bound=STOP)
  staleness: int = setting(0, bound=STALENESS)
  warm_up: bool = False


@dataclasses.dataclass(frozen=True)
class WarmStartSection:
  """Supervised imitation of a task's imperfect teacher, or of demonstrations, before RL begins.

  Attributes:
    steps: updates; 0 starts RL without imitation.
    data: the demonstrations, a source named as in `data.train`; "" for the task's teacher.
    fields: the columns of the demonstrations, such as "prompt=question,completion=solution"; ""
      for prompt and completion.
    batch: demonstrations per update.
    slips: scales how often the teacher makes mistakes.
    optimizer: AdamW for the imitation only.
  """

  steps: int = setting(0, bound=at_least(0))
  data: str = ""
  fields: str = ""
  batch: int = setting(16, bound=at_least(1))
  slips: float = setting(1.0, bound=AT_LEAST_0)
  optimizer: OptimizerConfig = IMITATION_OPTIMIZER


@dataclasses.dataclass(frozen=True)
class FrozenSection:
  """A policy that is not trained: the guide, which writes completions, or the KL reference.

  Attributes:
    path: the workdir of a run (its newest checkpoint when this run begins), a Hugging Face folder
      or a hub id; "" for this run's base model.
  """

  path: str = ""


@dataclasses.dataclass(frozen=True)
class RewardSection(Checked):
  """How completions are scored.

  Attributes:
    parts: the reward as a weighted sum, such as "correct*1,boxed*0.1,my_module:my_function*0.5".
      "correct" is the algorithm's reward for right and wrong, "verifier" the verifier's own
      number, "judge" the judge's. Algorithms with entropy shaping shape "correct", whose weight is
      then 1, and add the other parts to the shaped reward. Each part is logged.
    verifier: a function that decides right and wrong, as module:function; "" for the built-in
      verifier of each problem's kind.
    math_rule: "math" (equivalence, by exact arithmetic and math-verify) or "dapo" (DAPO's own
      `Answer:` line, compared as a string).
    instructions: for problems of kind "constraints", "strict", or "loose": whether a text follows
      its instructions is then also tried without its first line, last line and stars.
    timeout_s: seconds that checking one mathematical answer may take; after that it has no
      verdict.
    function_timeout_s: seconds that a user's function may take for the completions of one problem;
      after that they have no verdict.
    code_timeout_s: seconds that one run of a program with its tests may take; after that it is
      wrong.
    code_memory_mb: memory of such a run, in MiB.
    unsandboxed: DANGEROUS. Without a sandbox, run programs written by the model as the current
      user, with access to your files and network.
    judge: a language model that grades completions.
  """

  prefix: ClassVar[str] = "reward."

  parts: str = "correct"
  verifier: str = ""
  math_rule: str = setting("math", bound=one_of(MATH_RULES))
  instructions: str = setting("strict", bound=one_of(INSTRUCTION_MODES))
  timeout_s: float = setting(5.0, bound=TIMEOUT)
  function_timeout_s: float = setting(300.0, bound=TIMEOUT)
  code_timeout_s: float = setting(5.0, bound=TIMEOUT)
  code_memory_mb: int = setting(512, bound=at_least(16))
  unsandboxed: bool = False
  judge: JudgeSettings = NO_JUDGE

  def __post_init__(self):
    super().__post_init__()
    if not self.weighted:
      raise UserError(
        "reward.parts must name parts with finite weights, such as correct*1,boxed*0.1; "
        f"got {self.parts!r}"
      )
    self.judge.check_use(self.parts, tuple(dict(self.weighted)), self.verifier)

  @property
  def judge_decides(self) -> bool:
    """Whether the judge decides right and wrong."""
    return bool(self.judge.base_url) and self.judge.decides

  @property
  def reads_grades(self) -> bool:
    """Whether the reward contains the number that the judge gives, besides its verdict."""
    names = dict(self.weighted)
    return "judge" in names or (self.judge_decides and "verifier" in names)

  @property
  def replaces_verifiers(self) -> bool:
    """Whether a user's function or the judge decides instead of the verifiers of the kinds."""
    return bool(self.verifier) or self.judge_decides

  @property
  def weighted(self) -> list[tuple[str, float]]:
    """The parts with their weights; empty if `parts` cannot be parsed."""
    pairs = [part.strip().partition("*") for part in self.parts.split(",")]
    try:
      weighted = [(name.strip(), float(weight) if star else 1.0) for name, star, weight in pairs]
    except ValueError:
      return []
    valid = all(name and not find_problem(weight, FINITE) for name, weight in weighted)
    unique = len({name for name, _ in weighted}) == len(weighted)
    return weighted if valid and unique else []


@dataclasses.dataclass(frozen=True)
class AlgorithmSection(Settings):
  """The algorithm's name and its hyperparameters; None takes the published value.

  Attributes:
    name: one of `algorithms.RECIPES`.
  """

  name: str = "gtpo"
