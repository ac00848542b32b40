"""The sections of a configuration: frozen dataclasses with the defaults and meanings of fields."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from gtpo_jax.algorithms import Settings
from gtpo_jax.data.tasks import FILLER
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import ABOVE_0, AT_LEAST_0, SHARE, Checked, at_least, one_of, setting
from gtpo_jax.sampling.params import EngineConfig, SamplingParams
from gtpo_jax.training.state import OptimizerConfig

MATH_RULES = ("math", "dapo")
MAX_STALENESS = 16
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
    compute_dtype: format of activations and matrix products.
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
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"
  attention: str = ""
  lora_rank: int = 0
  lora_alpha: float = 32.0
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

  data: int = -1
  fsdp: int = 1
  context: int = 1
  tensor: int = 1


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
  terms: int = 0
  largest: int = 0
  filler: int = FILLER
  max_prompt_tokens: int = setting(32, bound=at_least(1))


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
    warm_up: compile every program that sampling may need, for training and evaluation, before the
      first step, instead of each program when it is first used.
  """

  max_tokens: int = setting(40, bound=at_least(2))
  staleness: int = 0
  warm_up: bool = False

  def __post_init__(self):
    EngineConfig.__post_init__(self)
    SamplingParams.__post_init__(self)
    if not 0 <= self.staleness <= MAX_STALENESS:
      raise UserError(
        f"sampling.staleness must be from 0 (whole batches) to {MAX_STALENESS} updates, "
        f"got {self.staleness}"
      )


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
  slips: float = setting(1.0, bound=at_least(0))
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
      number. Algorithms with entropy shaping shape "correct", whose weight is then 1, and add the
      other parts to the shaped reward. Each part is logged.
    verifier: a function that decides right and wrong, as module:function; "" for the built-in
      verifier of each problem's kind.
    math_rule: "math" (equivalence, by exact arithmetic and math-verify) or "dapo" (DAPO's own
      `Answer:` line, compared as a string).
    timeout_s: seconds that checking one mathematical answer may take; after that it has no
      verdict.
    function_timeout_s: seconds that a user's function may take for the completions of one problem;
      after that they have no verdict.
    code_timeout_s: seconds that one run of a program with its tests may take; after that it is
      wrong.
    code_memory_mb: memory of such a run, in MiB.
    unsandboxed: DANGEROUS. Without a sandbox, run programs written by the model as the current
      user, with access to your files and network.
  """

  prefix: ClassVar[str] = "reward."

  parts: str = "correct"
  verifier: str = ""
  math_rule: str = setting("math", bound=one_of(MATH_RULES))
  timeout_s: float = setting(5.0, bound=ABOVE_0)
  function_timeout_s: float = setting(300.0, bound=ABOVE_0)
  code_timeout_s: float = setting(5.0, bound=ABOVE_0)
  code_memory_mb: int = setting(512, bound=at_least(16))
  unsandboxed: bool = False

  def __post_init__(self):
    super().__post_init__()
    if not self.weighted:
      raise UserError(
        "reward.parts must name parts with finite weights, such as correct*1,boxed*0.1; "
        f"got {self.parts!r}"
      )

  @property
  def weighted(self) -> list[tuple[str, float]]:
    """The parts with their weights; empty if `parts` cannot be parsed."""
    pairs = [part.strip().partition("*") for part in self.parts.split(",")]
    try:
      weighted = [(name.strip(), float(weight) if star else 1.0) for name, star, weight in pairs]
    except ValueError:
      return []
    valid = all(name and math.isfinite(weight) for name, weight in weighted)
    unique = len({name for name, _ in weighted}) == len(weighted)
    return weighted if valid and unique else []


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """Held-out evaluation: before the first step, at intervals, and at the end.

  Attributes:
    every: steps between evaluations; 0 evaluates only at the beginning and the end.
    problems: held-out problems.
    samples: completions per problem, for mean@n and pass@k.
    batch: problems sampled at once.
    temperature: temperature of the sampled completions; a greedy completion per problem is always
      added.
    top_p: sample from the smallest set of tokens with this total probability.
  """

  every: int = setting(10, bound=at_least(0))
  problems: int = setting(500, bound=at_least(1))
  samples: int = setting(8, bound=at_least(1))
  batch: int = setting(64, bound=at_least(1))
  temperature: float = setting(1.0, bound=AT_LEAST_0)
  top_p: float = setting(1.0, bound=SHARE)

  def is_due(self, step: int, last: int) -> bool:
    """Whether step `step` of a run of `last` steps is evaluated."""
    return step in (0, last) or bool(self.every and step % self.every == 0)


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
  """When the training state is saved.

  Attributes:
    every: steps between checkpoints; the last step is always saved.
    keep: how many of the newest checkpoints to keep.
    best: also keep the parameters of the best evaluation (by mean@n), in WORKDIR/best.
    accept_changes: resume a run even if its config, its data, its guide or its reference changed;
      the changes are printed.
  """

  every: int = setting(10, bound=at_least(1))
  keep: int = setting(2, bound=at_least(1))
  best: bool = False
  accept_changes: bool = False


@dataclasses.dataclass(frozen=True)
class GuardSection:
  """When to end a run that goes wrong.

  Attributes:
    skipped: end the run after this many consecutive steps with a skipped update (its loss or
      gradient was not finite).
    stall_s: exit, after printing all stacks, if no step, evaluation batch or part of the warm start
      ends, and no program is compiled, for this many seconds; 0 to never exit.
  """

  skipped: int = setting(3, bound=at_least(1))
  stall_s: float = setting(7200.0, bound=at_least(0))


@dataclasses.dataclass(frozen=True)
class LogSection:
  """What is written besides metrics.jsonl.

  Attributes:
    tensorboard: write TensorBoard's event files into WORKDIR.
    wandb: the Weights & Biases project to log to (needs `pip install wandb`); "" for none.
      WANDB_MODE=offline writes only to WORKDIR/wandb.
    samples: completions per step written to WORKDIR/samples.jsonl.
    credit_every: steps between records of token-level credit (WORKDIR/credit, for `gtpo report`);
      the first and the last step are recorded too; 0 for no records.
    credit_groups: groups per record whose tokens are kept, those with the most mixed verdicts
      first; for the other groups only entropies and verdicts are kept.
  """

  tensorboard: bool = True
  wandb: str = ""
  samples: int = setting(4, bound=at_least(0))
  credit_every: int = setting(10, bound=at_least(0))
  credit_groups: int = setting(4, bound=at_least(1))

  def keeps_credit(self, step: int, last: int) -> bool:
    """Whether credit is recorded at step `step` of a run of `last` steps."""
    return bool(self.credit_every) and (step in (1, last) or step % self.credit_every == 0)


@dataclasses.dataclass(frozen=True)
class ProfileSection:
  """Which steps are traced, for XProf and Perfetto.

  Attributes:
    steps: the first and the last step to trace to WORKDIR/profile, such as "3:5"; "" for none. The
      first steps include compilation.
  """

  steps: str = ""

  def __post_init__(self):
    first, last = self.window or (1, 1)
    if not 1 <= first <= last:
      raise UserError(
        "profile.steps must be two steps, such as 3:5, the first at least 1 and not after the "
        f"last; got {self.steps!r}"
      )

  @property
  def window(self) -> tuple[int, int] | None:
    """The first and the last step to trace; None for no trace, (0, 0) if `steps` is invalid."""
    if not self.steps:
      return None
    first, _, last = self.steps.partition(":")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)


@dataclasses.dataclass(frozen=True)
class AlgorithmSection(Settings):
  """The algorithm's name and its hyperparameters; None takes the published value.

  Attributes:
    name: one of `algorithms.RECIPES`.
  """

  name: str = "gtpo"
