"""The programs of an engine with a paged cache: few, and the same for every batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.decode import decode_bytes
from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.sampling.batches import PrefillBatch, rows_at_once
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part, head_axis
from gtpo_jax.sampling.chunk import read_rows
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.gpu_kernel import SLOTS_PER_ROW
from gtpo_jax.sampling.paged.memory import page_bytes, temporary_bytes
from gtpo_jax.sampling.paged.pool import PagePool, PoolSizes, places
from gtpo_jax.sampling.programs import (
  Programs,
  ProgramSettings,
  SamplerState,
  abstract,
  abstract_states,
  chunk_limits,
  compiled_for,
  keys_program,
  state_bytes,
  stoppable,
)
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import ENTRY_FACTOR, Capacity, capacity_for
from gtpo_jax.sampling.settings import Demand, SamplingParams

TPU_SLOTS_PER_ROW = 16  # slots of a prompt whose queries fill a matrix unit together
# Once an eighth of the slots is enough for the completions that are left, the others are dropped.
# There are no further numbers of slots: each needs a program, and the kernel's cost follows the
# positions in use.
FEWER_SLOTS = 8
# Prompts are padded to the longest length, or to a quarter, a sixteenth ... of it.
WIDTH_FACTOR = 4
# Lengths have a long tail: the median completion of a run is about a sixth of the longest.
TYPICAL_FRACTION = 6
SERVED_TOKENS = 1024  # the most of a prompt, and of an answer, by which a server chooses its slots


class PagedPrograms(Programs):
  """The programs of an engine with a paged cache; see `Programs`.

  The pool, the number of slots and that of cached prompts are those of the engine, not of a batch,
  so that training and evaluation share their programs.

  Attributes:
    pool: the sizes of the pool of each shard.
    slots: the most slots per shard.
    entries: the most cached prompts per shard.
    slot_counts: the numbers of slots per shard, descending.
    init_kv: makes the pool.
  """

  cache: PagedCache

  def __init__(self, settings: ProgramSettings):
    """Prepares the programs."""
    model = settings.model
    config = settings.config
    page = config.page_size
    super().__init__(settings, PagedCache(model, config.kv_dtype, page, config.attention))
    self.slots, self.pool = self._slots_and_pool(settings)
    self.entries = self._entries(self.slots, settings.demand)
    self.config = dataclasses.replace(config, slots=self.shards * self.slots)
    self.slot_counts = [count for count in (self.slots, self.slots // FEWER_SLOTS) if count]
    prompt_pages = self.pool.prompt_pages
    completion_pages = self.pool.completion_pages
    self.widths = {
      PROMPTS: _widths(prompt_pages, page),
      SLOTS: _widths(prompt_pages + completion_pages, page),
    }
    if config.batch_invariant:  # each program has one shape
      self.slot_counts = self.slot_counts[:1]
      self.widths = {part: widths[-1:] for part, widths in self.widths.items()}
    inserts = {PROMPTS: self.cache.insert, SLOTS: self.cache.insert_completions}
    self.read = {
      part: stoppable(functools.partial(read_rows, model, insert), 1, 2)
      for part, insert in inserts.items()
    }
    self.init_kv = jax.jit(lambda: self.cache.zeros(self.shards * self.pool.pages))

  def _slots_and_pool(self, settings: ProgramSettings) -> tuple[int, PoolSizes]:
    """Returns the slots of each shard, and the sizes of its pool.

    Slots that follow the memory are halved until the pool holds as many completions of half the
    longest length, with their prompts. Otherwise many slots would wait for pages. What a server
    gets is taken to be shorter.
    """
    config = settings.config
    demand = settings.demand
    slots = max(self.most_slots // self.shards, 1)
    if demand.completions:
      slots = min(slots, -(-demand.completions // self.shards))
    while True:
      sizes = self._all_pages(settings, slots)
      pages = self._pages(config.cache_fraction, demand, slots, sizes)
      half = -(-sizes.completion_pages // 2)
      prompt = sizes.prompt_pages
      if demand.serves:
        half, prompt = (min(x, sizes.pages_of(SERVED_TOKENS)) for x in (half, prompt))
      typical = slots * half + -(-slots // demand.group) * prompt
      if config.slots != AUTO or pages >= typical or slots == 1:
        return slots, sizes._replace(pages=max(pages, sizes.completion_pages + sizes.prompt_pages))
      slots //= 2

  def _entries(self, slots: int, demand: Demand) -> int:
    """Returns the most cached prompts per shard.

    Gated delta nets keep as much of a prompt as of a completion, so that there are only half as
    many again as full groups need.
    """
    if not self.model.config.delta:
      return slots
    full_groups = -(-slots // demand.group)
    return min(slots, full_groups + -(-full_groups // 2))

  def _all_pages(self, settings: ProgramSettings, slots: int) -> PoolSizes:
    """Returns the sizes of a pool in which all slots can reach their longest length."""
    c = self.model.config
    page = settings.config.page_size
    prompt_pages = -(-min(settings.max_prompt_tokens, c.max_length) // page)
    completion_pages = -(-settings.max_tokens // page)
    cached_prompts = min(slots, ENTRY_FACTOR * -(-slots // settings.demand.group))
    everything = slots * completion_pages + cached_prompts * prompt_pages
    is_gpu = settings.config.attention == "triton"
    row = SLOTS_PER_ROW if is_gpu else TPU_SLOTS_PER_ROW
    return PoolSizes(everything, page, prompt_pages, completion_pages, self.chunk, row)

  def _pages(self, fraction: float | str, demand: Demand, slots: int, sizes: PoolSizes) -> int:
    """Returns the number of pages per shard, at most those of `sizes`."""
    if fraction != AUTO:
      return math.ceil(fraction * sizes.pages)
    if demand.memory is None:
      return sizes.pages
    beside = decode_bytes(self.model) + temporary_bytes(self.model, slots, sizes)
    beside += state_bytes(self.model) * (slots + self._entries(slots, demand))
    return min((demand.memory - beside) // page_bytes(self.cache), sizes.pages)

  def describe_space(self) -> str:
    """Returns how much the cache of a device holds."""
    size = self.pool.pages * page_bytes(self.cache) / 2**30
    median = max(self.max_tokens // TYPICAL_FRACTION, 1)
    return (
      f"{self.slots} slots and {self.pool.pages} pages of {self.pool.page} tokens per device "
      f"({size:.2f} GiB), which hold "
      f"{self._holds(self.max_tokens)} completions of {self.max_tokens} tokens, or "
      f"{self._holds(median)} of {median}"
    )

  @property
  def longest_at_once(self) -> int:
    """How many completions of the maximum length run at once, over all shards."""
    return self.shards * self._holds(self.max_tokens)

  def _holds(self, tokens: int) -> int:
    """Returns how many completions of so many tokens the pool of a shard holds, and a prompt."""
    pages = self.pool.pages - self.pool.prompt_pages
    return min(pages // self.pool.pages_of(tokens), self.slots)

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    needed = capacity_for(prompts, group, self.shards, self.slots * self.shards)
    slots = min(count for count in self.slot_counts if count >= needed.slots)
    capacity = needed._replace(slots=slots, entries=min(needed.entries, self.entries))
    return Scheduler(capacity, PagePool(capacity, self.pool))

  def row_counts(self, scheduler: Scheduler, part: Part, width: int) -> list[int]:
    """Returns the one number of rows per shard that a batch of a width has."""
    return [rows_at_once(width, self.entries if part == PROMPTS else scheduler.capacity.slots)]

  def places_in_cache(
    self, scheduler: Scheduler, part: Part, batch: PrefillBatch, source: np.ndarray
  ) -> np.ndarray:
    """Returns the pages of a batch; see `Programs`."""
    return places(scheduler.space, part, batch)

  def new_state(
    self, scheduler: Scheduler, longest_prompt: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty pool and states."""
    track_tokens = sampling_params.penalises_repetition
    states = lambda rows: self.init_states(self.shards * rows, track_tokens)
    return SamplerState(self.init_kv(), states(self.entries), states(scheduler.capacity.slots))

  def resize(
    self, state: SamplerState, scheduler: Scheduler, keep_slots: bool = False
  ) -> SamplerState:
    """Drops idle slots once no completion waits for one; see `Programs`. A pool does not grow."""
    fewer = self.slot_counts[-1]
    if keep_slots or scheduler.has_waiting or scheduler.capacity.slots == fewer:
      return state
    if int(scheduler.slots.active.reshape(self.shards, -1).sum(1).max()) > fewer:
      return state
    return state._replace(slots=self.keep_rows(state.slots, scheduler.shrink(fewer)))

  def inventory(self, workload: Workload) -> Iterator[Program]:
    """Returns every program that a workload can reach, the largest of each kind first."""
    yield keys_program(self)
    yield Program(("allocate",), self.init_kv, tuple)
    tracked = workload.sampling_params.penalises_repetition
    for slots in dict.fromkeys((self.entries, *self.slot_counts)):
      signature = ("allocate", "states", slots, tracked)
      rows = (self.shards * slots, tracked)
      yield Program(signature, self.init_states, lambda rows=rows: rows)
    yield from self._reads(PROMPTS, self.slots, tracked)
    yield from self._decodes(workload.sampling_params)
    if workload.resumes or workload.turns:
      most = self.scheduler(workload.prompts, workload.group).capacity.slots
      for slots in self.slot_counts:
        # Without turns, completions are resumed when sampling begins, in all slots.
        if workload.turns or slots == most:
          yield from self._reads(SLOTS, slots, tracked)
    for slots in self.slot_counts[1:]:
      order = np.zeros((self.shards, slots), np.int32)
      yield Program(
        ("compact", "states", slots, tracked),
        self.keep_rows,
        lambda order=order: (self._state(self.slots, tracked).slots, order),
      )

  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the state in all slots, for any workload."""
    return self._state(self.slots, workload.sampling_params.penalises_repetition)

  def _reads(self, part: Part, slots: int, tracked: bool) -> Iterator[Program]:
    """Returns the programs that read prompts, or completions into this number of slots."""
    idle = _idle(self, slots)
    into = self.entries if part == PROMPTS else slots
    kind = ("prefill",) if part == PROMPTS else ("resume", slots)
    state = functools.partial(self._state, slots, tracked)
    for width in self.widths[part][::-1]:
      [rows] = self.row_counts(idle, part, width)

      def arguments(width: int = width, rows: int = rows) -> tuple[Any, ...]:
        before = state()
        batch = self.empty_batch(idle, part, width, rows, into)
        return before.kv, getattr(before, part), *batch

      yield Program(
        (*kind, width, tracked),
        self.read[part],
        arguments,
        reads_params=True,
        beside=lambda: state()._replace(kv=(), **{part: ()}),
      )

  def _decodes(self, sampling_params: SamplingParams) -> Iterator[Program]:
    compiled = compiled_for(self, sampling_params)
    for slots in self.slot_counts:

      def arguments(slots: int = slots) -> tuple[Any, ...]:
        limits = chunk_limits(self, self.chunk, 1, sampling_params)
        state = self._state(slots, sampling_params.penalises_repetition)
        return *state, _idle(self, slots).inputs(), limits

      yield Program(
        ("decode", slots, compiled),
        self.decode_chunk,
        arguments,
        {"sampling_params": compiled},
        reads_params=True,
        beside=tuple,
      )

  def _state(self, slots: int, tracked: bool) -> SamplerState:
    """Returns the shapes and shardings of the state with this number of slots per shard."""
    pages = self.shards * self.pool.pages
    kv = abstract(self.model, lambda: self.cache.zeros(pages), "batch", head_axis(self.model))
    states = lambda rows: abstract_states(self.model, self.shards * rows, tracked)
    return SamplerState(kv, states(self.entries), states(slots))


def _widths(pages: int, page: int) -> list[int]:
  """Returns the lengths, ascending, to which sequences of up to `pages` pages are padded."""
  widths = {pages}
  while pages > 1:
    pages = -(-pages // WIDTH_FACTOR)
    widths.add(pages)
  return [count * page for count in sorted(widths)]


def _idle(programs: PagedPrograms, slots: int) -> Scheduler:
  """Returns a schedule without prompts, with this number of slots per shard."""
  capacity = Capacity(programs.shards, slots, 1, 1)
  return Scheduler(capacity, PagePool(capacity, programs.pool))
