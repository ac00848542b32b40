"""The sections of a configuration: frozen dataclasses with the defaults and meanings of fields.

Sections on problems and rewards are in `data_sections.py`, and sections that do not change what is
trained in `monitoring.py`.
"""

from __future__ import annotations

import dataclasses

from gtpo_jax.algorithms import Settings
from gtpo_jax.models.config import BASE_LAYOUTS, DTYPES, REMAT, Lora, ModelConfig
from gtpo_jax.runtime.fields import ABOVE_0, AUTO, Bound, at_least, number, one_of, or_auto, setting
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop
from gtpo_jax.training.state import OptimizerConfig

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
RL_OPTIMIZER = OptimizerConfig()


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
    remat: what the backward pass recomputes: "full" each layer, "attention" everything except the
      attention output, "products" what is cheap beside attention and matrix products, "none"
      nothing, which unrolls the layers and compiles for minutes; "auto" for "none" on GPUs if the
      memory allows it and the run is long enough, and "full" otherwise.
    attention: attention over complete sequences: "splash" (TPU kernel), "cudnn" (GPU kernel,
      16-bit types) or "blocks" (XLA); "" selects the best one for the platform.
    router_replay: in a mixture of experts, the update computes each token with the experts that
      computed it when it was sampled; otherwise with the experts that its own rounding chooses.
    router_balance: in a mixture of experts, the weight of the load-balancing loss (2101.03961,
      eqs. 4-6) of policy updates, which is 1 if all experts get equal shares; 0 for none.
    lora_rank: rank of the LoRA adapters, which are then the only trained parameters (in float32,
      whatever param_dtype is); 0 trains all weights.
    lora_alpha: the adapters are scaled by lora_alpha / lora_rank.
    lora_targets: the matrices that get adapters, separated by commas. In a mixture of experts,
      gate, up and down name dense MLPs and shared experts; add experts for the others. In
      gated delta nets, each of q, k and v stands for all matrices that read the residual stream,
      and o for the one that adds to it.
    quantize: format of the base matrices under adapters: "int8", "int4", or "" for param_dtype.
    base_layout: how the base under adapters is stored: "apart", each layer by itself, so that the
      update and the sampler read the same arrays; "stacked", all layers in one array, which
      compiles faster, and of which the sampler has a copy; "auto" for "stacked" if that copy takes
      less than half of the memory that is left, and "apart" otherwise. It is stacked where
      mesh.expert, mesh.fsdp or mesh.context divide it.
  """

  preset: str = "tiny"
  path: str = ""
  random_weights: bool = False
  param_dtype: str = "float32"
  compute_dtype: str = setting(AUTO, bound=one_of((AUTO, *DTYPES)))
  matmul_precision: str = "default"
  remat: str = setting(AUTO, bound=one_of((AUTO, *REMAT)))
  attention: str = ""
  lora_rank: int = setting(0, bound=at_least(0))
  lora_alpha: float = setting(32.0, bound=ABOVE_0)
  router_replay: bool = True
  router_balance: float = setting(0.0, bound=at_least(0))
  lora_targets: str = "q,k,v,o,gate,up,down"
  quantize: str = ""
  base_layout: str = setting(AUTO, bound=one_of((AUTO, *BASE_LAYOUTS)))

  def with_formats(self, architecture: ModelConfig, compute_dtype: str) -> ModelConfig:
    """Returns `architecture` with these formats, attention and adapters, and `compute_dtype`."""
    targets = tuple(filter(None, self.lora_targets.replace(" ", "").split(",")))
    return dataclasses.replace(
      architecture,
      param_dtype=self.param_dtype,
      compute_dtype=compute_dtype,
      matmul_precision=self.matmul_precision,
      remat="full" if self.remat == AUTO else self.remat,
      attention=self.attention,
      router_replay=self.router_replay,
      router_balance=self.router_balance,
      lora=Lora(self.lora_rank, self.lora_alpha, targets),
      quantize=self.quantize,
      apart=self.base_layout == "apart",
    )


@dataclasses.dataclass(frozen=True)
class MeshSection:
  """The sizes of the device mesh's axes; one may be -1, and takes the remaining devices.

  Attributes:
    data: replicas of the parameters.
    expert: shards of the experts of a mixture, which exchange tokens; for all other parameters
      they are like fsdp.
    fsdp: shards of the parameters, gathered when they are used.
    context: shards of a sequence's positions, for long sequences; parameters are sharded over
      this axis too.
    tensor: shards of heads, MLP and vocabulary.
  """

  data: int = setting(-1, bound=AXIS_SIZE)
  expert: int = setting(1, bound=AXIS_SIZE)
  fsdp: int = setting(1, bound=AXIS_SIZE)
  context: int = setting(1, bound=AXIS_SIZE)
  tensor: int = setting(1, bound=AXIS_SIZE)


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
      parts save memory and do not change the result. If there are more than prompts of a device,
      the completions of a prompt are divided too. "auto" for as few as the memory of the devices
      allows.
    head_chunk: approximate number of tokens whose logits a device has in memory at once; at least
      one position of each of its rows. 0 for as many as the device's memory and speed suggest,
      which `gtpo plan` shows.
    pack: let short completions of a prompt share rows in the trainer, and shorten rows to what the
      longest completion needs, unless micro-batches divide groups. The result does not change.
      Each of the few array shapes is compiled once.
    max_gen_batches: with dynamic sampling, how many batches of `prompts` prompts may be sampled
      for one step.
  """

  prompts: int = setting(16, bound=at_least(1))
  group: int = setting(16, bound=at_least(2, "a completion is compared with its group"))
  max_gen_batches: int = setting(10, bound=at_least(1))
  minibatches: int = setting(1, bound=at_least(1))
  epochs: int = setting(1, bound=at_least(1))
  micro_batches: int | str = setting(AUTO, bound=or_auto(at_least(1)))
  head_chunk: int = setting(0, bound=at_least(0))
  pack: bool = True

  @property
  def parts(self) -> int:
    """Number of parts of the prompts whose gradients are computed separately; at least so many."""
    return self.minibatches * (1 if self.micro_batches == AUTO else self.micro_batches)

  def packs(self, shards: int) -> bool:
    """Whether completions share rows, with so many batch shards."""
    return self.pack and self.parts * shards <= self.prompts

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
      a step ends as soon as `batch.prompts` groups are complete; others continue in the next step,
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
class FrozenSection:
  """A policy that is not trained: the guide, which writes completions, or the KL reference.

  Attributes:
    path: the workdir of a run (its newest checkpoint when this run begins), a Hugging Face folder
      or a hub id; "" for this run's base model.
  """

  path: str = ""


