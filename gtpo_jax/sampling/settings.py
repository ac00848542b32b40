"""The settings of sampling: how tokens are drawn, and how the engine runs."""

from __future__ import annotations

import dataclasses
import numbers
from typing import ClassVar, NamedTuple

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import (
  ABOVE_0,
  AUTO,
  BELOW_1,
  INFINITY,
  SHARE,
  Checked,
  at_least,
  number,
  one_of,
  or_auto,
  setting,
)

KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
WEIGHTS_DTYPES = ("int8",)
KERNEL_PLATFORMS = {"pallas": "tpu", "triton": "gpu"}  # attention kernel -> platform it runs on
# The most slots per shard that are chosen, by platform. More slots amortise the reading of the
# weights until compute becomes the bottleneck, which takes fewer slots on a CPU. The kernel for
# TPUs has the queries of all slots in on-chip memory.
MOST_SLOTS = {"cpu": 64, "tpu": 256, "gpu": 1024}
# Default tokens between two host round trips. An accelerator's steps are shorter, so more of them
# must share a round trip.
CPU_CHUNK = 16
ACCELERATOR_CHUNK = 64
# Positions of a page. Half a page of a completion is unused on average; a page of 128 is a tile of
# scales on a TPU, and enough for one copy to use the bandwidth of the memory.
DEFAULT_PAGE = 128
SMALLEST_PAGE = 16
LARGEST_PAGE = 1024
# With a lower one, the most probable token is certain in float32, as at 0.
LOWEST_TEMPERATURE = 2.0**-20
TEMPERATURE = number(
  lambda x: x == 0 or LOWEST_TEMPERATURE <= x < INFINITY, "0 or at least 2**-20 and finite"
)
_PAGE_SIZE = number(
  lambda x: x == 0 or (SMALLEST_PAGE <= x <= LARGEST_PAGE and not x & (x - 1)),
  f"a power of two from {SMALLEST_PAGE} to {LARGEST_PAGE}, or 0 for {DEFAULT_PAGE}",
  numbers.Integral,
)


@dataclasses.dataclass(frozen=True)
class SamplingParams(Checked):
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

  prefix: ClassVar[str] = "sampling."

  temperature: float = setting(1.0, bound=TEMPERATURE)
  top_k: int = setting(0, bound=at_least(0))
  top_p: float = setting(1.0, bound=SHARE)
  min_p: float = setting(0.0, bound=BELOW_1)
  repetition_penalty: float = setting(1.0, bound=ABOVE_0)

  @property
  def penalises_repetition(self) -> bool:
    """Whether earlier tokens change the distribution that tokens are drawn from."""
    return self.repetition_penalty != 1.0

  @property
  def is_filtered(self) -> bool:
    """Whether a penalty or a filter changes the distribution that tokens are drawn from."""
    return self.penalises_repetition or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

  @property
  def filters(self) -> SamplingParams:
    """The penalty and the filters, which a program is compiled for, unlike the temperature."""
    return dataclasses.replace(self, temperature=1.0)


GREEDY = SamplingParams(temperature=0.0)


class Demand(NamedTuple):
  """The batches that an engine is to sample, and the memory for it, by which a cache is sized.

  Attributes:
    completions: the most completions of one batch; 0 if unknown. There are no more slots than that.
    group: how many completions of a prompt usually share its pages. Batches of smaller groups are
      sampled too, with fewer at once if they need more pages than there are.
    memory: the bytes of each device for sampling: the parameters in its layout, keys and values,
      and temporaries of its programs; None if unlimited.
    serves: whether requests come one by one and at any time. Then there are fewer lengths of arrays
      on a CPU, because each needs programs that compile while requests wait.
  """

  completions: int = 0
  group: int = 1
  memory: int | None = None
  serves: bool = False


