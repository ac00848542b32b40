"""The fields of a configuration, with defaults and meaning: one frozen dataclass a section."""

from __future__ import annotations

import dataclasses
import math

from gtpo_jax.algorithms import Settings
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import EngineConfig
from gtpo_jax.training.state import OptimizerConfig

MATH_RULES = ("math", "dapo")
LEARNING = OptimizerConfig()
IMITATION = OptimizerConfig(learning_rate=1.5e-3, schedule="cosine", warmup_steps=50, b2=0.99)


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """Which architecture, and the number formats it runs in.

  Attributes:
    preset: a name from `models.PRESETS`: an architecture with random weights, and the small tokenizer. Not read with `path`.
    path: a Hugging Face folder or hub id to start from: its architecture, weights, tokenizer and chat template.
    param_dtype: of the master weights.
    compute_dtype: of activations and matrix products.
    matmul_precision: "default", "high" or "highest".
    remat: "full" recomputes each layer in the backward pass, "attention" all but what attention gave, "none" keeps all residuals.
    attention: how whole sequences attend: "splash" (a TPU kernel), "cudnn" (a GPU kernel, 16 bits) or "blocks" (XLA); "" for what the
      platform is best at.
    lora_rank: of low-rank adapters, which are then trained alone (in float32, whatever param_dtype); 0 trains all weights.
    lora_alpha: the adapters' scale is lora_alpha / lora_rank.
    lora_targets: the matrices that carry adapters, joined by commas.
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
  """How devices are arranged; one axis may be -1 and takes what is left.

  Attributes:
    data: replicas of the parameters.
    fsdp: shards of the parameters, gathered when used.
    context: shards of the positions of a sequence, for long ones; parameters are split over them too.
    tensor: shards of heads, MLP and vocabulary.
  """

  data: int = -1
  fsdp: int = 1
  context: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DataSection:
  """What is learned and what is held out, and how problems are put to the model.

  Attributes:
    train: a task ("sums", "countdown"), or a source: a .jsonl or .parquet file or a folder of them, hf:ID, tfds:NAME; several
      sources with their weights as "a.jsonl*2,b.parquet*1".
    eval: what is evaluated: a task on its held-out part, or a source; "" for the same task as `train`.
    fields: which columns of a source mean what, as "prompt=instruction,answer=output,kind=math"; "" for the layouts known.
    bad_rows: malformed rows, or prompts too long, that a source may have; they are skipped.
    system: a system message before every problem that has none; "" for none.
    template: how a problem's text is put, {prompt} standing for it.
    chat: the prompt goes through the chat template; False puts the bare text, for base models.
    terms: difficulty: additions (sums) or numbers (countdown) a problem; 0 for the task's own.
    largest: difficulty: the largest addend or number; 0 for the task's own.
    max_prompt_tokens: every prompt is padded to this.
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
  """How much is learned from in one step.

  Attributes:
    prompts: prompts a step (n).
    group: completions a prompt (g), at least 2.
    minibatches: parts of the prompts that are learned from one after the other, a gradient update each; advantages are of the whole.
    epochs: times that a step's batch is gone through.
    micro_batches: parts each minibatch is cut into for gradients; memory falls, the result does not change.
    head_chunk: about how many tokens' logits are held at once, all devices together; at least one position of every row is.
    pack: short completions of one prompt share rows in the trainer, rows are no longer than the longest completion needs, and the result
      does not change; each shape that comes up, of few, is compiled once.
    max_gen_batches: with dynamic sampling, how many times `prompts` prompts may be sampled for one step.
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
    """Into how many parts the prompts are cut whose gradients are taken at once."""
    return self.minibatches * self.micro_batches

  @property
  def updates(self) -> int:
    """Gradient updates a step."""
    return self.minibatches * self.epochs


@dataclasses.dataclass(frozen=True)
class SamplingSection(EngineConfig, SamplingParams):
  """How completions are drawn while learning: the fields of `SamplingParams`, temperature above 0, those of `Limits`, and their length.

  Attributes:
    max_tokens: the longest completion, stop token included.
    warm_up: compile all that sampling may need, in learning and in evaluation, before the first step, instead of each program when it is
      needed.
  """

  max_tokens: int = 40
  warm_up: bool = False

  def __post_init__(self):
    EngineConfig.__post_init__(self)
    SamplingParams.__post_init__(self)


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
class FrozenSection:
  """A policy that does not learn: the guide that writes completions, or the reference of the KL term.

  Attributes:
    path: the workdir of a run (the checkpoint that is its newest when this run begins), a Hugging Face folder or hub id; "" for this
      run's base model.
  """

  path: str = ""


@dataclasses.dataclass(frozen=True)
class RewardSection:
  """How completions are judged.

  Attributes:
    parts: the reward as a weighted sum, as "correct*1,boxed*0.1,my_module:my_function*0.5"; "correct" is the algorithm's reward for
      right and wrong, "verifier" the verifier's own number. Each part is logged.
    verifier: module:function that decides right and wrong, instead of the verifier of each problem's kind; "" for those.
    math_rule: "math" (equivalence, by exact arithmetic and math-verify) or "dapo" (DAPO's own `Answer:` line, as a string).
    timeout_s: seconds that the check of one mathematical answer may take; longer ones reach no verdict.
    function_timeout_s: seconds that a function of yours may take for the completions of one problem; then they have no verdict.
    code_timeout_s: seconds that one run of a program may take, its tests included; longer ones are wrong.
    code_memory_mb: MiB of memory that it may take, and its tests.
    unsandboxed: DANGEROUS. Where there is no sandbox, programs that the model wrote run as you, on your files and network.
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
        f"reward.parts must name parts with finite weights, as correct*1,boxed*0.1; got {self.parts!r}"
      )

  @property
  def weighted(self) -> list[tuple[str, float]]:
    """The parts with their weights; empty where the text is none."""
    pairs = [part.strip().partition("*") for part in self.parts.split(",")]
    try:
      weighted = [(name.strip(), float(weight) if star else 1.0) for name, star, weight in pairs]
    except ValueError:
      return []
    good = all(name and math.isfinite(weight) for name, weight in weighted) and len(
      {name for name, _ in weighted}
    ) == len(weighted)
    return weighted if good else []


