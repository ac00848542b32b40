"""The programs of an engine with a dense cache.

Their shapes follow the longest prompt, the longest running completion and the number of slots in
use, so that a CPU computes little more than it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

from gtpo_jax.arrays import array_lengths
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.dense import DenseCache, DenseKV
from gtpo_jax.sampling.dense_tables import DenseSpace
from gtpo_jax.sampling.params import SamplingParams
from gtpo_jax.sampling.programs import (
  LoweredProgram,
  Programs,
  ProgramSettings,
  SamplerState,
  Signature,
)
from gtpo_jax.sampling.scheduler import Capacity, Scheduler, capacity_for

# The number of slots is divided by this as soon as the active completions fit. Every number of
# slots needs a compiled program, so a large factor keeps the programs few. On GPUs, where each
# compiles for a minute, prompts also have one length, and slots the longest length or a quarter.
CPU_SHRINK_FACTOR = 4
GPU_SHRINK_FACTOR = 16


class DensePrograms(Programs):
  """The programs of an engine with a dense cache; see `Programs`.

  Attributes:
    cache_lengths: lengths of the slots' arrays, ascending.
  """

  cache: DenseCache

  def __init__(self, settings: ProgramSettings):
    """Prepares the programs."""
    model = settings.model
    cache = DenseCache(model, settings.config.kv_dtype)
    super().__init__(settings, cache)
    longest_prompt = min(settings.max_prompt_tokens, model.config.max_length)
    widths, lengths = array_lengths(longest_prompt), array_lengths(settings.max_tokens)
    on_cpu = model.mesh.devices.flat[0].platform == "cpu"
    self.static_temperature = on_cpu
    self._shrink_factor = CPU_SHRINK_FACTOR if on_cpu else GPU_SHRINK_FACTOR
    if not on_cpu:
      widths, lengths = widths[-1:], lengths[-3::2]
    self.prompt_widths = widths
    sequences = array_lengths(min(longest_prompt + settings.max_tokens, model.config.max_length))
    self.sequence_widths = sequences[::-2][::-1] if on_cpu else sequences[-1:]
    # Each has space for one more chunk.
    self.cache_lengths = sorted({size + self.chunk for size in lengths})
    self._init_kv = jax.jit(cache.zeros, static_argnums=(0, 1))
    self._grow = jax.jit(cache.grow, static_argnums=1)
    self._compact = jax.jit(cache.compact)

  def capacity(self, prompts: int, group: int) -> Capacity:
    """Returns the number of slots and entries for `prompts` x `group` completions."""
    return capacity_for(prompts, group, self.shards, self.config.slots)

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    capacity = self.capacity(prompts, group)
    return Scheduler(capacity, DenseSpace(capacity))

  def new_state(
    self, scheduler: Scheduler, width: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty cache for prompts of up to `width` tokens, with the shortest slots."""
    entries, slots = _rows(scheduler.capacity)
    track_tokens = sampling_params.penalises_repetition
    return SamplerState(
      DenseKV(self._init_kv(entries, width), self._init_kv(slots, self.cache_lengths[0])),
      self._init_states(entries, track_tokens),
      self._init_states(slots, track_tokens),
    )

  def grow(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Grows the slots' arrays for the next chunk."""
    needed = int(scheduler.slots.generated.max()) + self.chunk
    while (length := _length(state.kv.slots)) < needed:
      longer = self.cache_lengths[self.cache_lengths.index(length) + 1]
      state = self._with_slots(state, self._grow(state.kv.slots, longer))
    return state

  def resize(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Grows the slots' arrays for the next chunk, and drops idle slots once nothing waits."""
    state = self.grow(state, scheduler)
    if scheduler.has_waiting:
      return state
    active = int(scheduler.slots.active.reshape(self.shards, -1).sum(1).max())
    while self._shrink_factor * active <= scheduler.capacity.slots:
      order = scheduler.shrink(scheduler.capacity.slots // self._shrink_factor)
      state = self._with_slots(state, self._compact(state.kv.slots, order))
      state = state._replace(slots=self._keep_rows(state.slots, order))
    return state

  def signatures(
    self, prompts: int, group: int, sampling_params: SamplingParams, resumes: bool = False
  ) -> set[Signature]:
    """Returns the programs that `prompts` x `group` completions may need; see `Programs`."""
    capacity = self.capacity(prompts, group)
    counts = slot_counts(capacity.slots, self._shrink_factor)
    entries = capacity.entries
    tracked = sampling_params.penalises_repetition
    found: set[Signature] = {("keys", prompts, group)}
    found |= {("allocate", rows, tracked) for rows in (entries, counts[0])}
    for width in self.prompt_widths:
      found |= {("allocate", entries, width), ("prefill", entries, counts[0], width, tracked)}
      found |= {
        (
          "decode",
          entries,
          capacity.slots_per_entry,
          width,
          slots,
          length,
          self._compiled_for(sampling_params),
        )
        for slots in counts
        for length in self.cache_lengths
      }
    found.add(("allocate", counts[0], self.cache_lengths[0]))
    for slots in counts:
      found |= {("grow", slots, length) for length in self.cache_lengths[1:]}
    for slots in counts[1:]:
      found |= {("compact", slots, length) for length in self.cache_lengths}
      found.add(("compact", slots, tracked))
    if resumes:
      found |= {
        ("resume", entries, prompt_width, counts[0], width, length, tracked)
        for prompt_width in self.prompt_widths
        for width in self.sequence_widths
        for length in self.cache_lengths
      }
    return found

  def _warm_up(
    self,
    params: DecodeParams,
    prompts: int,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool,
    ready: Callable[[], None],
  ) -> None:
    for width in self.prompt_widths:
      scheduler = self.scheduler(prompts, group)
      state = self.new_state(scheduler, width, sampling_params)
      state = self._run_prefill(params, state, self._unused_prefill(scheduler, width))
      widths = self.sequence_widths if resumes else []
      resumptions = [self._unused_resume(scheduler, width) for width in widths]
      while True:
        inputs = scheduler.inputs()
        fewer = scheduler.capacity.slots // self._shrink_factor
        order = scheduler.shrink(fewer) if fewer else None
        for length in self.cache_lengths:
          if length > _length(state.kv.slots):
            state = self._with_slots(state, self._grow(state.kv.slots, length))
          for batch in resumptions:
            state = self._run_resume(params, state, batch)
          state, _ = self.decode(params, state, inputs, 0, 1, sampling_params)
          if order is not None:
            self._compact(state.kv.slots, order)
          ready()
        jax.block_until_ready(state)
        if order is None:
          break
        resumptions = []
        states = self._keep_rows(state.slots, order)
        slots = self._init_kv(_rows(scheduler.capacity)[1], self.cache_lengths[0])
        state = self._with_slots(state, slots)._replace(slots=states)

  def abstract_state(
    self, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns the shapes and shardings of the largest state for `prompts` x `group` completions."""
    capacity = self.capacity(prompts, group)
    return self._abstract_state(capacity, self.cache_lengths[-1], sampling_params)

  def _abstract_state(
    self, capacity: Capacity, length: int, sampling_params: SamplingParams
  ) -> SamplerState:
    entries, slots = _rows(capacity)
    heads = ("batch", None, head_axis(self.model))
    kv = lambda rows, positions: self._abstract(lambda: self.cache.zeros(rows, positions), *heads)
    return SamplerState(
      DenseKV(kv(entries, self.prompt_widths[-1]), kv(slots, length)),
      self._abstract_states(entries, sampling_params),
      self._abstract_states(slots, sampling_params),
    )

  def lower(
    self,
    params: DecodeParams,
    prompts: int,
    *,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool = False,
  ) -> Iterator[LoweredProgram]:
    """Lowers the largest program of each kind for `prompts` x `group` completions."""
    capacity = self.capacity(prompts, group)
    scheduler = self.scheduler(prompts, group)
    state = self.abstract_state(prompts, group=group, sampling_params=sampling_params)
    shortest = self._abstract_state(capacity, self.cache_lengths[0], sampling_params)
    yield self._lower_prefill(params, shortest, scheduler, self.prompt_widths[-1])
    yield self._lower_decode(params, state, scheduler, sampling_params)
    if resumes:
      yield self._lower_resume(params, state, scheduler, self.sequence_widths[-1])
    beside = (params, state.kv.prompts, state.prompts, state.slots)
    if len(self.cache_lengths) > 1:
      shorter = self._abstract_state(capacity, self.cache_lengths[-2], sampling_params).kv.slots
      grow = self._grow.lower(shorter, self.cache_lengths[-1])
      yield LoweredProgram("grow", grow, shorter, beside)
    if fewer := capacity.slots // self._shrink_factor:
      compact = self._compact.lower(state.kv.slots, scheduler.shrink(fewer))
      yield LoweredProgram("compact", compact, state.kv.slots, beside)

  def _entries(self, capacity: Capacity) -> int:
    return capacity.entries

  def _places(
    self,
    scheduler: Scheduler,
    assigned: list[list[tuple[int, int]]],
    entries: np.ndarray,
    width: int,
  ) -> np.ndarray:
    return entries

  def _completion_places(
    self, scheduler: Scheduler, assigned: list[list[tuple[int, int]]], slots: np.ndarray, width: int
  ) -> np.ndarray:
    return slots

  def _with_slots(self, state: SamplerState, slots: list[KV]) -> SamplerState:
    return state._replace(kv=state.kv._replace(slots=slots))


def slot_counts(slots: int, factor: int) -> list[int]:
  """Returns all numbers of slots per shard, from `slots` down, each divided by `factor`."""
  counts = [slots]
  while smaller := counts[-1] // factor:
    counts.append(smaller)
  return counts


def _rows(capacity: Capacity) -> tuple[int, int]:
  """Returns the numbers of entries and slots over all shards."""
  return capacity.shards * capacity.entries, capacity.shards * capacity.slots


def _length(kv: list[KV]) -> int:
  """Returns the positions per row."""
  return kv[0].v.shape[3]
