"""The programs of an engine with a paged cache: few, and the same for every batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.page_pool import PagePool, PoolSizes, completion_places, prompt_places
from gtpo_jax.sampling.page_tables import SLOTS_PER_ROW
from gtpo_jax.sampling.pages import PagedCache
from gtpo_jax.sampling.params import SamplingParams
from gtpo_jax.sampling.programs import (
  LoweredProgram,
  Programs,
  ProgramSettings,
  SamplerState,
  Signature,
)
from gtpo_jax.sampling.scheduler import ENTRY_FACTOR, Capacity, Scheduler, capacity_for

# Once an eighth of the slots is enough for the completions that are left, the others are dropped.
# There are no further numbers of slots: each needs a program, and the kernel's cost follows the
# positions in use.
FEWER_SLOTS = 8
# Prompts are padded to the longest length, or to a quarter, a sixteenth ... of it.
WIDTH_FACTOR = 4


class PagedPrograms(Programs):
  """The programs of an engine with a paged cache; see `Programs`.

  The pool, the number of slots and that of cached prompts are those of the engine, not of a batch,
  so that training and evaluation share their programs.

  Attributes:
    pool: the sizes of the pool of each shard.
    slots: slots per shard.
  """

  cache: PagedCache

  def __init__(self, settings: ProgramSettings):
    """Prepares the programs."""
    model = settings.model
    config = settings.config
    demand = settings.demand
    page = config.page_size
    super().__init__(settings, PagedCache(model, config.kv_dtype, page, config.attention))
    most_slots = max(config.slots // self.shards, 1)
    completions = -(-demand.completions // self.shards)
    self.slots = min(most_slots, completions) if completions else most_slots
    prompt_pages = -(-min(settings.max_prompt_tokens, model.config.max_length) // page)
    completion_pages = -(-settings.max_tokens // page)
    full_groups = -(-self.slots // demand.group)
    cached_prompts = min(self.slots, ENTRY_FACTOR * full_groups)
    everything = self.slots * completion_pages + cached_prompts * prompt_pages
    self.pool = PoolSizes(
      max(math.ceil(config.cache_fraction * everything), completion_pages + prompt_pages),
      page,
      prompt_pages,
      completion_pages,
      self.chunk,
      SLOTS_PER_ROW[config.attention],
    )
    self.prompt_widths = _widths(prompt_pages, page)
    self.sequence_widths = _widths(prompt_pages + completion_pages, page)
    self._init_kv = jax.jit(lambda: self.cache.zeros(self.shards * self.pool.pages))

  @property
  def slot_counts(self) -> list[int]:
    """The numbers of slots per shard, descending."""
    return [count for count in (self.slots, self.slots // FEWER_SLOTS) if count]

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    needed = capacity_for(prompts, group, self.shards, self.slots * self.shards)
    slots = min(count for count in self.slot_counts if count >= needed.slots)
    capacity = needed._replace(slots=slots)
    return Scheduler(capacity, PagePool(capacity, self.pool))

  def new_state(
    self, scheduler: Scheduler, width: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty pool and states."""
    track_tokens = sampling_params.penalises_repetition
    states = lambda rows: self._init_states(self.shards * rows, track_tokens)
    return SamplerState(self._init_kv(), states(self.slots), states(scheduler.capacity.slots))

  def grow(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Returns the state unchanged: a pool does not grow."""
    return state

  def resize(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Drops idle slots once no completion waits for one."""
    fewer = self.slot_counts[-1]
    if scheduler.has_waiting or scheduler.capacity.slots == fewer:
      return state
    if int(scheduler.slots.active.reshape(self.shards, -1).sum(1).max()) > fewer:
      return state
    return state._replace(slots=self._keep_rows(state.slots, scheduler.shrink(fewer)))

  def signatures(
    self, prompts: int, group: int, sampling_params: SamplingParams, resumes: bool = False
  ) -> set[Signature]:
    """Returns the programs that `prompts` x `group` completions may need; see `Programs`."""
    tracked = sampling_params.penalises_repetition
    found: set[Signature] = {("keys", prompts, group), ("allocate",)}
    found |= {("prefill", width, tracked) for width in self.prompt_widths}
    found |= {("allocate", slots, tracked) for slots in self.slot_counts}
    found |= {("decode", slots, self._compiled_for(sampling_params)) for slots in self.slot_counts}
    found |= {("compact", slots, tracked) for slots in self.slot_counts[1:]}
    if resumes:
      found |= {("resume", width, tracked) for width in self.sequence_widths}
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
    scheduler = self._largest_scheduler()
    state = self.new_state(scheduler, self.prompt_widths[-1], sampling_params)
    for width in self.prompt_widths:
      state = self._run_prefill(params, state, self._unused_prefill(scheduler, width))
    for width in self.sequence_widths if resumes else ():
      state = self._run_resume(params, state, self._unused_resume(scheduler, width))
    for slots in self.slot_counts:
      if slots < scheduler.capacity.slots:
        order = scheduler.shrink(slots)
        state = state._replace(slots=self._keep_rows(state.slots, order))
      state, _ = self.decode(params, state, scheduler.inputs(), 0, 1, sampling_params)
      ready()
    self._init_states(self.shards * self.slot_counts[-1], sampling_params.penalises_repetition)
    jax.block_until_ready(state)

  def abstract_state(
    self, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns the shapes and shardings of the state in all slots, for any batch."""
    return self._abstract_state(sampling_params)

  def _abstract_state(self, sampling_params: SamplingParams) -> SamplerState:
    pages = self.shards * self.pool.pages
    kv = self._abstract(lambda: self.cache.zeros(pages), "batch", head_axis(self.model))
    states = self._abstract_states(self.shards * self.slots, sampling_params)
    return SamplerState(kv, states, states)

  def lower(
    self,
    params: DecodeParams,
    prompts: int,
    *,
    group: int,
    sampling_params: SamplingParams,
    resumes: bool = False,
  ) -> Iterator[LoweredProgram]:
    """Lowers the largest program of each kind."""
    return itertools.islice(self.lower_all(params, sampling_params, resumes), 3 if resumes else 2)

  def lower_all(
    self, params: DecodeParams, sampling_params: SamplingParams, resumes: bool = False
  ) -> Iterator[LoweredProgram]:
    """Lowers prefill and decoding at every shape, the largest of each kind first."""
    scheduler = self._largest_scheduler()
    state = self._abstract_state(sampling_params)
    longest, *shorter = self.prompt_widths[::-1]
    yield self._lower_prefill(params, state, scheduler, longest)
    yield self._lower_decode(params, state, scheduler, sampling_params)
    for width in self.sequence_widths[::-1] if resumes else ():
      yield self._lower_resume(params, state, scheduler, width)
    for width in shorter:
      yield self._lower_prefill(params, state, scheduler, width)
    for slots in self.slot_counts[1:]:
      scheduler.shrink(slots)
      states = self._abstract_states(self.shards * slots, sampling_params)
      yield self._lower_decode(params, state._replace(slots=states), scheduler, sampling_params)

  def _largest_scheduler(self) -> Scheduler:
    """Returns an empty schedule with all slots."""
    return self.scheduler(self.shards * self.slots, 1)

  def _entries(self, capacity: Capacity) -> int:
    return self.slots

  def _places(
    self,
    scheduler: Scheduler,
    assigned: list[list[tuple[int, int]]],
    entries: np.ndarray,
    width: int,
  ) -> np.ndarray:
    return prompt_places(scheduler.space, assigned, entries.shape[1], width)

  def _completion_places(
    self, scheduler: Scheduler, assigned: list[list[tuple[int, int]]], slots: np.ndarray, width: int
  ) -> np.ndarray:
    return completion_places(scheduler.space, assigned, slots.shape[1], width)


def _widths(pages: int, page: int) -> list[int]:
  """Returns the lengths, ascending, to which sequences of up to `pages` pages are padded."""
  widths = {pages}
  while pages > 1:
    pages = -(-pages // WIDTH_FACTOR)
    widths.add(pages)
  return [count * page for count in sorted(widths)]
