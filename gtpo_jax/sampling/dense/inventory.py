"""Every program that a workload can reach with a dense cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gtpo_jax.models.decode import Prefilled
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part, computed_zeros
from gtpo_jax.sampling.dense.state_shapes import StateShapes, abstract_kv
from gtpo_jax.sampling.dense.tables import DenseSpace
from gtpo_jax.sampling.inventory import Program, Workload
from gtpo_jax.sampling.prefill.batches import PrefillBatch, nothing
from gtpo_jax.sampling.prefill.reading import empty_batch
from gtpo_jax.sampling.programs import chunk_limits, compiled_for, keys_program
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import Capacity


class Inventory:
  """Lists the programs, from the widths of prompts, the numbers of slots and their lengths."""

  def __init__(self, owner: Any, workload: Workload):
    """Args:
    owner: the `DensePrograms`, with the jitted functions and the sizes.
    workload: what is sampled.
    """
    sizes = owner.sizes
    capacity = sizes.capacity(workload.prompts, workload.group)
    self._owner = owner
    self._workload = workload
    self._capacity = capacity
    self._tracked = workload.sampling_params.penalises_repetition
    self._shapes = StateShapes(owner.cache, self._tracked)
    self._widths = sizes.prompt_widths[::-1]
    self._counts = slot_counts(capacity.slots, sizes.shrink_factor, sizes.least_slots)
    self._lengths = sizes.cache_lengths[::-1]
    self._entries = sizes.entry_counts(capacity)[::-1]
    self._largest = functools.partial(
      self._shapes.all, self._entries[0], self._widths[0], capacity.slots, self._lengths[0]
    )

  def programs(self) -> Iterator[Program]:
    """Returns all programs, the largest of each kind first."""
    yield keys_program(self._owner)
    yield from self._allocations()
    yield from self._resumptions()
    yield from self._prefills()
    yield from self._decodes()
    yield from self._changes()

  def _allocations(self) -> Iterator[Program]:
    owner = self._owner
    entries = self._entries[-1]
    slots = self._capacity.slots
    for rows in (entries, slots):
      arguments = (owner.shards * rows, self._tracked)
      signature = ("allocate", "states", rows, self._tracked)
      yield Program(signature, owner.init_states, lambda arguments=arguments: arguments)
    shapes = [(entries, width) for width in self._widths]
    for rows, positions in [*shapes, (slots, self._lengths[-1])]:
      arguments = (owner.shards * rows, positions)
      signature = ("allocate", rows, positions)
      yield Program(signature, owner.init_kv, lambda arguments=arguments: arguments)

  def _prefills(self) -> Iterator[Program]:
    owner = self._owner
    most = self._entries[0]
    slots = self._capacity.slots
    # Prompts that do not fit at once are prefilled when the slots may have grown.
    all_at_once = self._workload.prompts <= owner.shards * most
    length = self._lengths[-1 if all_at_once else 0]
    beside = lambda: self._shapes.all(most, self._widths[0], slots, length)
    batches = list(self._batches(PROMPTS, slots))
    for width, rows in batches:
      yield self._prefill(width, rows, beside)
    for entries in self._entries:
      for cached in self._widths:
        for width, rows in batches:
          if width <= cached:
            yield self._insertion(PROMPTS, entries, cached, width, rows)

  def _batches(self, part: Part, slots: int) -> Iterator[tuple[int, int]]:
    """Returns the (width, rows per shard) of all batches, with this number of slots per shard."""
    owner = self._owner
    idle = _idle(self._capacity, slots)
    for width in owner.sizes.widths[part][::-1]:
      for rows in owner.sizes.row_counts(idle, part, width):
        yield width, rows

  def _prefill(self, width: int, rows: int, beside: Callable[[], Any]) -> Program:
    """Returns the program that computes batches of a width with `rows` rows per shard."""
    owner = self._owner
    tokens = PrefillBatch(width, rows, nothing(owner.shards)).tokens({}, owner.pad)
    signature = ("prefill", width, rows)
    return Program(signature, owner.prefill, lambda: (tokens,), reads_params=True, beside=beside)

  def _insertion(self, part: Part, into: int, cached: int, width: int, rows: int) -> Program:
    """Returns the program that writes a batch into the cache.

    Args:
      part: what is written.
      into: entries or slots per shard.
      cached: positions of each in the cache.
      width: positions of the batch.
      rows: rows of the batch per shard.
    """
    owner = self._owner

    def arguments() -> tuple:
      slots = self._capacity.slots if part == PROMPTS else into
      batch = empty_batch(owner, _idle(self._capacity, slots), part, width, rows, into)
      states = self._shapes.states(rows)
      zeros = lambda: computed_zeros(owner.model, owner.shards * rows, width)
      new = Prefilled(states.hidden, abstract_kv(owner.model, zeros), states.delta, None)
      return self._shapes.kv(into, cached), self._shapes.states(into), new, *batch

    signature = ("insert", part, into, cached, width, rows, self._tracked)
    return Program(signature, owner.insert[part], arguments)

  def _decodes(self) -> Iterator[Program]:
    owner = self._owner
    capacity = self._capacity
    sampling_params = self._workload.sampling_params
    compiled = compiled_for(owner, sampling_params)
    shapes = [
      (entries, width, slots, length)
      for slots in self._counts
      for entries in self._entries
      for width in self._widths
      for length in self._lengths
    ]
    for entries, width, slots, length in shapes:

      def arguments(
        entries: int = entries, width: int = width, slots: int = slots, length: int = length
      ) -> tuple:
        limits = chunk_limits(owner, owner.chunk, 1, sampling_params)
        inputs = _idle(self._capacity._replace(entries=entries), slots).inputs()
        return *self._shapes.all(entries, width, slots, length), inputs, limits

      yield Program(
        ("decode", entries, capacity.slots_per_entry, width, slots, length, compiled),
        owner.decode_chunk,
        arguments,
        {"sampling_params": compiled},
        reads_params=True,
        beside=tuple,
      )

  def _resumptions(self) -> Iterator[Program]:
    workload = self._workload
    if not (workload.resumes or workload.turns):
      return
    # Without turns, completions are resumed when sampling begins, in all slots.
    counts = self._counts if workload.turns else self._counts[:1]
    shapes = [(slots, *batch) for slots in counts for batch in self._batches(SLOTS, slots)]
    for width, rows in dict.fromkeys((width, rows) for _, width, rows in shapes):
      yield self._prefill(width, rows, self._largest)
    for slots, width, rows in shapes:
      for length in self._lengths:
        yield self._insertion(SLOTS, slots, length, width, rows)

  def _changes(self) -> Iterator[Program]:
    """Returns the programs that change the length or the number of slots."""
    owner = self._owner
    shapes = self._shapes
    fewer = list(zip(self._counts, self._counts[1:], strict=False))

    def beside() -> tuple:
      state = self._largest()
      return state.kv.prompts, state.prompts, state.slots

    for more, few in zip(self._entries, self._entries[1:], strict=False):
      for width in self._widths:
        arguments = (shapes.kv(few, width), shapes.states(few), more)
        yield Program(
          ("grow", "entries", few, more, width, self._tracked),
          owner.add_entries,
          lambda arguments=arguments: arguments,
          beside=lambda: self._largest().kv.slots,
        )
    for slots in self._counts:
      for length, shorter in zip(self._lengths, self._lengths[1:], strict=False):
        yield Program(
          ("grow", slots, length),
          owner.grow,
          lambda slots=slots, length=length, shorter=shorter: (shapes.kv(slots, shorter), length),
          beside=beside,
        )
    for before, slots in fewer:
      order = np.zeros((owner.shards, slots), np.int32)
      for length in self._lengths:
        yield Program(
          ("compact", slots, length),
          owner.compact,
          lambda before=before, length=length, order=order: (shapes.kv(before, length), order),
          beside=beside,
        )
      yield Program(
        ("compact", "states", slots, self._tracked),
        owner.keep_rows,
        lambda before=before, order=order: (shapes.states(before), order),
      )


def slot_counts(slots: int, factor: int, least: int = 1) -> list[int]:
  """Returns all numbers of slots per shard, from `slots` down to `least`, divided by `factor`."""
  counts = [slots]
  while (smaller := counts[-1] // factor) >= least:
    counts.append(smaller)
  return counts


def _idle(capacity: Capacity, slots: int) -> Scheduler:
  """Returns a schedule without prompts, with this number of slots per shard."""
  return Scheduler(capacity._replace(slots=slots), DenseSpace(capacity))
