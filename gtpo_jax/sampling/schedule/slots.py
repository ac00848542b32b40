"""Slots that run completions, entries that cache prompts, and what a cache says about its space."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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


class Slots(NamedTuple):
  """The completions that run, one per slot. Slots [s] are ordered shard by shard.

  The arrays are changed in place.
  """

  completions: np.ndarray  # i32[s, 2], the (prompt, index in its group); -1 if the slot is free
  generated: np.ndarray  # i32[s], number of tokens so far
  token_limits: np.ndarray  # i32[s], the most tokens
  prompt_lengths: np.ndarray  # i32[s]
  keys: np.ndarray  # u32[s, 2], PRNG key data
  # i32[s], the index in the `Entry.slots` of all entries of the shard, one after another
  places: np.ndarray

  @classmethod
  def free(cls, count: int) -> Slots:
    """Returns `count` free slots."""
    zeros = lambda *shape: np.zeros((count, *shape), np.int32)
    keys = np.zeros((count, 2), np.uint32)
    return cls(np.full((count, 2), -1, np.int32), zeros(), zeros(), zeros(), keys, zeros())

  @property
  def active(self) -> np.ndarray:
    """bool[s], True for slots that run a completion."""
    return self.completions[:, 0] >= 0


@dataclasses.dataclass
class Entry:
  """A cached prompt and the slots that complete it."""

  prompt: int
  prompt_length: int
  slots: list[int]  # [slots_per_entry], counted within the shard; -1 if free
  waiting: list[int]  # the completions that wait for a slot, as indices in the group, last first


class Space:
  """What a cache says about its space, and what it is told about its use.

  By default there is space for everything that has a slot and an entry. Entries count within their
  shard, and slots over all shards.
  """

  def has_space(self, shard: int, prompt_length: int, slots: Slots) -> bool:
    """Returns whether a shard has space for another prompt, besides a free entry."""
    return True

  def can_start(self, shard: int, drawn: int, token_limit: int, slots: Slots) -> bool:
    """Returns whether a shard has space for the `drawn` tokens that a completion has already."""
    return True

  def add_prompt(self, shard: int, entry: int, prompt_length: int) -> None:
    """Called when an entry takes a prompt, before the prompt is prefilled."""

  def remove_prompt(self, shard: int, entry: int) -> None:
    """Called when the last completion of an entry's prompt has left its slot."""

  def start(self, slot: int, drawn: int) -> None:
    """Called when a slot takes a completion that has `drawn` tokens."""

  def end(self, ended: np.ndarray) -> None:
    """Called when the completions in the slots `ended` i32[number of them] have left them."""

  def keep(self, kept: np.ndarray) -> None:
    """Called when only the slots `kept` i32[number of them] remain, in that order."""

  def next_chunk(
    self, slots: Slots, entries: Sequence[Sequence[Entry | None]]
  ) -> tuple[np.ndarray, Any]:
    """Makes space for the next chunk.

    Args:
      slots: all slots.
      entries: of each shard; None where an entry is free.

    Returns:
      bool[s], the slots whose completions run in this chunk, and the tables of the cache.
    """
    raise NotImplementedError

  def statistics(self) -> dict[str, float]:
    """Returns metrics of the schedule so far, by name."""
    return {}


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