@dataclasses.dataclass(frozen=True)
class EngineConfig(Checked):
  """How many completions run at once, and on which kernels.

  Attributes:
    slots: completions that run concurrently, over all devices; "auto" (or 0) for as many as the
      memory of the devices allows, up to 64 per device of the batch axes on CPU, 256 on TPU and
      1024 on GPU. If keys and values are in arrays, fewer run where the memory of a device does not
      hold the arrays of that many.
    chunk: tokens decoded between two visits to the host; 0 for 16 on CPU and 64 elsewhere.
    kv_dtype: format of the cached keys and values: float32, bfloat16, float16, int8; "" for the
      model's compute type.
    attention: how slots attend to their prompts and to the tokens they have generated: "pallas"
      (TPU) and "triton" (GPU) are kernels that keep keys and values in pages and read only those in
      use (on CPU they are interpreted, slowly); "xla" keeps them in arrays as long as the longest
      completion and reads these in full; "" for pallas on TPU, triton on GPUs that it supports, and
      xla elsewhere.
    page_size: positions of a page, a power of two; 0 for 128. Only for pallas and triton.
    cache_fraction: the number of pages, as a fraction of what all slots need if every
      completion reaches its longest length; "auto" for all of these, or as many as fit in the
      memory of a device beside the parameters, the optimizer's state, and the temporaries of the
      programs. With fewer than all, completions wait for pages if too many are long, and
      `sampling/waiting` says how often. Only for pallas and triton.
    weights_dtype: format of the layers' matrices while sampling, in training and evaluation:
      "int8", which halves the bytes that decoding reads, and needs a correction
      (`algorithm.tis_cap`); "" for the model's compute type.
    merge_adapters: "always" to add adapters to a copy of the base before sampling, which then draws
      tokens faster; "never" to compute them beside the base, as a quantised base always does;
      "auto" to merge them if the copy takes less than half of the memory that is left.
    batch_invariant: whether a completion has the bits that it would have alone, whatever is sampled
      beside it. Then one program decodes: idle slots are computed, in arrays of the longest
      lengths, and chunks do not end early. Without it, tokens differ now and then, because programs
      of other shapes round otherwise.
  """

  prefix: ClassVar[str] = "sampling."

  slots: int | str = setting(AUTO, bound=or_auto(at_least(0)))
  chunk: int = setting(0, bound=at_least(0))
  kv_dtype: str = setting("", bound=one_of(("", *KV_DTYPES)))
  attention: str = setting("", bound=one_of(("", "xla", *KERNEL_PLATFORMS)))
  page_size: int = setting(0, bound=_PAGE_SIZE)
  cache_fraction: float | str = setting(AUTO, bound=or_auto(SHARE))
  weights_dtype: str = setting("", bound=one_of(("", *WEIGHTS_DTYPES)))
  merge_adapters: str = setting(AUTO, bound=one_of((AUTO, "always", "never")))
  batch_invariant: bool = False

  def most_slots(self, platform: str, shards: int) -> int:
    """Returns the most slots over all shards: the configured number, or the platform's."""
    if self.slots and self.slots != AUTO:
      return self.slots
    return MOST_SLOTS.get(platform, MOST_SLOTS["tpu"]) * shards

  def resolve(
    self, platform: str, shards: int, compute_dtype: str, triton: bool = False
  ) -> EngineConfig:
    """Returns the config with everything that is unset at the defaults of `platform`.

    If the slots follow the memory, they are chosen with the programs; see `Programs.slots`.

    Args:
      platform: "cpu", "gpu" or "tpu".
      shards: devices along the batch axes of the sampling mesh.
      compute_dtype: the model's compute type.
      triton: whether the triton kernel supports this GPU and this model.
    """
    cpu = platform == "cpu"
    fastest = {"tpu": "pallas", "gpu": "triton" if triton else "xla"}
    attention = self.attention or fastest.get(platform, "xla")
    kernel_platform = KERNEL_PLATFORMS.get(attention, platform)
    if kernel_platform != platform and not cpu:
      raise UserError(
        f"sampling.attention = {attention!r} is a {kernel_platform.upper()} kernel, and this is "
        f"{platform}; leave it empty, or set it to 'xla'"
      )
    return dataclasses.replace(
      self,
      slots=self.slots or AUTO,
      chunk=self.chunk or (CPU_CHUNK if cpu else ACCELERATOR_CHUNK),
      kv_dtype=self.kv_dtype or compute_dtype,
      attention=attention,
      page_size=self.page_size or DEFAULT_PAGE,
    )
