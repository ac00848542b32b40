"""The programs of an engine with a dense cache.

Their shapes follow the longest prompt, the longest running completion and the number of slots in
use, so that a CPU computes little more than it has to.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from gtpo_jax.arrays import array_lengths
from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.decode import decode_bytes
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.sampling.batches import Places
from gtpo_jax.sampling.cache import head_axis
from gtpo_jax.sampling.dense.cache import DenseCache, DenseKV
from gtpo_jax.sampling.dense.inventory import Inventory
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.programs import Programs, ProgramSettings, SamplerState, abstract
from gtpo_jax.sampling.scheduler import Scheduler, capacity_for
from gtpo_jax.sampling.settings import Demand, SamplingParams

# The number of slots is divided by this as soon as the active completions fit. Every number of
# slots needs a compiled program, so a large factor keeps the programs few. On GPUs, where each
# compiles for a minute, prompts also have one length, and slots the longest length or a quarter.
CPU_SHRINK_FACTOR = 4
GPU_SHRINK_FACTOR = 16


class DensePrograms(Programs):
  """The programs of an engine with a dense cache; see `Programs`.

  Attributes:
    cache_lengths: lengths of the slots' arrays, ascending.
    slots: the most slots over all shards.
    shrink_factor: what the number of slots is divided by when idle ones are dropped.
    init_kv, grow, compact: `DenseCache.zeros`, `grow` and `compact`.
  """

  cache: DenseCache
  # An entry and a slot are their own places.
  places = Places(
    lambda space, assigned, rows, width: rows, lambda space, assigned, rows, width: rows
  )

  def __init__(self, settings: ProgramSettings):
    """Prepares the programs."""
    model = settings.model
    cache = DenseCache(model, settings.config.kv_dtype)
    super().__init__(settings, cache)
    longest_prompt = min(settings.max_prompt_tokens, model.config.max_length)
    widths, lengths = array_lengths(longest_prompt), array_lengths(settings.max_tokens)
    on_cpu = model.mesh.devices.flat[0].platform == "cpu"
    self.static_temperature = on_cpu
    self.shrink_factor = CPU_SHRINK_FACTOR if on_cpu else GPU_SHRINK_FACTOR
    if not on_cpu:
      widths, lengths = widths[-1:], lengths[-3::2]
    self.prompt_widths = widths
    sequences = array_lengths(min(longest_prompt + settings.max_tokens, model.config.max_length))
    self.sequence_widths = sequences[::-2][::-1] if on_cpu else sequences[-1:]
    # Each has space for one more chunk.
    self.cache_lengths = sorted({size + self.chunk for size in lengths})
    self.slots = self._fitting_slots(settings.demand)
    self.init_kv = jax.jit(cache.zeros, static_argnums=(0, 1))
    self.grow = jax.jit(cache.grow, static_argnums=1)
    self.compact = jax.jit(cache.compact)

  def _fitting_slots(self, demand: Demand) -> int:
    """Returns the most slots over all shards, a power of two below the config's if memory is short.

    The arrays of the longest prompts and completions must fit beside the parameters, and so must
    those that they replace when they grow to that length, which are half as long.
    """
    slots = self.config.slots
    if demand.memory is None:
      return slots
    left = demand.memory - decode_bytes(self.model)
    while slots > self.shards and self._kv_bytes(slots, demand) > left:
      slots = slots // (2 * self.shards) * self.shards
    return max(slots, self.shards)

  def _kv_bytes(self, slots: int, demand: Demand) -> float:
    """Returns the most bytes on one device of keys and values in this many slots."""
    group = demand.group
    prompts = -(-(demand.completions or slots) // group)
    capacity = capacity_for(prompts, group, self.shards, slots)
    position = bytes_per_device(self.abstract_kv(self.shards, 1))
    prompt_positions = capacity.entries * self.prompt_widths[-1]
    return position * (prompt_positions + 1.5 * capacity.slots * self.cache_lengths[-1])

  def abstract_kv(self, rows: int, positions: int) -> list[KV]:
    """Returns the shapes and shardings of `rows` rows over all shards."""
    zeros = lambda: self.cache.zeros(rows, positions)
    return abstract(self.model, zeros, "batch", None, head_axis(self.model))

  def describe_space(self) -> str:
    """Returns how much the cache of a device holds."""
    text = f"arrays for up to {self.slots // self.shards} completions per device"
    if self.slots == self.config.slots:
      return text
    return f"{text} (memory for {self.config.slots // self.shards} is not there)"

  @property
  def longest_at_once(self) -> int:
    """How many completions of the maximum length run at once, over all shards."""
    return self.slots

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    capacity = capacity_for(prompts, group, self.shards, self.slots)
    return Scheduler(capacity, DenseSpace(capacity))

  def new_state(
    self, scheduler: Scheduler, width: int, sampling_params: SamplingParams
  ) -> SamplerState:
    """Returns an empty cache for prompts of up to `width` tokens, with the shortest slots."""
    capacity = scheduler.capacity
    entries = self.shards * capacity.entries
    slots = self.shards * capacity.slots
    track_tokens = sampling_params.penalises_repetition
    return SamplerState(
      DenseKV(self.init_kv(entries, width), self.init_kv(slots, self.cache_lengths[0])),
      self.init_states(entries, track_tokens),
      self.init_states(slots, track_tokens),
    )

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
    while self.shrink_factor * active <= scheduler.capacity.slots:
      order = scheduler.shrink(scheduler.capacity.slots // self.shrink_factor)
      state = _with_slots(state, self.compact(state.kv.slots, order))
      state = state._replace(slots=self.keep_rows(state.slots, order))
    return state

  def inventory(self, workload: Workload) -> Iterator[Program]:
    """Returns every program that a workload can reach, the largest of each kind first."""
    capacity = capacity_for(workload.prompts, workload.group, self.shards, self.slots)
    return Inventory(self, workload, capacity).programs()

  def abstract_state(self, workload: Workload) -> SamplerState:
    """Returns the shapes and shardings of the largest state of a workload."""
    capacity = capacity_for(workload.prompts, workload.group, self.shards, self.slots)
    shapes = Inventory(self, workload, capacity)
    return shapes.state(self.prompt_widths[-1], capacity.slots, self.cache_lengths[-1])


def _length(kv: list[KV]) -> int:
  """Returns the positions per row."""
  return kv[0].v.shape[3]


def _with_slots(state: SamplerState, slots: list[KV]) -> SamplerState:
  return state._replace(kv=state.kv._replace(slots=slots))