@dataclasses.dataclass(frozen=True)
class EvalSection:
  """Held-out evaluation: before the first step, every so often, and at the end.

  Attributes:
    every: steps between evaluations; 0 for the first and last alone.
    problems: held-out problems.
    samples: completions a problem, for mean@n and pass@k.
    batch: problems sampled at once.
    temperature: of the sampled completions; a greedy pass is made besides.
    top_p: the sampled completions draw from the smallest set of tokens with this probability.
  """

  every: int = 10
  problems: int = 500
  samples: int = 8
  batch: int = 64
  temperature: float = 1.0
  top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
  """When the state is saved.

  Attributes:
    every: steps between checkpoints; the last step is always saved.
    keep: newest checkpoints kept.
    best: keep the parameters of the best evaluation (by mean@n) too, in WORKDIR/best.
    accept_changes: take a run up again though its config, the contents of its data, or guide or reference have changed; what has is said.
  """

  every: int = 10
  keep: int = 2
  best: bool = False
  accept_changes: bool = False


@dataclasses.dataclass(frozen=True)
class GuardSection:
  """When a run that goes wrong is ended.

  Attributes:
    skipped: steps in a row, in which an update whose loss or gradient is not finite was skipped, that end the run.
    stall_s: seconds without the end of a step, of a batch of evaluation or of a part of the warm start after which the process prints
      its stacks and exits; 0 for never.
  """

  skipped: int = 3
  stall_s: float = 7200.0


@dataclasses.dataclass(frozen=True)
class LogSection:
  """What is written besides metrics.jsonl.

  Attributes:
    tensorboard: write event files into WORKDIR/tensorboard.
    wandb: the project of Weights & Biases to log into (needs `pip install 'gtpo_jax[wandb]'`); "" for none. WANDB_MODE=offline writes
      into WORKDIR/wandb alone.
    samples: completions a step written into WORKDIR/samples.jsonl.
    credit_every: steps between records of where the credit goes (WORKDIR/credit, for `gtpo report`), the first and the last step
      besides; 0 for none.
    credit_groups: groups of such a step whose tokens are kept, the most mixed first; of the others entropies and verdicts alone.
  """

  tensorboard: bool = True
  wandb: str = ""
  samples: int = 4
  credit_every: int = 10
  credit_groups: int = 4

  def keeps_credit(self, step: int, last: int) -> bool:
    """Whether step `step` of a run of `last` steps is recorded."""
    return bool(self.credit_every) and (step in (1, last) or step % self.credit_every == 0)


@dataclasses.dataclass(frozen=True)
class ProfileSection:
  """Which steps are traced, for XProf and Perfetto.

  Attributes:
    steps: the first and the last step to trace into WORKDIR/profile, as "3:5"; "" for none. The first steps compile.
  """

  steps: str = ""

  def __post_init__(self):
    first, last = self.window or (1, 1)
    if not 1 <= first <= last:
      raise UserError(
        f"profile.steps must be two steps, as 3:5, the first at least 1 and not after the last; got {self.steps!r}"
      )

  @property
  def window(self) -> tuple[int, int] | None:
    """The first and the last step traced; (0, 0) where the text is none."""
    if not self.steps:
      return None
    first, _, last = self.steps.partition(":")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)


@dataclasses.dataclass(frozen=True)
class AlgorithmSection(Settings):
  """The algorithm's name, and its hyperparameters beside it; None takes the published value.

  Attributes:
    name: one of `algorithms.RECIPES`.
  """

  name: str = "gtpo"
