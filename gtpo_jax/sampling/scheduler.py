"""Assigns completions to slots, and prompts to entries of the prompt cache.

A slot runs one completion at a time. An entry of the prompt cache holds the keys and values of one
prompt, shared by all slots that complete it. Slots and entries are divided into equal shards, one
per device of the batch axes, and a completion runs in the shard that caches its prompt. A finished
slot takes the next completion of a cached prompt; an entry whose prompt has no completions left
takes the next prompt. The scheduler is plain Python and NumPy and does not use devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.sampling.dense import DenseTables

# Prompt cache entries, as a multiple of the number of full groups that fit in the slots. With spare
# entries, the slow completions of a few prompts do not keep the next prompts waiting.
ENTRY_FACTOR = 4


class Capacity(NamedTuple):
  """The number of shards, and the slots and entries of each."""

  shards: int
  slots: int  # completions at once, per shard
  entries: int  # prompts in the cache, per shard
  slots_per_entry: int  # completions of one prompt at once


class DecodeInputs(NamedTuple):
  """The arrays that the host sends to the decode program before each chunk.

  Slots [s] are ordered shard by shard. A slot that is not active does nothing.
  """

  active: np.ndarray  # bool[s]
  is_new: np.ndarray  # bool[s], True if the completion has no token yet
  keys: np.ndarray  # u32[s, 2], PRNG key data of the completion
  generated: np.ndarray  # i32[s], number of tokens so far
  max_tokens: np.ndarray  # i32[s], the limit of the completion
  prompt_lengths: np.ndarray  # i32[s]
  entries: np.ndarray  # i32[s], the cache entry of the prompt, counted within the shard
  tables: Any  # of the cache: `DenseTables` or `PageTables`


def capacity_for(prompts: int, group: int, shards: int, max_slots: int) -> Capacity:
  """Returns the capacity for `prompts` x `group` completions.

  Args:
    prompts: number of prompts.
    group: completions per prompt.
    shards: devices along the batch axes.
    max_slots: the most slots over all shards; every shard gets at least one.
  """
  prompts_per_shard = max(-(-prompts // shards), 1)
  slots = min(max(max_slots // shards, 1), prompts_per_shard * group)
  slots_per_entry = min(group, slots)
  full_groups = -(-slots // slots_per_entry)
  entries = min(prompts_per_shard, slots, ENTRY_FACTOR * full_groups)
  return Capacity(shards, slots, entries, slots_per_entry)


@dataclasses.dataclass
class _Entry:
  """A cached prompt and the slots that complete it."""

  prompt: int
  slots: list[int]  # [slots_per_entry], counted within the shard; -1 if free
  waiting: list[int]  # the completions that have not started, as indices in the group, last first


class Scheduler:
  """Schedules every completion of every prompt once, prompts and their completions in order.

  A completion may have tokens from an earlier batch, with which it goes on.

  Attributes:
    capacity: the current number of slots and entries.
    completions: i32[s, 2], the (prompt, index in its group) in each slot; -1 if the slot is free.
    generated: i32[s], number of tokens of each slot's completion so far.
  """

  def __init__(
    self,
    capacity: Capacity,
    prompt_lengths: np.ndarray,
    token_limits: np.ndarray,
    keys: np.ndarray,
    drawn: np.ndarray | None = None,
  ):
    """Initialises the schedule with all prompts waiting.

    Args:
      capacity: the initial number of slots and entries.
      prompt_lengths: i32[n].
      token_limits: i32[n, g], maximum tokens of each completion; one with a limit of 0 is skipped.
      keys: u32[n, g, 2], PRNG key data.
      drawn: i32[n, g], tokens that each completion has already; None for 0.
    """
    self.capacity = capacity
    self._prompt_lengths = prompt_lengths
    self._token_limits = token_limits
    self._keys = keys
    self._drawn = np.zeros_like(token_limits) if drawn is None else drawn
    self._waiting_prompts = np.flatnonzero(token_limits.any(1))[::-1].tolist()
    self._resumed: list[int] = []
    self._entries: list[list[_Entry | None]] = [
      [None] * capacity.entries for _ in range(capacity.shards)
    ]
    total = capacity.shards * capacity.slots
    self.completions = np.full((total, 2), -1, np.int32)
    self.generated = np.zeros(total, np.int32)
    self._table_index = np.zeros(total, np.int32)

  @property
  def active(self) -> np.ndarray:
    """bool[s], True for slots that run a completion."""
    return self.completions[:, 0] >= 0

  @property
  def has_waiting(self) -> bool:
    """Whether completions wait for a slot."""
    return bool(self._waiting_prompts) or any(
      entry and entry.waiting for entries in self._entries for entry in entries
    )

  def assign(self, max_prompts: int) -> list[list[tuple[int, int]]]:
    """Assigns waiting completions to free slots, and prompts to free entries if slots stay idle.

    Call it until it returns no prompts.

    Args:
      max_prompts: the most prompts to assign per shard.

    Returns:
      For each shard, the (entry, prompt) pairs to prefill before the next chunk.
    """
    to_prefill: list[list[tuple[int, int]]] = [[] for _ in self._entries]
    idle = [self._fill_slots(shard) for shard in range(self.capacity.shards)]
    if not any(idle):
      return to_prefill
    # If any prompt is prefilled, all free entries are filled: few large batches are cheaper.
    while self._waiting_prompts:
      candidates = [
        shard
        for shard, entries in enumerate(self._entries)
        if None in entries
        and len(to_prefill[shard]) < max_prompts
        and self._has_space(shard, self._waiting_prompts[-1])
      ]
      if not candidates:
        break
      shard = max(candidates, key=lambda shard: (idle[shard], -len(to_prefill[shard])))
      index = self._entries[shard].index(None)
      prompt = self._waiting_prompts.pop()
      waiting = np.flatnonzero(self._token_limits[prompt])[::-1].tolist()
      self._entries[shard][index] = _Entry(prompt, [-1] * self.capacity.slots_per_entry, waiting)
      self._entry_taken(shard, index, prompt)
      to_prefill[shard].append((index, prompt))
      idle[shard] = self._fill_slots(shard)
    return to_prefill

  def inputs(self) -> DecodeInputs:
    """Returns the inputs of the decode program for the next chunk."""
    prompt = self.completions[:, 0]
    index = self.completions[:, 1]
    return DecodeInputs(
      active=self.active,
      is_new=self.active & (self.generated == 0),
      keys=self._keys[prompt, index],
      generated=self.generated.copy(),
      max_tokens=self._token_limits[prompt, index],
      prompt_lengths=self._prompt_lengths[prompt],
      entries=self._table_index // self.capacity.slots_per_entry,
      tables=self.tables(),
    )

  def tables(self) -> Any:
    """Returns the tables of the cache for the next chunk."""
    entries = [entry for shard in self._entries for entry in shard]
    free = [0] * self.capacity.slots_per_entry
    slot_table = [[max(slot, 0) for slot in entry.slots] if entry else free for entry in entries]
    entry_lengths = [self._prompt_lengths[entry.prompt] if entry else 1 for entry in entries]
    return DenseTables(
      self._table_index.copy(),
      np.asarray(slot_table, np.int32),
      np.asarray(entry_lengths, np.int32),
    )

  def advance(self, tokens: np.ndarray, ended: np.ndarray) -> None:
    """Records a chunk's results and frees the slots of ended completions.

    Args:
      tokens: i32[s], number of tokens generated in each slot.
      ended: bool[s], whether the slot's completion ended.
    """
    self.generated += tokens
    for slot in np.flatnonzero(ended):
      shard, local = divmod(int(slot), self.capacity.slots)
      index, position = divmod(int(self._table_index[slot]), self.capacity.slots_per_entry)
      entry = self._entries[shard][index]
      assert entry is not None and entry.slots[position] == local
      entry.slots[position] = -1
      if not entry.waiting and max(entry.slots) < 0:
        self._entries[shard][index] = None
        self._entry_freed(shard, index)
    self._slots_freed(np.flatnonzero(ended))
    self.completions[ended] = -1
    self.generated[ended] = 0
    self._table_index[ended] = 0

  def take_resumed(self) -> list[int]:
    """Returns the slots that have started a completion with tokens since the last call."""
    resumed, self._resumed = self._resumed, []
    return resumed

  def statistics(self) -> dict[str, float]:
    """Returns metrics of the schedule so far, by name."""
    return {}

  def shrink(self, slots: int) -> np.ndarray:
    """Reduces every shard to `slots` slots, which must be at least the number of active slots.

    Returns:
      The slots that remain, i32[shards, slots], counted within the shard.
    """
    active = self.active.reshape(self.capacity.shards, -1)
    order = np.argsort(~active, axis=1, kind="stable")[:, :slots].astype(np.int32)
    kept = (order + np.arange(self.capacity.shards)[:, None] * self.capacity.slots).ravel()
    for shard, entries in enumerate(self._entries):
      new_index = {int(old): new for new, old in enumerate(order[shard])}
      for entry in filter(None, entries):
        entry.slots = [-1 if slot < 0 else new_index[slot] for slot in entry.slots]
    self.capacity = self.capacity._replace(slots=slots)
    self.completions = self.completions[kept]
    self.generated = self.generated[kept]
    self._table_index = self._table_index[kept]
    return order

  def _has_space(self, shard: int, prompt: int) -> bool:
    """Returns whether a shard's cache has space for another prompt, besides a free entry."""
    return True

  def _entry_taken(self, shard: int, index: int, prompt: int) -> None:
    """Called when an entry takes a prompt, before the prompt is prefilled."""

  def _entry_freed(self, shard: int, index: int) -> None:
    """Called when the last completion of an entry's prompt has ended."""

  def _can_start(self, shard: int, prompt: int, index: int) -> bool:
    """Returns whether a shard's cache has space for the tokens that a completion has already."""
    return True

  def _slot_started(self, slot: int) -> None:
    """Called when a slot takes a completion."""

  def _slots_freed(self, slots: np.ndarray) -> None:
    """Called when the completions of `slots` have ended."""

  def _fill_slots(self, shard: int) -> int:
    """Starts cached prompts' completions in a shard's free slots; returns how many stay idle."""
    first = shard * self.capacity.slots
    free = np.flatnonzero(~self.active[first : first + self.capacity.slots]).tolist()[::-1]
    for index, entry in enumerate(self._entries[shard]):
      while (
        free
        and entry
        and entry.waiting
        and -1 in entry.slots
        and self._can_start(shard, entry.prompt, entry.waiting[-1])
      ):
        completion = entry.prompt, entry.waiting.pop()
        local = free.pop()
        slot = first + local
        position = entry.slots.index(-1)
        entry.slots[position] = local
        self.completions[slot] = completion
        self._table_index[slot] = index * self.capacity.slots_per_entry + position
        self.generated[slot] = self._drawn[completion]
        if self.generated[slot]:
          self._resumed.append(slot)
        self._slot_started(slot)
    return len(free)