@dataclasses.dataclass(frozen=True)
class TeacherSection:
  """The policy whose probabilities of the sampled tokens the trained one learns (`distill`).

  Attributes:
    path: the workdir of a run (its newest checkpoint when this run begins), a Hugging Face folder
      or a hub id; "" for no teacher. It may be of another size and family, with the same tokenizer.
    policy: the run's own policy in place of `path`: "base" for the model that it started from, or
      "current" for its weights at each update, which needs a `prompt`.
    prompt: what the teacher reads in place of `data.template`; {prompt} stands for the problem's
      text, {answer} for its answer. "" for the policy's prompt.
    max_prompt_tokens: with `prompt`, the longest prompt of the teacher; 0 for
      data.max_prompt_tokens.
  """

  path: str = ""
  policy: str = setting("", bound=one_of(("", "base", "current")))
  prompt: str = ""
  max_prompt_tokens: int = setting(0, bound=at_least(0))

  @property
  def exists(self) -> bool:
    """Whether there is a teacher."""
    return bool(self.path or self.policy)

  @property
  def is_frozen(self) -> bool:
    """Whether there is a teacher with parameters of its own."""
    return self.exists and self.policy != "current"


@dataclasses.dataclass(frozen=True)
class AlgorithmSection(Settings):
  """The algorithm's name and its hyperparameters; None takes the published value.

  Attributes:
    name: one of `algorithms.RECIPES`.
  """

  name: str = "gtpo"
