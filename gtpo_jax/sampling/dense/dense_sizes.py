"""The lengths and numbers of the arrays of a dense cache, and what fits in the memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from gtpo_jax.arrays import array_lengths
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part
from gtpo_jax.sampling.dense.cache import DenseCache
from gtpo_jax.sampling.dense.state_shapes import StateShapes
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.prefill.batches import row_counts, rows_at_once, sequence_lengths
from gtpo_jax.sampling.programs import CacheSizes, ProgramSettings, state_bytes
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import Capacity, capacity_for
from gtpo_jax.sampling.settings import Demand

# The number of slots is divided by this as soon as the active completions fit. Every number of
# slots needs a compiled program, so a large factor keeps the programs few. On GPUs, where each
# compiles for a minute, prompts also have one length, and slots the longest length or a quarter.
CPU_SHRINK_FACTOR = 4
GPU_SHRINK_FACTOR = 16
# A server prefills so many prompts at once, or one, and has so many slots, or one, or all.
SERVING_ROWS = 8
# With as many positions of prompts in the cache, it pays that a CPU reads no more than it must.
LONG_PROMPTS = 8192


class DenseSizes(CacheSizes):
  """The sizes of a dense cache; see `CacheSizes`.

  Attributes:
    cache_lengths: lengths of the slots' arrays, ascending.
    prompt_widths: lengths of the prompts' arrays, ascending. A server reads prompts in more widths,
      because every program that decodes depends on these.
    on_cpu: whether the devices are CPUs.
    slots: the most slots over all shards.
    shrink_factor: what the number of slots is divided by when idle ones are dropped.
    least_slots: of each shard.
    memory: bytes of a device.
  """

  def __init__(self, settings: ProgramSettings, cache: DenseCache):
    """Chooses the sizes.

    Args:
      settings: what the programs are made for, resolved for the platform.
      cache: the device functions of the cache.
    """
    super().__init__(settings, cache.model)
    config = self.model.config
    longest_prompt = min(settings.max_prompt_tokens, config.max_length)
    widths, lengths = array_lengths(longest_prompt), array_lengths(settings.max_tokens)
    prefill_widths = widths
    on_cpu = self.model.mesh.devices.flat[0].platform == "cpu"
    self.on_cpu = on_cpu
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
    self.memory = DeviceMemory(cache, self.memory_left)
    self.prompt_widths = widths
    sequences = sequence_lengths(min(longest_prompt + settings.max_tokens, config.max_length))
    self.widths = {PROMPTS: prefill_widths, SLOTS: sequences if on_cpu else sequences[-1:]}
    # Each has space for one more chunk.
    self.cache_lengths = sorted({size + self.chunk for size in lengths})
    self.slots = self._fitting_slots(settings.demand)
    self.longest_at_once = self.slots
    self._slots_of_shard = max(self.slots // self.shards, 1)
    self.least_slots = 1
    if self._one_shape:
      self.least_slots = self._slots_of_shard
    elif self._serves and on_cpu and config.compute_dtype == "bfloat16":
      # A CPU takes three times as long for one row as for eight.
      self.least_slots = min(SERVING_ROWS, self._slots_of_shard)
    self.config = dataclasses.replace(self.config, slots=self.slots)

  def _fitting_slots(self, demand: Demand) -> int:
    """Returns the most slots over all shards, a power of two below the config's if memory is short.

    The arrays of the longest prompts and completions must fit beside the parameters, and so must
    the arrays that they replace when they grow to that length, which are half as long.
    """
    slots = self.most_slots
    if demand.serves:  # see `hold`
      return slots
    while slots > self.shards:
      prompts = -(-(demand.completions or slots) // demand.group)
      capacity = capacity_for(prompts, demand.group, self.shards, slots)
      positions = capacity.entries * self.prompt_widths[-1]
      positions += capacity.slots * self.cache_lengths[-1]
      if self.memory.holds(capacity.entries + capacity.slots, positions):
        return slots
      slots = slots // (2 * self.shards) * self.shards
    return max(slots, self.shards)

  def hold(self, lengths: Sequence[tuple[int, int]]) -> bool:
    """Whether the memory holds arrays of the longest lengths in the slots for so many."""
    prompts, limits = zip(*lengths, strict=True)
    slots = self.slots_for(len(lengths))
    width = first_from(self.prompt_widths, max(prompts))
    length = first_from(self.cache_lengths, max(limits) + self.chunk)
    return self.memory.holds(2 * slots, slots * (width + length))

  def slots_for(self, completions: int) -> int:
    """Returns the slots of each shard for so many completions over all shards of a server."""
    needed = max(-(-completions // self.shards), self.least_slots)
    counts = (self.least_slots, SERVING_ROWS)
    return next((x for x in counts if needed <= x < self._slots_of_shard), self._slots_of_shard)

  def describe(self) -> str:
    """Returns how much the cache of a device holds."""
    text = f"arrays for up to {self.slots // self.shards} completions per device"
    if self.slots == self.most_slots:
      return text
    return f"{text} (there is no memory for {self.most_slots // self.shards})"

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    capacity = self.capacity(prompts, group)
    fewest = self.entry_counts(capacity)[0]
    return Scheduler(capacity._replace(entries=fewest), DenseSpace(capacity))

  def serving_scheduler(self) -> Scheduler:
    """Returns an empty schedule that has one slot per shard at first; see `Programs.fit`."""
    return self.scheduler(1, 1)

  def capacity(self, prompts: int, group: int) -> Capacity:
    """Returns the most slots and entries for `prompts` x `group` completions."""
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
    can_grow = self.on_cpu and not self._one_shape
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
    return row_counts(width, most)[: None if self.on_cpu else 1]


class DeviceMemory:
  """Says what fits in the memory of a device beside the parameters."""

  def __init__(self, cache: DenseCache, limit: int | None):
    """Args:
    cache: the device functions of the cache.
    limit: bytes beside the parameters; None if unlimited.
    """
    self._cache = cache
    self._limit = limit

  def holds(self, rows: int, positions: int) -> bool:
    """Whether the memory holds so many of a shard, and half of the positions again."""
    if self._limit is None:
      return True
    of_row, of_position = self._bytes
    return of_row * rows + 1.5 * of_position * positions <= self._limit

  @functools.cached_property
  def _bytes(self) -> tuple[int, int]:
    """The bytes on a device of a row's states, and of the keys and values of a position.

    A server asks before each chunk, and shapes take long to evaluate.
    """
    model = self._cache.model
    position = StateShapes(self._cache, track_tokens=False).kv(1, 1)
    return state_bytes(model), bytes_per_device(position)


def with_midpoints(lengths: list[int]) -> list[int]:
  """Returns ascending lengths with the middle of every two neighbours, so that less is padded."""
  shortest = lengths[0] - lengths[0] // 4
  middles = [(a + b) // 2 for a, b in itertools.pairwise(lengths)]
  return sorted({shortest, *lengths, *middles})


def first_from(lengths: Sequence[int], least: int) -> int:
  """Returns the first of ascending lengths that is at least `least`."""
  return next(length for length in lengths if length >= least)
