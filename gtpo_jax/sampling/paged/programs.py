"""The programs of an engine with a paged cache: few, and the same for every batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from gtpo_jax.models.transformer import Transformer
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part, head_axis
from gtpo_jax.sampling.chunk import read_rows
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.paged_sizes import PagedSizes
from gtpo_jax.sampling.paged.pool import places
from gtpo_jax.sampling.prefill.batches import PrefillBatch
from gtpo_jax.sampling.prefill.reading import empty_batch
from gtpo_jax.sampling.programs import (
  Programs,
  ProgramSettings,
  SamplerState,
  abstract,
  abstract_states,
  chunk_limits,
  compiled_for,
  keys_program,
  stoppable,
)
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.settings import SamplingParams


class PagedPrograms(Programs):
  """The programs of an engine with a paged cache; see `Programs`.

  The pool and the numbers of slots and cached prompts belong to the engine, not to a batch,
  so that training and evaluation share their programs.

  Attributes:
    init_kv: makes the pool.
  """

  cache: PagedCache
  sizes: PagedSizes

  def __init__(self, settings: ProgramSettings, model: Transformer):
    """Prepares the programs; see `CacheSizes` for the arguments."""
    config = settings.config
    cache = PagedCache(model, config.kv_dtype, config.page_size, config.attention)
    super().__init__(settings, cache, PagedSizes(settings, cache))
    inserts = {PROMPTS: cache.insert, SLOTS: cache.insert_completions}
    self.read = {
      part: stoppable(functools.partial(read_rows, model, insert), 1, 2)
      for part, insert in inserts.items()
    }
    self.init_kv = jax.jit(lambda: cache.zeros(self.shards * self.sizes.pool.pages))

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
    return SamplerState(
      self.init_kv(), states(self.sizes.entries), states(scheduler.capacity.slots)
    )

  def resize(
    self, state: SamplerState, scheduler: Scheduler, keep_slots: bool = False
  ) -> SamplerState:
    """Drops idle slots once no completion waits for one; see `Programs`. A pool does not grow."""
    fewer = self.sizes.slot_counts[-1]
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
    for slots in dict.fromkeys((self.sizes.entries, *self.sizes.slot_counts)):
      signature = ("allocate", "states", slots, tracked)
      rows = (self.shards * slots, tracked)
      yield Program(signature, self.init_states, lambda rows=rows: rows)
    yield from self._reads(PROMPTS, self.sizes.slots, tracked)
    yield from self._decodes(workload.sampling_params)
    if workload.resumes or workload.turns:
      most = self.sizes.scheduler(workload.prompts, workload.group).capacity.slots
      for slots in self.sizes.slot_counts:
        # Without turns, completions are resumed when sampling begins, in all slots.
        if workload.turns or slots == most:
          yield from self._reads(SLOTS, slots, tracked)
    for slots in self.sizes.slot_counts[1:]:
      order = np.zeros((self.shards, slots), np.int32)
      yield Program(
        ("compact", "states", slots, tracked),
        self.keep_rows,
        lambda order=order: (self._state(self.sizes.slots, tracked).slots, order),
      )

  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the state in all slots, for any workload."""
    return self._state(self.sizes.slots, workload.sampling_params.penalises_repetition)

  def _reads(self, part: Part, slots: int, tracked: bool) -> Iterator[Program]:
    """Returns the programs that read prompts, or completions into this number of slots."""
    idle = self.sizes.idle(slots)
    into = self.sizes.entries if part == PROMPTS else slots
    kind = ("prefill",) if part == PROMPTS else ("resume", slots)
    state = functools.partial(self._state, slots, tracked)
    for width in self.sizes.widths[part][::-1]:
      [rows] = self.sizes.row_counts(idle, part, width)

      def arguments(width: int = width, rows: int = rows) -> tuple[Any, ...]:
        before = state()
        batch = empty_batch(self, idle, part, width, rows, into)
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
    for slots in self.sizes.slot_counts:

      def arguments(slots: int = slots) -> tuple[Any, ...]:
        limits = chunk_limits(self, self.chunk, 1, sampling_params)
        state = self._state(slots, sampling_params.penalises_repetition)
        return *state, self.sizes.idle(slots).inputs(), limits

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
    pages = self.shards * self.sizes.pool.pages
    kv = abstract(self.model, lambda: self.cache.zeros(pages), "batch", head_axis(self.model))
    states = lambda rows: abstract_states(self.model, self.shards * rows, tracked)
    return SamplerState(kv, states(self.sizes.entries), states(slots))
