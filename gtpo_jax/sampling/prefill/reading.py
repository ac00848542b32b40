"""Reads tokens into the cache: prompts, and completions that resume after tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part
from gtpo_jax.sampling.prefill.batches import (
  Assigned,
  Copies,
  PrefillBatch,
  RoutesRead,
  TokenIds,
  nothing,
  prefill_batches,
  without_copies,
)
from gtpo_jax.sampling.programs import Programs, SamplerState
from gtpo_jax.sampling.schedule.scheduler import Scheduler


class Reader:
  """Reads what a schedule assigns to entries and slots."""

  def __init__(self, programs: Programs, params: DecodeParams, scheduler: Scheduler):
    """Args:
    programs: of the engine.
    params: the policy, in its layout.
    scheduler: the schedule.
    """
    self._programs = programs
    self._params = params
    self._scheduler = scheduler

  def read_prompts(
    self, state: SamplerState, prompts: TokenIds
  ) -> tuple[SamplerState, list[RoutesRead]]:
    """Lets the scheduler fill free slots, and prefills the prompts that it assigns to entries.

    If slots stay idle for lack of entries, these are added.

    Returns:
      The state, and the experts that computed the prompts, by their numbers; none without experts.
    """
    scheduler = self._scheduler
    read: list[RoutesRead] = []
    while True:
      while any(assigned := scheduler.assign(scheduler.capacity.entries)):
        state = self._read(state, PROMPTS, assigned, prompts, read)
      larger = self._programs.with_more_entries(state, scheduler)
      if larger is state:
        return state, read
      state = larger

  def read_resumed(
    self, state: SamplerState, sequence_of: Callable[[int, int], list[int]]
  ) -> tuple[SamplerState, list[RoutesRead]]:
    """Reads completions that have tokens already into the slots that they were assigned to.

    Args:
      state: the state.
      sequence_of: returns the tokens of a (prompt, index), after its prompt's.

    Returns:
      The state, and the experts that computed the sequences, which are named by (prompt, index).
    """
    scheduler = self._scheduler
    read: list[RoutesRead] = []
    resumed = scheduler.take_resumed()
    if not resumed:
      return state, read
    state = self._programs.resize(state, scheduler, keep_slots=True)
    sequences = {}
    assigned = nothing(scheduler.capacity.shards)
    for slot in resumed:
      shard, local = divmod(slot, scheduler.capacity.slots)
      name = tuple(scheduler.slots.completions[slot].tolist())
      assigned[shard].append((local, name))
      sequences[name] = sequence_of(*name)
    return self._read(state, SLOTS, assigned, sequences, read), read

  def _read(
    self,
    state: SamplerState,
    part: Part,
    assigned: Assigned,
    sequences: TokenIds,
    read: list[RoutesRead],
  ) -> SamplerState:
    """Reads sequences into the cache, equal prompts once, and adds their routes to `read`."""
    programs = self._programs
    sizes = programs.sizes
    cache = programs.cache
    counts = {width: sizes.row_counts(self._scheduler, part, width) for width in sizes.widths[part]}
    copies: Copies = {}
    if part == PROMPTS and programs.copies_prompts:
      assigned, copies = without_copies(assigned, sequences)
    for batch in prefill_batches(assigned, sequences, counts, programs.config.batch_invariant):
      states = getattr(state, part)
      rows = len(states.hidden) // programs.shards
      places = _places(programs, self._scheduler, part, batch, rows, copies)
      kv = cache.part(state.kv, part)
      tokens = batch.tokens(sequences, programs.pad)
      kv, states, routes = programs.read[part](self._params, kv, states, tokens, *places)
      state = state._replace(kv=cache.with_part(state.kv, part, kv), **{part: states})
      if routes is not None:
        read.append(RoutesRead(routes, batch.names(copies)))
    return state


def empty_batch(
  programs: Programs, scheduler: Scheduler, part: Part, width: int, rows: int, into: int
) -> tuple[Prompts, np.ndarray, Any]:
  """Returns what `Programs.read` takes last, for a batch without sequences.

  Args:
    programs: of the engine.
    scheduler: without prompts.
    part: what is written.
    width: positions of a row.
    rows: of the batch, per shard.
    into: entries or slots per shard.
  """
  batch = PrefillBatch(width, rows, nothing(programs.shards))
  return batch.tokens({}, programs.pad), *_places(programs, scheduler, part, batch, into, {})


def _places(
  programs: Programs,
  scheduler: Scheduler,
  part: Part,
  batch: PrefillBatch,
  rows: int,
  copies: Copies,
) -> tuple[np.ndarray, Any]:
  """Returns `source` and `places` of `insert_rows` for a batch.

  Args:
    programs: of the engine.
    scheduler: the schedule.
    part: what is written.
    batch: the sequences; with none, nothing is written.
    rows: entries or slots per shard.
    copies: see `without_copies`.
  """
  source = np.full((programs.shards, rows), -1, np.int32)
  first = np.full((programs.shards, batch.rows), batch.width, np.int32)
  for shard, of_shard in enumerate(batch.written(copies)):
    for row, pairs in enumerate(of_shard):
      for into, _ in pairs:
        source[shard, into] = row
        if part == SLOTS:
          first[shard, row] -= scheduler.slots.generated[shard * rows + into]
  where = programs.places_in_cache(scheduler, part, batch, source)
  return source, (where if part == PROMPTS else (where, first))
