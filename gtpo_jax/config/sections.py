"""The sections of a configuration: a frozen dataclass each, with defaults and meanings."""

from __future__ import annotations

import dataclasses
import math

from gtpo_jax.algorithms import Settings
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.params import EngineConfig, SamplingParams
from gtpo_jax.training.state import OptimizerConfig

MATH_RULES = ("math", "dapo")
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
  """

  preset: str = "tiny"
  path: str = ""
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  matmul_precision: str = "default"
  remat: str = "full"
  attention: str = ""
  lora_rank: int = 0
  lora_alpha: float = 32.0
  lora_targets: str = "q,k,v,o,gate,up,down"


@dataclasses.dataclass(frozen=True)
class MeshSection:
  """The device mesh; one axis may be -1 and takes the remaining devices.

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
    train: a task ("sums", "countdown") or a source: a .jsonl or .parquet file or a folder of
      them, hf:ID, tfds:NAME; several sources with weights as "a.jsonl*2,b.parquet*1".
    eval: a task, evaluated on its held-out part, or a source; "" for the same task as `train`.
    fields: the columns of a source, as "prompt=instruction,answer=output,kind=math"; "" for the
      known layouts.
    bad_rows: how many rows of a source may be malformed or have too long a prompt; they are
      skipped.
    system: a system message before every problem that has none; "" for no message.
    template: the prompt text; {prompt} stands for the problem's text.
    chat: apply the chat template; False uses the plain text, for base models.
    terms: difficulty of a task: additions (sums) or numbers (countdown) in a problem; 0 for the
      task's default.
    largest: difficulty of a task: the largest addend or number; 0 for the task's default.
    max_prompt_tokens: the longest prompt; shorter ones are padded to it.
  """

  train: str = "sums"
  eval: str = ""
  fields: str = ""
  bad_rows: int = 0
  system: str = ""
  template: str = "{prompt}"
  chat: bool = True
  terms: int = 0
  largest: int = 0
  max_prompt_tokens: int = 32


@dataclasses.dataclass(frozen=True)
class BatchSection:
  """The batch of one step.

  Attributes:
    prompts: prompts per step (n).
    group: completions per prompt (g), at least 2.
    minibatches: gradient updates per pass over the batch, each on its own part of the prompts;
      advantages come from the complete batch.
    epochs: passes over the batch.
    micro_batches: gradient-accumulation parts of each minibatch; saves memory and does not change
      the result.
    head_chunk: approximate number of tokens, over all devices, whose logits are in memory at once;
      at least one position of every row.
    pack: let short completions of a prompt share rows in the trainer, and shorten rows to what the
      longest completion needs. The result does not change. Each of the few array shapes is
      compiled once.
    max_gen_batches: with dynamic sampling, how many batches of `prompts` prompts may be sampled
      for one step.
  """

  prompts: int = 16
  group: int = 16
  max_gen_batches: int = 10
  minibatches: int = 1
  epochs: int = 1
  micro_batches: int = 1
  head_chunk: int = 4096
  pack: bool = True

  @property
  def parts(self) -> int:
    """How many parts of the prompts have their gradients computed separately."""
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
    warm_up: compile every program that sampling may need, for training and evaluation, before the
      first step, instead of each program when it is first used.
  """

  max_tokens: int = 40
  warm_up: bool = False

  def __post_init__(self):
    EngineConfig.__post_init__(self)
    SamplingParams.__post_init__(self)


@dataclasses.dataclass(frozen=True)
class WarmStartSection:
  """Supervised imitation of a task's imperfect teacher, which makes the base model for RL.

  Attributes:
    steps: updates; 0 starts RL from random parameters.
    batch: demonstrations per update.
    slips: scales how often the teacher makes mistakes.
    optimizer: AdamW for the imitation only.
  """

  steps: int = 0
  batch: int = 16
  slips: float = 1.0
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
class RewardSection:
  """How completions are scored.

  Attributes:
    parts: the reward as a weighted sum, as "correct*1,boxed*0.1,my_module:my_function*0.5".
      "correct" is the algorithm's reward for right and wrong, "verifier" the verifier's own
      number. Each part is logged.
    verifier: module:function that decides right and wrong instead of the verifier for each
      problem's kind; "" for those.
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

  parts: str = "correct"
  verifier: str = ""
  math_rule: str = "math"
  timeout_s: float = 5.0
  function_timeout_s: float = 300.0
  code_timeout_s: float = 5.0
  code_memory_mb: int = 512
  unsandboxed: bool = False

  def __post_init__(self):
    if self.math_rule not in MATH_RULES:
      raise UserError(
        f"reward.math_rule must be one of {', '.join(MATH_RULES)}, got {self.math_rule!r}"
      )
    for name in ("timeout_s", "function_timeout_s", "code_timeout_s"):
      if not 0 < getattr(self, name) < float("inf"):
        raise UserError(f"reward.{name} must be above 0 and finite, got {getattr(self, name)}")
    if not self.weighted:
      raise UserError(
        "reward.parts must name parts with finite weights, as correct*1,boxed*0.1; "
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
    temperature: of the sampled completions; a greedy pass is made as well.
    top_p: sample from the smallest set of tokens with this total probability.
  """

  every: int = 10
  problems: int = 500
  samples: int = 8
  batch: int = 64
  temperature: float = 1.0
  top_p: float = 1.0


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

  every: int = 10
  keep: int = 2
  best: bool = False
  accept_changes: bool = False


@dataclasses.dataclass(frozen=True)
class GuardSection:
  """When to end a run that goes wrong.

  Attributes:
    skipped: end the run after this many consecutive steps with a skipped update (its loss or
      gradient was not finite).
    stall_s: exit, after printing all stacks, if for this many seconds no step, evaluation batch
      or part of the warm start ends and no program is compiled; 0 never exits.
  """

  skipped: int = 3
  stall_s: float = 7200.0


@dataclasses.dataclass(frozen=True)
class LogSection:
  """What is written besides metrics.jsonl.

  Attributes:
    tensorboard: write event files to WORKDIR/tensorboard.
    wandb: the Weights & Biases project to log to (needs `pip install 'gtpo_jax[wandb]'`); "" for
      none. WANDB_MODE=offline writes only to WORKDIR/wandb.
    samples: completions per step written to WORKDIR/samples.jsonl.
    credit_every: steps between records of token-level credit (WORKDIR/credit, for `gtpo report`),
      besides the first and the last step; 0 for none.
    credit_groups: groups per record whose tokens are kept, those with the most mixed verdicts
      first; for the other groups only entropies and verdicts are kept.
  """

  tensorboard: bool = True
  wandb: str = ""
  samples: int = 4
  credit_every: int = 10
  credit_groups: int = 4

  def keeps_credit(self, step: int, last: int) -> bool:
    """Whether credit is recorded at step `step` of a run of `last` steps."""
    return bool(self.credit_every) and (step in (1, last) or step % self.credit_every == 0)


@dataclasses.dataclass(frozen=True)
class ProfileSection:
  """Which steps are traced, for XProf and Perfetto.

  Attributes:
    steps: the first and the last step to trace to WORKDIR/profile, as "3:5"; "" for none. The
      first steps include compilation.
  """

  steps: str = ""

  def __post_init__(self):
    first, last = self.window or (1, 1)
    if not 1 <= first <= last:
      raise UserError(
        "profile.steps must be two steps, as 3:5, the first at least 1 and not after the last; "
        f"got {self.steps!r}"
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
