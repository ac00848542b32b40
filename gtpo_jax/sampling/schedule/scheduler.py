"""Assigns completions to slots, and prompts to entries of the prompt cache.

A slot runs one completion at a time. An entry of the prompt cache holds the keys and values of one
prompt, shared by all slots that complete it. Slots and entries are divided into equal shards, one
per device of the batch axes, and a completion runs in the shard that caches its prompt. A finished
slot takes the next completion of a cached prompt; an entry whose prompt has no completions left
takes the next prompt. Completions may join an earlier prompt, for example with the next turn of an
episode; if the prompt has given up its entry, it takes one again.

The scheduler is plain Python and NumPy and does not use devices. What it must know of the cache,
and where the cache puts keys and values, is the concern of a `Space`.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

from gtpo_jax.sampling.schedule.slots import Capacity, DecodeInputs, Entry, Slots, Space


class _Row(NamedTuple):
  """A prompt and its completions."""

  prompt_length: int
  token_limits: list[int]  # [g]
  keys: list[np.ndarray]  # [g] of u32[2]
  drawn: list[int]  # [g], tokens that each completion has already
  waiting: list[int]  # the completions that wait for a slot, as indices in the group, last first

  @classmethod
  def of(
    cls, prompt_length: int, token_limits: np.ndarray, keys: np.ndarray, drawn: np.ndarray
  ) -> _Row:
    """Returns a row whose completions all wait, except those with a limit of 0."""
    waiting = np.flatnonzero(token_limits)[::-1].tolist()
    return cls(prompt_length, token_limits.tolist(), list(keys), drawn.tolist(), waiting)


class Scheduler:
  """Schedules every completion of every prompt, prompts and their completions in order.

  A completion may have tokens already, after which it resumes. Prompts may be added at any time;
  they come after prompts that wait already. Completions that join a prompt come before these.

  Attributes:
    capacity: the current number of slots and entries.
    space: the space of the cache.
    slots: the completions that run.
  """

  def __init__(self, capacity: Capacity, space: Space):
    """Initialises a schedule without prompts.

    Args:
      capacity: the initial number of slots and entries, whatever prompts are added.
      space: the space of the cache for that capacity, unused.
    """
    self.capacity = capacity
    self.space = space
    self.slots = Slots.free(capacity.shards * capacity.slots)
    self._rows: dict[int, _Row] = {}
    self._added = 0
    self._waiting_prompts: collections.deque[int] = collections.deque()
    self._resumed: list[int] = []
    self._entries: list[list[Entry | None]] = [
      [None] * capacity.entries for _ in range(capacity.shards)
    ]

  def add(
    self,
    prompt_lengths: np.ndarray,
    token_limits: np.ndarray,
    keys: np.ndarray,
    drawn: np.ndarray | None = None,
  ) -> None:
    """Adds prompts behind the waiting ones. Their indices follow earlier prompts'.

    Args:
      prompt_lengths: i32[n].
      token_limits: i32[n, g], maximum tokens of each completion; one with a limit of 0 is skipped.
      keys: u32[n, g, 2], PRNG key data.
      drawn: i32[n, g], tokens that each completion has already; None for 0.
    """
    drawn = np.zeros_like(token_limits) if drawn is None else drawn
    new = self._added + np.flatnonzero(token_limits.any(1))
    rows = map(_Row.of, prompt_lengths.tolist(), token_limits, keys, drawn)
    self._rows.update(enumerate(rows, self._added))
    self._added += len(token_limits)
    self._waiting_prompts += new.tolist()

  def join(self, prompt: int, drawn: int, token_limit: int, key: np.ndarray) -> int:
    """Adds a completion to a prompt, before everything that waits; returns its index in the group.

    Args:
      prompt: an earlier prompt, which was not forgotten.
      drawn: the tokens that it has already.
      token_limit: the most tokens, more than it has.
      key: u32[2], PRNG key data.
    """
    row = self._rows[prompt]
    completion = len(row.drawn)
    row.drawn.append(drawn)
    row.token_limits.append(token_limit)
    row.keys.append(key)
    row.waiting.append(completion)
    cached = any(entry and entry.prompt == prompt for x in self._entries for entry in x)
    if not cached and prompt not in self._waiting_prompts:
      self._waiting_prompts.appendleft(prompt)
    return completion

  def withdraw(self, prompt: int, completion: int) -> None:
    """Removes a completion that waits for a slot."""
    row = self._rows[prompt]
    row.waiting.remove(completion)
    if row.waiting:
      return
    if prompt in self._waiting_prompts:
      self._waiting_prompts.remove(prompt)
    for shard, entries in enumerate(self._entries):
      for index, entry in enumerate(entries):
        if entry and entry.prompt == prompt:
          self._remove_unused(shard, index)

  @property
  def has_waiting(self) -> bool:
    """Whether completions wait for a slot."""
    return bool(self._waiting_prompts) or any(
      entry and entry.waiting for entries in self._entries for entry in entries
    )

  @property
  def lacks_entries(self) -> bool:
    """Whether a slot is free and a prompt waits, after `assign` has assigned what it can."""
    return bool(self._waiting_prompts) and not self.slots.active.all()

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
      row = self._rows[self._waiting_prompts[0]]
      length = row.prompt_length
      candidates = [
        shard
        for shard, entries in enumerate(self._entries)
        if None in entries
        and len(to_prefill[shard]) < max_prompts
        and self.space.has_space(shard, length, self.slots)
      ]
      if not candidates:
        break
      shard = max(candidates, key=lambda shard: (idle[shard], -len(to_prefill[shard])))
      index = self._entries[shard].index(None)
      prompt = self._waiting_prompts.popleft()
      slots = [-1] * self.capacity.slots_per_entry
      self._entries[shard][index] = Entry(prompt, length, slots, row.waiting)
      self.space.add_prompt(shard, index, length)
      to_prefill[shard].append((index, prompt))
      idle[shard] = self._fill_slots(shard)
    return to_prefill

  def inputs(self) -> DecodeInputs:
    """Makes space for the next chunk, and returns the inputs of the decode program for it."""
    slots = self.slots
    active, tables = self.space.next_chunk(slots, self._entries)
    return DecodeInputs(
      active=active,
      is_new=active & (slots.generated == 0),
      keys=slots.keys.copy(),
      generated=slots.generated.copy(),
      max_tokens=slots.token_limits.copy(),
      prompt_lengths=slots.prompt_lengths.copy(),
      entries=slots.places // self.capacity.slots_per_entry,
      tables=tables,
    )

  def advance(self, tokens: np.ndarray, left: np.ndarray) -> None:
    """Records a chunk's results and frees slots.

    Args:
      tokens: i32[s], number of tokens generated in each slot.
      left: bool[s], whether the slot's completion has ended.
    """
    slots = self.slots
    slots.generated[:] += tokens
    for slot in np.flatnonzero(left):
      shard, local = divmod(int(slot), self.capacity.slots)
      index, position = divmod(int(slots.places[slot]), self.capacity.slots_per_entry)
      entry = self._entries[shard][index]
      assert entry is not None and entry.slots[position] == local
      entry.slots[position] = -1
      self._remove_unused(shard, index)
    self.space.end(np.flatnonzero(left))
    for of_slots, free in zip(slots, Slots.free(1), strict=True):
      of_slots[left] = free

  def take_resumed(self) -> list[int]:
    """Returns the slots that have started a completion with tokens since the last call."""
    resumed, self._resumed = self._resumed, []
    return resumed

  def shrink(self, slots: int) -> np.ndarray:
    """Reduces every shard to `slots` slots, which must be at least the number of active slots.

    Returns:
      The slots that remain, i32[shards, slots], counted within the shard.
    """
    active = self.slots.active.reshape(self.capacity.shards, -1)
    order = np.argsort(~active, axis=1, kind="stable")[:, :slots].astype(np.int32)
    kept = (order + np.arange(self.capacity.shards)[:, None] * self.capacity.slots).ravel()
    for shard, entries in enumerate(self._entries):
      new_index = {int(old): new for new, old in enumerate(order[shard])}
      for entry in filter(None, entries):
        entry.slots = [-1 if slot < 0 else new_index[slot] for slot in entry.slots]
    self.capacity = self.capacity._replace(slots=slots)
    self.slots = Slots(*(of_slots[kept] for of_slots in self.slots))
    self.space.keep(kept)
    return order

  def forget(self, prompt: int) -> None:
    """Drops what is known of a prompt whose completions have all ended."""
    del self._rows[prompt]

  def refit(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes the numbers of slots and of entries to `slots` per shard, at least as many as in use.

    Returns:
      What takes the place of each slot and of each entry, i32[shards, slots] counted within the
      shard. Those in use come first; others, and new ones, may be any.
    """
    old = self.capacity
    used = [[entry is not None for entry in of_shard] for of_shard in self._entries]
    slot_order = _used_first(self.slots.active.reshape(old.shards, -1), slots)
    entry_order = _used_first(np.asarray(used), slots)
    kept = Slots.free(old.shards * slots)
    for shard, entries in enumerate(self._entries):
      active = int(self.slots.active.reshape(old.shards, -1)[shard].sum())
      before = shard * old.slots + slot_order[shard, :active]
      for new, of_slots in zip(kept, self.slots, strict=True):
        new[shard * slots : shard * slots + active] = of_slots[before]
      new_slot = {int(slot): new for new, slot in enumerate(slot_order[shard, :active])}
      moved = [entries[index] for index in entry_order[shard, : sum(used[shard])]]
      for index, entry in enumerate(moved):
        entry.slots = [-1 if slot < 0 else new_slot[slot] for slot in entry.slots]
        for position, slot in enumerate(entry.slots):
          if slot >= 0:
            kept.places[shard * slots + slot] = index * old.slots_per_entry + position
      entries[:] = moved + [None] * (slots - len(moved))
    self.capacity = old._replace(slots=slots, entries=slots)
    self.slots = kept
    return slot_order, entry_order

  def add_entries(self, entries: int) -> None:
    """Increases the entries of every shard to `entries`."""
    for of_shard in self._entries:
      of_shard += [None] * (entries - len(of_shard))
    self.capacity = self.capacity._replace(entries=entries)

  def _remove_unused(self, shard: int, index: int) -> None:
    """Frees an entry if none of its prompt's completions runs or waits."""
    entry = self._entries[shard][index]
    if not entry.waiting and max(entry.slots) < 0:
      self._entries[shard][index] = None
      self.space.remove_prompt(shard, index)

  def _fill_slots(self, shard: int) -> int:
    """Starts cached prompts' completions in a shard's free slots; returns how many stay idle."""
    first = shard * self.capacity.slots
    free = np.flatnonzero(~self.slots.active[first : first + self.capacity.slots]).tolist()[::-1]
    for index, entry in enumerate(self._entries[shard]):
      while free and entry and entry.waiting and -1 in entry.slots:
        row = self._rows[entry.prompt]
        completion = entry.waiting[-1]
        drawn = row.drawn[completion]
        limit = row.token_limits[completion]
        if not self.space.can_start(shard, drawn, limit, self.slots):
          break
        entry.waiting.pop()
        local = free.pop()
        position = entry.slots.index(-1)
        entry.slots[position] = local
        started = Slots(
          completions=(entry.prompt, completion),
          generated=drawn,
          token_limits=limit,
          prompt_lengths=row.prompt_length,
          keys=row.keys[completion],
          places=index * self.capacity.slots_per_entry + position,
        )
        for of_slots, value in zip(self.slots, started, strict=True):
          of_slots[first + local] = value
        if drawn:
          self._resumed.append(first + local)
        self.space.start(first + local, drawn)
    return len(free)


def _used_first(used: np.ndarray, count: int) -> np.ndarray:
  """Returns `count` indices i32[shards, count]: first of what `used` bool[shards, m] marks."""
  order = np.argsort(~used, axis=1, kind="stable").astype(np.int32)[:, :count]
  return np.pad(order, ((0, 0), (0, count - order.shape[1])))
