"""The compiled programs of an engine, and the fixed set of shapes that they are compiled for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts, array_lengths
from gtpo_jax.models.decode import DecodeParams, make_decode_params
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.params import Params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.compiling import StoppableProgram
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.sampling.cache import (
  PromptCache,
  SlotCache,
  abstract_cache,
  compact,
  grow,
  init_cache,
)
from gtpo_jax.sampling.decode import Chunk, decode_chunk, prefill_prompts
from gtpo_jax.sampling.host_arrays import pad_prefill
from gtpo_jax.sampling.params import EngineConfig, SamplingParams
from gtpo_jax.sampling.ragged import LANES
from gtpo_jax.sampling.scheduler import (
  SHRINK_FACTOR,
  Capacity,
  DecodeInputs,
  Scheduler,
  capacity_for,
  slot_counts,
)

# The most prompt tokens that a shard prefills at once. It bounds the memory of activations.
PREFILL_TOKENS = 8192
# The number of engines whose programs a process caches: policy, guide and evaluation of two runs.
SHARED_PROGRAMS = 6
MIN_TRITON_HEAD_DIM = 16  # the smallest matrix that a tensor core multiplies


class Programs:
  """The jitted functions of sampling for one model on one mesh. They compile on their first use.

  Attributes:
    model: the architecture on the sampling mesh, without adapters.
    config: the engine's settings for this platform.
    shards: devices along the batch axes.
    chunk: tokens decoded between two host round trips.
    kv_dtype: format of cached keys and values.
    prompt_widths: lengths of the prompt cache, ascending.
    cache_lengths: lengths of the slots' caches, ascending.
    layout: params -> DecodeParams, with adapters merged.
    completion_keys: (key, n, g) -> PRNG key data u32[n, g, 2].
  """

  def __init__(
    self,
    model: Qwen2,
    stop: Sequence[int],
    pad: int,
    max_prompt_tokens: int,
    max_tokens: int,
    vocab_limit: int | None,
    config: EngineConfig,
  ):
    """Prepares the programs; the arguments are those of `Engine`."""
    c = model.config
    platform = model.mesh.devices.flat[0].platform
    self.model = Qwen2(without_lora(model).config, sampling_mesh(model.mesh, c.kv_heads, c.mlp))
    self.shards = batch_shards(self.model.mesh)
    self.config = config.resolve(platform, self.shards)
    _check_head_dim(self.config.attention, c.head_dim)
    self.chunk = min(self.config.chunk, max_tokens)
    self.kv_dtype = config.kv_dtype or c.compute_dtype
    self.prompt_widths = array_lengths(min(max_prompt_tokens, c.max_length))
    self.cache_lengths = _cache_lengths(max_tokens, self.chunk, self.config.attention)
    self._stop = np.asarray(sorted(stop), np.int32)
    self._pad = pad

    self.layout = jax.jit(lambda params: make_decode_params(self.model, merge_lora(model, params)))
    self.completion_keys = jax.jit(_completion_keys, static_argnums=(1, 2))
    init = functools.partial(init_cache, self.model)
    self._init_cache = jax.jit(init, static_argnums=(0, 1, 2, 3))
    prefill = functools.partial(prefill_prompts, self.model)
    self._prefill = StoppableProgram(jax.jit(prefill, donate_argnums=1))
    self._grow = jax.jit(functools.partial(grow, self.model), static_argnums=1)
    self._compact = jax.jit(functools.partial(compact, self.model))
    decode = functools.partial(
      decode_chunk,
      self.model,
      chunk=self.chunk,
      attention=self.config.attention,
      vocab_limit=vocab_limit,
    )
    self._decode = StoppableProgram(
      jax.jit(decode, static_argnames="sampling_params", donate_argnums=2)
    )

  def capacity(self, prompts: int, group: int) -> Capacity:
    """Returns the number of slots and entries for `prompts` x `group` completions."""
    return capacity_for(prompts, group, self.shards, self.config.slots)

  def new_prompt_cache(
    self, capacity: Capacity, width: int, sampling_params: SamplingParams
  ) -> PromptCache:
    """Returns an empty prompt cache for prompts of up to `width` tokens."""
    rows = capacity.shards * capacity.entries
    track_tokens = sampling_params.penalises_repetition
    return PromptCache(*self._init_cache(rows, width, self.kv_dtype, track_tokens))

  def new_slots(self, capacity: Capacity, sampling_params: SamplingParams) -> SlotCache:
    """Returns empty slots with caches of the shortest length."""
    rows = capacity.shards * capacity.slots
    track_tokens = sampling_params.penalises_repetition
    return SlotCache(*self._init_cache(rows, self.cache_lengths[0], self.kv_dtype, track_tokens))

  def prefill_assigned(
    self,
    params: DecodeParams,
    prompt_cache: PromptCache,
    scheduler: Scheduler,
    prompts: Sequence[Sequence[int]],
  ) -> PromptCache:
    """Lets the scheduler fill free slots, and prefills the prompts that it assigns to entries."""
    width = _length(prompt_cache)
    rows = _prefill_rows(scheduler.capacity, width)
    while any(assigned := scheduler.assign(rows)):
      batch = pad_prefill(assigned, prompts, width, rows, scheduler.capacity.entries, self._pad)
      prompt_cache = self._prefill(params, prompt_cache, *batch)
    return prompt_cache

  def resize(self, slots: SlotCache, scheduler: Scheduler) -> SlotCache:
    """Grows the slots' caches for the next chunk, and drops idle slots once no completion waits."""
    needed = int(scheduler.generated.max()) + self.chunk
    while (length := _length(slots)) < needed:
      slots = self._grow(slots, self.cache_lengths[self.cache_lengths.index(length) + 1])
    if scheduler.has_waiting:
      return slots
    active = int(scheduler.active.reshape(self.shards, -1).sum(1).max())
    while SHRINK_FACTOR * active <= scheduler.capacity.slots:
      fewer = scheduler.capacity.slots // SHRINK_FACTOR
      slots = self._compact(slots, scheduler.shrink(fewer))
    return slots

  def decode(
    self,
    params: DecodeParams,
    prompt_cache: PromptCache,
    slots: SlotCache,
    inputs: DecodeInputs,
    max_steps: int,
    max_finished: int,
    sampling_params: SamplingParams,
  ) -> tuple[SlotCache, Chunk]:
    """Decodes one chunk as `decode_chunk` does. `slots` is donated."""
    return self._decode(
      params,
      prompt_cache,
      slots,
      inputs,
      self._stop,
      np.int32(max_steps),
      np.int32(max_finished),
      sampling_params=sampling_params,
    )

  def warm_up(
    self, params: DecodeParams, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> None:
    """Compiles every program that sampling `prompts` x `group` completions may need."""
    capacity = self.capacity(prompts, group)
    for width in self.prompt_widths:
      prompt_cache = self._prefill(
        params,
        self.new_prompt_cache(capacity, width, sampling_params),
        *self._unused_prefill(capacity, width),
      )
      for slots in slot_counts(capacity.slots):
        smaller = capacity._replace(slots=slots)
        self._warm_up_slots(params, prompt_cache, smaller, group, sampling_params)

  def _warm_up_slots(
    self,
    params: DecodeParams,
    prompt_cache: PromptCache,
    capacity: Capacity,
    group: int,
    sampling_params: SamplingParams,
  ) -> None:
    """Compiles decoding, shrinking and growing for `capacity.slots` slots at every cache length."""
    scheduler = _idle_scheduler(capacity, group)
    inputs = scheduler.inputs()
    fewer = capacity.slots // SHRINK_FACTOR
    order = scheduler.shrink(fewer) if fewer else None
    slots = self.new_slots(capacity, sampling_params)
    for length in self.cache_lengths:
      if length > _length(slots):
        slots = self._grow(slots, length)
      slots, _ = self.decode(params, prompt_cache, slots, inputs, 0, 1, sampling_params)
      if fewer:
        self._compact(slots, order)
    jax.block_until_ready(slots)

  def caches(
    self, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> tuple[PromptCache, SlotCache]:
    """Returns shapes and shardings of the largest caches for `prompts` x `group` completions."""
    capacity = self.capacity(prompts, group)

    def fields(rows: int, length: int) -> Any:
      return abstract_cache(
        self.model,
        capacity.shards * rows,
        length,
        self.kv_dtype,
        sampling_params.penalises_repetition,
      )

    prompt_cache = PromptCache(*fields(capacity.entries, self.prompt_widths[-1]))
    return prompt_cache, SlotCache(*fields(capacity.slots, self.cache_lengths[-1]))

  def lower(
    self, params: Params, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> Iterator[tuple[str, jax.stages.Lowered, Any]]:
    """Lowers the largest programs for `prompts` x `group` completions, ahead of time.

    The mesh may consist of devices that are not present.

    Yields:
      The name (layout, prefill or decode), the lowered program, and its abstract arguments that are
      in device memory.
    """
    layout = self.layout.lower(params)
    yield "layout", layout, params
    decode_params = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      jax.eval_shape(self.layout, params),
      layout.compile().output_shardings,
    )
    capacity = self.capacity(prompts, group)
    prompt_cache, slots = self.caches(prompts, group=group, sampling_params=sampling_params)
    batch = self._unused_prefill(capacity, self.prompt_widths[-1])
    prefill = self._prefill.lower(decode_params, prompt_cache, *batch)
    yield "prefill", prefill, (decode_params, prompt_cache)
    decode = self._decode.lower(
      decode_params,
      prompt_cache,
      slots,
      _idle_scheduler(capacity, group).inputs(),
      self._stop,
      np.int32(self.chunk),
      np.int32(1),
      sampling_params=sampling_params,
    )
    yield "decode", decode, (decode_params, prompt_cache, slots)

  def _unused_prefill(self, capacity: Capacity, width: int) -> tuple[Prompts, np.ndarray]:
    """Returns a prefill batch of the right shape that writes to no entry."""
    no_prompts: list[list[tuple[int, int]]] = [[] for _ in range(capacity.shards)]
    rows = _prefill_rows(capacity, width)
    return pad_prefill(no_prompts, [], width, rows, capacity.entries, self._pad)


@functools.lru_cache(maxsize=SHARED_PROGRAMS)
def make_programs(
  model: Qwen2,
  stop: tuple[int, ...],
  pad: int,
  max_prompt_tokens: int,
  max_tokens: int,
  vocab_limit: int | None,
  config: EngineConfig,
) -> Programs:
  """Returns the programs of an engine; engines with equal arguments share them."""
  return Programs(model, stop, pad, max_prompt_tokens, max_tokens, vocab_limit, config)


def _check_head_dim(attention: str, head_dim: int) -> None:
  power_of_two = head_dim & (head_dim - 1) == 0
  if attention == "triton" and not (power_of_two and head_dim >= MIN_TRITON_HEAD_DIM):
    raise UserError(
      "sampling.attention = 'triton' needs a head width that is a power of two from "
      f"{MIN_TRITON_HEAD_DIM}, not {head_dim}; set it to 'xla'"
    )


def _cache_lengths(max_tokens: int, chunk: int, attention: str) -> list[int]:
  """Returns the lengths of the slots' caches, ascending, with space for one more chunk each."""
  multiple = 1 if attention == "xla" else LANES
  round_up = lambda size: -(-size // multiple) * multiple
  return sorted({round_up(size + chunk) for size in array_lengths(max_tokens)})


def _length(cache: PromptCache | SlotCache) -> int:
  """Returns the positions per row of a cache."""
  return cache.kv[0].v.shape[3]


def _prefill_rows(capacity: Capacity, width: int) -> int:
  """Returns the number of prompts of `width` tokens that a shard prefills at once."""
  return max(min(capacity.entries, PREFILL_TOKENS // width), 1)


def _idle_scheduler(capacity: Capacity, group: int) -> Scheduler:
  """Returns a scheduler with nothing to do."""
  return Scheduler(
    capacity,
    prompt_lengths=np.ones(1, np.int32),
    token_limits=np.zeros((1, group), np.int32),
    keys=np.zeros((1, group, 2), np.uint32),
  )


def _completion_keys(key: jax.Array, n: int, g: int) -> jax.Array:
  """Returns key data u32[n, g, 2]: `key` folded with the index of prompt, then of completion."""
  rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
  fold_group = jax.vmap(lambda row, j: jax.random.fold_in(row, j), in_axes=(None, 0))
  keys = jax.vmap(fold_group, in_axes=(0, None))(rows, jnp.arange(g))
  return jax.random.key_data(keys)
