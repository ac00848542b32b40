"""The programs of an engine with a dense cache.

Their shapes follow the longest prompt, the longest running completion and the number of slots in
use, so that a CPU computes little more than it has to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part, States
from gtpo_jax.sampling.chunk import insert_rows, prefill_rows
from gtpo_jax.sampling.dense.cache import DenseCache, DenseKV
from gtpo_jax.sampling.dense.dense_sizes import DenseSizes, first_from
from gtpo_jax.sampling.dense.inventory import Inventory
from gtpo_jax.sampling.dense.resizing import add_entries, compact, grow, refit
from gtpo_jax.sampling.dense.state_shapes import StateShapes
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.prefill.batches import PrefillBatch
from gtpo_jax.sampling.programs import Programs, ProgramSettings, SamplerState, stoppable
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.settings import SamplingParams


class DensePrograms(Programs):
  """The programs of an engine with a dense cache; see `Programs`.

  Attributes:
    prefill, insert: `prefill_rows`, and `insert_rows` for each part. They are programs of their
      own, so that the larger one does not depend on the shapes of the cache.
    init_kv: `DenseCache.zeros`.
    grow, compact, refit, add_entries: see `resizing.py`.
  """

  cache: DenseCache
  sizes: DenseSizes
  copies_prompts = True

  def __init__(self, settings: ProgramSettings, model: Transformer):
    """Prepares the programs; see `CacheSizes` for the arguments."""
    cache = DenseCache(model, settings.config.kv_dtype)
    super().__init__(settings, cache, DenseSizes(settings, cache))
    self.static_temperature = self.sizes.on_cpu
    self.init_kv = jax.jit(cache.zeros, static_argnums=(0, 1))
    self.prefill = stoppable(functools.partial(prefill_rows, model))
    inserts = {PROMPTS: cache.insert, SLOTS: cache.insert_completions}
    self.insert = {
      part: jax.jit(functools.partial(insert_rows, model, insert), donate_argnums=(0, 1))
      for part, insert in inserts.items()
    }
    self.read = {part: functools.partial(self._read_rows, part) for part in inserts}
    self.grow = jax.jit(functools.partial(grow, model), static_argnums=1)
    self.add_entries = jax.jit(functools.partial(add_entries, model), static_argnums=2)
    self.compact = jax.jit(functools.partial(compact, model))
    self.refit = jax.jit(functools.partial(refit, model), static_argnums=(2, 3))

  def places_in_cache(
    self, scheduler: Scheduler, part: Part, batch: PrefillBatch, source: np.ndarray
  ) -> np.ndarray:
    """Returns `source`: an entry and a slot are their own places."""
    return source

  def _read_rows(
    self,
    part: Part,
    params: DecodeParams,
    kv: list[KV],
    states: States,
    tokens: Prompts,
    source: np.ndarray,
    places: Any,
  ) -> tuple[list[KV], States, jax.Array | None]:
    """Does what `read_rows` does, by two programs."""
    new = self.prefill(params, tokens)
    routes = new.routes
    insert = self.insert[part]
    return *insert(kv, states, new._replace(routes=None), tokens, source, places), routes

  def new_state(
    self, scheduler: Scheduler, longest_prompt: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty cache for prompts of up to `longest_prompt` tokens, and short slots."""
    capacity = scheduler.capacity
    entries = self.shards * capacity.entries
    slots = self.shards * capacity.slots
    track_tokens = sampling_params.penalises_repetition
    return SamplerState(
      DenseKV(
        self.init_kv(entries, first_from(self.sizes.prompt_widths, longest_prompt)),
        self.init_kv(slots, self.sizes.cache_lengths[0]),
      ),
      self.init_states(entries, track_tokens),
      self.init_states(slots, track_tokens),
    )

  def with_more_entries(self, state: SamplerState, scheduler: Scheduler) -> SamplerState:
    """Returns the state with the most entries; see `Programs`."""
    most = scheduler.space.capacity.entries
    if not scheduler.lacks_entries or scheduler.capacity.entries == most:
      return state
    scheduler.add_entries(most)
    kv, states = self.add_entries(state.kv.prompts, state.prompts, most)
    return state._replace(kv=state.kv._replace(prompts=kv), prompts=states)

  def resize(
    self, state: SamplerState, scheduler: Scheduler, keep_slots: bool = False
  ) -> SamplerState:
    """Grows the slots' arrays for the next chunk, and drops idle slots; see `Programs`."""
    lengths = self.sizes.cache_lengths
    needed = int(scheduler.slots.generated.max()) + self.chunk
    while (length := _length(state.kv.slots)) < needed:
      longer = lengths[lengths.index(length) + 1]
      state = _with_slots(state, self.grow(state.kv.slots, longer))
    if keep_slots or scheduler.has_waiting:
      return state
    active = int(scheduler.slots.active.reshape(self.shards, -1).sum(1).max())
    while True:
      fewer = scheduler.capacity.slots // self.sizes.shrink_factor
      if fewer < max(active, self.sizes.least_slots):
        return state
      order = scheduler.shrink(fewer)
      state = _with_slots(state, self.compact(state.kv.slots, order))
      state = state._replace(slots=self.keep_rows(state.slots, order))

  def fit(
    self, state: SamplerState, scheduler: Scheduler, completions: Sequence[int], longest_prompt: int
  ) -> SamplerState:
    """Fits slots, entries and the arrays' lengths to what runs; see `Programs`."""
    sizes = self.sizes
    slots = scheduler.slots
    most = self.shards * int(slots.active.reshape(self.shards, -1).sum(1).max())
    width = first_from(sizes.prompt_widths, longest_prompt)
    length = first_from(sizes.cache_lengths, int(slots.generated.max()) + self.chunk)
    count = sizes.slots_for(max(*completions, most))
    if not sizes.memory.holds(2 * count, count * (width + length)):
      count = sizes.slots_for(max(completions[-1], most))
    kv = state.kv
    if (count, width, length) == (scheduler.capacity.slots, _length(kv.prompts), _length(kv.slots)):
      return state
    slot_order, entry_order = scheduler.refit(count)
    scheduler.space.capacity = scheduler.capacity
    return SamplerState(
      DenseKV(
        self.refit(kv.prompts, entry_order, width, True),
        self.refit(kv.slots, slot_order, length, False),
      ),
      self.keep_rows(state.prompts, entry_order),
      self.keep_rows(state.slots, slot_order),
    )

  def inventory(self, workload: Workload) -> Iterator[Program]:
    """Returns every program that a workload can reach, the largest of each kind first."""
    return Inventory(self, workload).programs()

  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the largest state of a workload."""
    sizes = self.sizes
    most = sizes.capacity(workload.prompts, workload.group)
    shapes = StateShapes(self.cache, workload.sampling_params.penalises_repetition)
    return shapes.all(most.entries, sizes.prompt_widths[-1], most.slots, sizes.cache_lengths[-1])


def _length(kv: list[KV]) -> int:
  """Returns the positions per row."""
  return kv[0].v.shape[3]


def _with_slots(state: SamplerState, slots: list[KV]) -> SamplerState:
  return state._replace(kv=state.kv._replace(slots=slots))
