"""The tables of the dense cache, which say which slots attend to which prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.sampling.schedule.slots import Capacity, Entry, Slots, Space


class DenseTables(NamedTuple):
  """Which slots attend to which prompt.

  A slot's queries move to its prompt's row, so that a prompt is read once for all its slots.
  """

  table_index: Any  # i32[s], index of the slot in its shard's flattened `slot_table`
  # i32[m, slots_per_entry], the slots that complete each entry's prompt, counted within the shard;
  # unused places contain 0
  slot_table: Any
  entry_lengths: Any  # i32[m], number of tokens of the cached prompt


class DenseSpace(Space):
  """The space of a dense cache: each slot and each entry has its own.

  Attributes:
    capacity: the initial number of slots, and the most entries.
  """

  def __init__(self, capacity: Capacity):
    """Args:
    capacity: the initial number of slots, and the most entries.
    """
    self.capacity = capacity

  def next_chunk(
    self, slots: Slots, entries: Sequence[Sequence[Entry | None]]
  ) -> tuple[np.ndarray, DenseTables]:
    """Returns all slots in use, and the tables; see `Space`."""
    all_entries = [entry for of_shard in entries for entry in of_shard]
    free = [0] * self.capacity.slots_per_entry
    slot_table = [
      [max(slot, 0) for slot in entry.slots] if entry else free for entry in all_entries
    ]
    entry_lengths = [entry.prompt_length if entry else 1 for entry in all_entries]
    tables = DenseTables(
      slots.places.copy(), np.asarray(slot_table, np.int32), np.asarray(entry_lengths, np.int32)
    )
    return slots.active, tables
