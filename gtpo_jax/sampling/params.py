"""The settings of sampling: how tokens are drawn, and how the engine runs."""

from __future__ import annotations

import dataclasses

from gtpo_jax.runtime.errors import UserError

KERNEL_PLATFORMS = {"pallas": "tpu", "triton": "gpu"}  # attention kernel -> platform it runs on
# Default slots per shard. More slots amortise the reading of the weights, until compute becomes the
# bottleneck; on a CPU that takes fewer slots.
CPU_SLOTS = 64
ACCELERATOR_SLOTS = 256
# Default tokens between two host round trips. An accelerator's steps are shorter, so that the round
# trip must be shared by more of them.
CPU_CHUNK = 16
ACCELERATOR_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How tokens are drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    min_p: keep tokens at least this fraction as probable as the most probable; 0 keeps all.
    repetition_penalty: divides the positive logits and multiplies the negative logits of tokens
      that already occur in the prompt or completion (1909.05858, section 4.1, as in Transformers);
      1 turns it off.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise UserError(f"sampling.temperature must be at least 0 and finite, got {self.temperature}")
    if self.top_k < 0:
      raise UserError(f"sampling.top_k must be at least 0 (0 keeps all), got {self.top_k}")
    if not 0 < self.top_p <= 1:
      raise UserError(f"sampling.top_p must be in (0, 1], got {self.top_p}")
    if not 0 <= self.min_p < 1:
      raise UserError(f"sampling.min_p must be in [0, 1), got {self.min_p}")
    if not 0 < self.repetition_penalty < float("inf"):
      raise UserError(
        "sampling.repetition_penalty must be above 0 and finite (1 turns it off), "
        f"got {self.repetition_penalty}"
      )

  @property
  def policy_temperature(self) -> float:
    """The temperature of the reported log-probs and entropy: 1 under greedy decoding."""
    return self.temperature or 1.0

  @property
  def penalises_repetition(self) -> bool:
    """Whether earlier tokens change the distribution that tokens are drawn from."""
    return self.repetition_penalty != 1.0

  @property
  def draws_from_policy(self) -> bool:
    """Whether tokens are drawn from the policy itself: no penalty, no filter, not greedy."""
    filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
    return not (self.penalises_repetition or self.temperature == 0 or filtered)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """How many completions run at once, and on which kernels.

  Attributes:
    slots: completions that run concurrently, over all devices; 0 for 64 per device of the batch
      axes on CPU and 256 elsewhere.
    chunk: tokens decoded between two host round trips; 0 for 16 on CPU and 64 elsewhere.
    kv_dtype: format of the cached keys and values: float32, bfloat16, int8; "" for the model's
      compute type.
    attention: how a slot attends to the tokens it has generated: "xla" computes the full length of
      the cache for every slot; "pallas" (TPU) and "triton" (GPU) are kernels that read only each
      slot's own positions (on CPU they are interpreted, slowly); "" for pallas on TPU and xla
      elsewhere.
  """

  slots: int = 0
  chunk: int = 0
  kv_dtype: str = ""
  attention: str = ""

  def __post_init__(self):
    for name in ("slots", "chunk"):
      value = getattr(self, name)
      if value < 0:
        raise UserError(
          f"sampling.{name} must be at least 1, or 0 for the platform's default; got {value}"
        )
    if self.kv_dtype not in ("", "float32", "bfloat16", "int8"):
      raise UserError(
        f"sampling.kv_dtype must be float32, bfloat16, int8 or empty, got {self.kv_dtype!r}"
      )
    if self.attention not in ("", "xla", *KERNEL_PLATFORMS):
      raise UserError(
        "sampling.attention must be xla, pallas, triton, or empty for the platform's default, "
        f"got {self.attention!r}"
      )

  def resolve(self, platform: str, shards: int) -> EngineConfig:
    """Replaces slots, chunk and attention by the defaults of `platform` where they are 0 or "".

    Args:
      platform: "cpu", "gpu" or "tpu".
      shards: devices along the batch axes of the sampling mesh.

    Raises:
      UserError: the attention kernel does not run on `platform`.
    """
    cpu = platform == "cpu"
    attention = self.attention or ("pallas" if platform == "tpu" else "xla")
    kernel_platform = KERNEL_PLATFORMS.get(attention, platform)
    if kernel_platform != platform and not cpu:
      raise UserError(
        f"sampling.attention = {attention!r} is a {kernel_platform.upper()} kernel, and this is "
        f"{platform}; leave it empty, or set it to 'xla'"
      )
    return dataclasses.replace(
      self,
      slots=self.slots or (CPU_SLOTS if cpu else ACCELERATOR_SLOTS) * shards,
      chunk=self.chunk or (CPU_CHUNK if cpu else ACCELERATOR_CHUNK),
      attention=attention,
    )
