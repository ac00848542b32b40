"""The programs of an engine with a dense cache.

Their shapes follow the longest prompt, the longest running completion and the number of slots in
use, so that a CPU computes little more than it has to.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.arrays import Prompts, array_lengths
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.decode import DecodeParams, decode_bytes
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.batches import (
  Assigned,
  Copies,
  PrefillBatch,
  RoutesRead,
  TokenIds,
  row_counts,
  rows_at_once,
  sequence_lengths,
  without_copies,
)
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part, States
from gtpo_jax.sampling.chunk import insert_rows, prefill_rows
from gtpo_jax.sampling.dense.cache import DenseCache, DenseKV
from gtpo_jax.sampling.dense.inventory import Inventory
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.programs import (
  Programs,
  ProgramSettings,
  SamplerState,
  state_bytes,
  stoppable,
)
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import Capacity, capacity_for
from gtpo_jax.sampling.settings import Demand, SamplingParams

# The number of slots is divided by this as soon as the active completions fit. Every number of
# slots needs a compiled program, so a large factor keeps the programs few. On GPUs, where each
# compiles for a minute, prompts also have one length, and slots the longest length or a quarter.
CPU_SHRINK_FACTOR = 4
GPU_SHRINK_FACTOR = 16
# A server prefills so many prompts at once, or one, and has so many slots, or one, or all.
SERVING_ROWS = 8
# With as many positions of prompts in the cache, it pays that a CPU reads no more than it must.
LONG_PROMPTS = 8192


class DensePrograms(Programs):
  """The programs of an engine with a dense cache; see `Programs`.

  Attributes:
    cache_lengths: lengths of the slots' arrays, ascending.
    prompt_widths: lengths of the prompts' arrays, ascending. A server reads prompts in more widths,
      because every program that decodes depends on these.
    slots: the most slots over all shards.
    shrink_factor: what the number of slots is divided by when idle ones are dropped.
    least_slots: of each shard.
    prefill, insert: `prefill_rows`, and `insert_rows` for each part. They are programs of their
      own, so that the larger one does not depend on the shapes of the cache.
    init_kv, grow, compact, add_entries: `DenseCache.zeros`, `grow`, `compact` and `add_entries`.
  """

  cache: DenseCache

  def __init__(self, settings: ProgramSettings):
    """Prepares the programs."""
    model = settings.model
    cache = DenseCache(model, settings.config.kv_dtype)
    super().__init__(settings, cache)
    longest_prompt = min(settings.max_prompt_tokens, model.config.max_length)
    widths, lengths = array_lengths(longest_prompt), array_lengths(settings.max_tokens)
    prefill_widths = widths
    on_cpu = model.mesh.devices.flat[0].platform == "cpu"
    self.static_temperature = on_cpu
    self._on_cpu = on_cpu
    self.shrink_factor = CPU_SHRINK_FACTOR if on_cpu else GPU_SHRINK_FACTOR
    if not on_cpu:
      widths, lengths = widths[-1:], lengths[-3::2]
      prefill_widths = widths
    elif settings.demand.serves:
      prefill_widths = with_midpoints(widths)
      widths, lengths = (sorted({*sizes[::2], sizes[-1]}) for sizes in (widths, lengths))
    # Programs of other shapes round otherwise.
    self._one_shape = settings.config.batch_invariant
    if self._one_shape:
      widths, lengths = widths[-1:], lengths[-1:]
    self._serves = settings.demand.serves
    self._memory = settings.demand.memory
    self.prompt_widths = widths
    sequences = sequence_lengths(min(longest_prompt + settings.max_tokens, model.config.max_length))
    self.widths = {PROMPTS: prefill_widths, SLOTS: sequences if on_cpu else sequences[-1:]}
    # Each has space for one more chunk.
    self.cache_lengths = sorted({size + self.chunk for size in lengths})
    self.slots = self._fitting_slots(settings.demand)
    self.least_slots = 1
    if self._one_shape:
      self.least_slots = self._slots_of_shard
    elif self._serves and on_cpu and model.config.compute_dtype == "bfloat16":
      # A CPU takes three times as long for one row as for eight.
      self.least_slots = min(SERVING_ROWS, self._slots_of_shard)
    self.config = dataclasses.replace(self.config, slots=self.slots)
    self.init_kv = jax.jit(cache.zeros, static_argnums=(0, 1))
    self.prefill = stoppable(functools.partial(prefill_rows, model))
    inserts = {PROMPTS: cache.insert, SLOTS: cache.insert_completions}
    self.insert = {
      part: jax.jit(functools.partial(insert_rows, model, insert), donate_argnums=(0, 1))
      for part, insert in inserts.items()
    }
    self.read = {part: functools.partial(self._read_rows, part) for part in inserts}
    self.grow = jax.jit(cache.grow, static_argnums=1)
    self.add_entries = jax.jit(cache.add_entries, static_argnums=2)
    self.compact = jax.jit(cache.compact)
    self.refit = jax.jit(cache.refit, static_argnums=(2, 3))

  def _fitting_slots(self, demand: Demand) -> int:
    """Returns the most slots over all shards, a power of two below the config's if memory is short.

    The arrays of the longest prompts and completions must fit beside the parameters, and so must
    those that they replace when they grow to that length, which are half as long.
    """
    slots = self.most_slots
    if demand.serves:  # see `hold`
      return slots
    while slots > self.shards and not self._fit(*self._needed(slots, demand)):
      slots = slots // (2 * self.shards) * self.shards
    return max(slots, self.shards)

  def _needed(self, slots: int, demand: Demand) -> tuple[int, int]:
    """Returns the most rows and positions of a shard with this many slots over all shards."""
    group = demand.group
    prompts = -(-(demand.completions or slots) // group)
    capacity = capacity_for(prompts, group, self.shards, slots)
    rows = capacity.entries + capacity.slots
    positions = capacity.entries * self.prompt_widths[-1]
    return rows, positions + capacity.slots * self.cache_lengths[-1]

  def _fit(self, rows: int, positions: int) -> bool:
    """Whether the memory holds so many of a shard, and half of the positions again."""
    if self._memory is None:
      return True
    of_row, of_position, params = self._bytes
    return params + of_row * rows + 1.5 * of_position * positions <= self._memory

  @functools.cached_property
  def _bytes(self) -> tuple[int, int, int]:
    """The bytes on a device of a row's states, of the keys and values of a position, and of the
    parameters. A server asks before each chunk, and shapes take long to evaluate.
    """
    position = self.abstract_kv(lambda: self.cache.zeros(self.shards, 1))
    return state_bytes(self.model), bytes_per_device(position), decode_bytes(self.model)

  @property
  def _slots_of_shard(self) -> int:
    return max(self.slots // self.shards, 1)

  def hold(self, lengths: Sequence[tuple[int, int]]) -> bool:
    """Whether the memory holds arrays of the longest lengths in the slots for so many."""
    prompts, limits = zip(*lengths, strict=True)
    slots = self._count(len(lengths))
    width = self._prompt_width(max(prompts))
    return self._fit(2 * slots, slots * (width + self._slot_length(max(limits))))

  def _count(self, completions: int) -> int:
    """Returns the slots of each shard for so many completions over all shards of a server."""
    needed = max(-(-completions // self.shards), self.least_slots)
    counts = (self.least_slots, SERVING_ROWS)
    return next((x for x in counts if needed <= x < self._slots_of_shard), self._slots_of_shard)

  def _prompt_width(self, longest: int) -> int:
    """Returns the length of the arrays for prompts of up to `longest` tokens."""
    return next(size for size in self.prompt_widths if size >= longest)

  def _slot_length(self, tokens: int) -> int:
    """Returns the length of the slots' arrays in which a chunk can follow so many tokens."""
    return next(x for x in self.cache_lengths if x >= tokens + self.chunk)

  def describe_space(self) -> str:
    """Returns how much the cache of a device holds."""
    text = f"arrays for up to {self.slots // self.shards} completions per device"
    if self.slots == self.most_slots:
      return text
    return f"{text} (there is no memory for {self.most_slots // self.shards})"

  @property
  def longest_at_once(self) -> int:
    """How many completions of the maximum length run at once, over all shards."""
    return self.slots

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    capacity = self._capacity(prompts, group)
    fewest = self.entry_counts(capacity)[0]
    return Scheduler(capacity._replace(entries=fewest), DenseSpace(capacity))

  def _capacity(self, prompts: int, group: int) -> Capacity:
    if self._one_shape:
      slots = self.least_slots
      return Capacity(self.shards, slots, slots, min(group, slots))
    return capacity_for(prompts, group, self.shards, self.slots)

  def entry_counts(self, capacity: Capacity) -> list[int]:
    """Returns the numbers of entries per shard, ascending. Those of `capacity` are the most.

    A decode step reads the prompts of all entries. If these are long, there are at first only half
    as many again as full groups need, until slots stay idle because slow completions keep their
    entries.
    """
    most = capacity.entries
    full_groups = -(-capacity.slots // capacity.slots_per_entry)
    few = full_groups + -(-full_groups // 2)
    long = most * self.prompt_widths[-1] >= LONG_PROMPTS
    can_grow = self._on_cpu and not self._one_shape
    return [few, most] if can_grow and long and 2 * few <= most else [most]

  def row_counts(self, scheduler: Scheduler, part: Part, width: int) -> list[int]:
    """Returns the numbers of rows per shard, descending, that a batch of a width may have."""
    if self._one_shape:
      return [1]
    # There may be fewer entries at first, see `entry_counts`.
    is_prompts = part == PROMPTS
    most = scheduler.space.capacity.entries if is_prompts else scheduler.capacity.slots
    if self._serves:
      return sorted({min(SERVING_ROWS, rows_at_once(width, most)), 1}, reverse=True)
    return row_counts(width, most)[: None if self._on_cpu else 1]

  def places_in_cache(
    self, scheduler: Scheduler, part: Part, batch: PrefillBatch, source: np.ndarray
  ) -> np.ndarray:
    """Returns `source`: an entry and a slot are their own places."""
    return source

  def without_copies(self, assigned: Assigned, prompts: TokenIds) -> tuple[Assigned, Copies]:
    """Returns different prompts, and the entries that get the same ones; see `Programs`."""
    return without_copies(assigned, prompts)

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
        self.init_kv(entries, self._prompt_width(longest_prompt)),
        self.init_kv(slots, self.cache_lengths[0]),
      ),
      self.init_states(entries, track_tokens),
      self.init_states(slots, track_tokens),
    )

  def prefill_assigned(
    self, params: DecodeParams, state: SamplerState, scheduler: Scheduler, prompts: TokenIds
  ) -> tuple[SamplerState, list[RoutesRead]]:
    """Fills free slots; see `Programs`. If some stay idle for lack of entries, these are added."""
    state, read = super().prefill_assigned(params, state, scheduler, prompts)
    most = scheduler.space.capacity.entries
    if not scheduler.lacks_entries or scheduler.capacity.entries == most:
      return state, read
    scheduler.add_entries(most)
    kv, states = self.add_entries(state.kv.prompts, state.prompts, most)
    state = state._replace(kv=state.kv._replace(prompts=kv), prompts=states)
    state, more = super().prefill_assigned(params, state, scheduler, prompts)
    return state, [*read, *more]

  def resize(
    self, state: SamplerState, scheduler: Scheduler, keep_slots: bool = False
  ) -> SamplerState:
    """Grows the slots' arrays for the next chunk, and drops idle slots; see `Programs`."""
    needed = int(scheduler.slots.generated.max()) + self.chunk
    while (length := _length(state.kv.slots)) < needed:
      longer = self.cache_lengths[self.cache_lengths.index(length) + 1]
      state = _with_slots(state, self.grow(state.kv.slots, longer))
    if keep_slots or scheduler.has_waiting:
      return state
    active = int(scheduler.slots.active.reshape(self.shards, -1).sum(1).max())
    while True:
      fewer = scheduler.capacity.slots // self.shrink_factor
      if fewer < max(active, self.least_slots):
        return state
      order = scheduler.shrink(fewer)
      state = _with_slots(state, self.compact(state.kv.slots, order))
      state = state._replace(slots=self.keep_rows(state.slots, order))

  def serving_scheduler(self) -> Scheduler:
    """Returns an empty schedule that has one slot per shard at first; see `fit`."""
    return self.scheduler(1, 1)

  def fit(
    self, state: SamplerState, scheduler: Scheduler, completions: Sequence[int], longest_prompt: int
  ) -> SamplerState:
    """Fits slots, entries and the arrays' lengths to what runs; see `Programs`."""
    slots = scheduler.slots
    most = self.shards * int(slots.active.reshape(self.shards, -1).sum(1).max())
    width = self._prompt_width(longest_prompt)
    length = self._slot_length(int(slots.generated.max()))
    count = self._count(max(*completions, most))
    if not self._fit(2 * count, count * (width + length)):
      count = self._count(max(completions[-1], most))
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
    capacity = self._capacity(workload.prompts, workload.group)
    return Inventory(self, workload, capacity).programs()

  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the largest state of a workload."""
    capacity = self._capacity(workload.prompts, workload.group)
    shapes = Inventory(self, workload, capacity)
    return shapes.state(self.prompt_widths[-1], capacity.slots, self.cache_lengths[-1])


def with_midpoints(lengths: list[int]) -> list[int]:
  """Returns ascending lengths with the middle of every two neighbours, so that less is padded."""
  shortest = lengths[0] - lengths[0] // 4
  middles = [(a + b) // 2 for a, b in itertools.pairwise(lengths)]
  return sorted({shortest, *lengths, *middles})


def _length(kv: list[KV]) -> int:
  """Returns the positions per row."""
  return kv[0].v.shape[3]


def _with_slots(state: SamplerState, slots: list[KV]) -> SamplerState:
  return state._replace(kv=state.kv._replace(slots=slots))
