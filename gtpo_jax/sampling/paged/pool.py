"""Gives pages of keys and values to prompts and completions, and takes them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gtpo_jax.sampling.cache import PROMPTS, Part
from gtpo_jax.sampling.paged.tables import PageRows, PageTables
from gtpo_jax.sampling.prefill.batches import PrefillBatch
from gtpo_jax.sampling.schedule.slots import Capacity, Entry, Slots, Space


class PoolSizes(NamedTuple):
  """The sizes of a pool of pages, for each shard."""

  pages: int
  page: int  # positions of a page
  prompt_pages: int  # the most pages of a prompt
  completion_pages: int  # the most pages of a completion
  chunk: int  # the most positions that a completion gains between two visits to the host
  slots_per_row: int  # slots in a row that share a prompt

  def pages_of(self, positions: int | np.ndarray) -> int | np.ndarray:
    """Returns the number of pages that hold `positions` positions."""
    return -(-positions // self.page)

  @property
  def touched(self) -> int:
    """The most pages that one chunk of a completion is written to."""
    return (self.chunk + self.page - 2) // self.page + 1


@dataclasses.dataclass
class Shard:
  """The free pages of a shard, and the pages of its prompts."""

  free: list[int]
  entries: dict[int, list[int]]


class PagePool(Space):
  """Gives out pages, and lets completions wait if there are too few.

  A completion gets the pages of its next chunk only if afterwards some order remains in which all
  running completions can grow to their limits, each with the pages that those before it give back
  (the banker's algorithm). Otherwise it waits in its slot. Pages may therefore run out, but some
  completion always runs, and none is lost or sampled again. Older completions come first.

  Attributes:
    sizes: of the pool.
    shards: the free pages of each shard, and the pages of its prompts.
    slot_pages: the pages of the completion in each slot.
  """

  def __init__(self, capacity: Capacity, sizes: PoolSizes):
    """Args:
    capacity: the initial number of slots and entries.
    sizes: of the pool.
    """
    slots = capacity.shards * capacity.slots
    self.sizes = sizes
    self.shards = [Shard(list(range(sizes.pages))[::-1], {}) for _ in range(capacity.shards)]
    self.slot_pages: list[list[int]] = [[] for _ in range(slots)]
    self._age = np.zeros(slots, np.int64)
    self._started = 0
    self._waited = 0
    self._ran = 0

  def has_space(self, shard: int, prompt_length: int, slots: Slots) -> bool:
    """Returns whether the pool can hold another prompt and still let every completion end."""
    state = self.shards[shard]
    count = self.sizes.pages_of(prompt_length)
    cached = sum(map(len, state.entries.values()))
    if cached + count + self.sizes.completion_pages > self.sizes.pages:
      return False
    held, need = _held_and_needed(self, slots, _running(slots, shard, len(self.shards)))
    return _is_safe(len(state.free) - count, held, need)

  def can_start(self, shard: int, drawn: int, token_limit: int, slots: Slots) -> bool:
    """Returns whether the tokens of another completion can be read and every one still end."""
    count = self.sizes.pages_of(drawn)
    if not count:
      return True
    held, need = _held_and_needed(self, slots, _running(slots, shard, len(self.shards)))
    needs = self.sizes.pages_of(token_limit) - count
    free = len(self.shards[shard].free) - count
    return _is_safe(free, np.append(held, count), np.append(need, needs))

  def add_prompt(self, shard: int, entry: int, prompt_length: int) -> None:
    """Gives pages to a prompt."""
    state = self.shards[shard]
    count = self.sizes.pages_of(prompt_length)
    state.entries[entry] = [state.free.pop() for _ in range(count)]

  def remove_prompt(self, shard: int, entry: int) -> None:
    """Takes back the pages of a prompt."""
    state = self.shards[shard]
    state.free += state.entries.pop(entry)

  def start(self, slot: int, drawn: int) -> None:
    """Gives pages to the tokens that a completion has already."""
    self._age[slot] = self._started
    self._started += 1
    free = self.shards[slot * len(self.shards) // len(self.slot_pages)].free
    self.slot_pages[slot] = [free.pop() for _ in range(self.sizes.pages_of(drawn))]

  def end(self, ended: np.ndarray) -> None:
    """Takes back the pages of completions."""
    for slot in ended.tolist():
      shard = slot * len(self.shards) // len(self.slot_pages)
      self.shards[shard].free += self.slot_pages[slot]
      self.slot_pages[slot] = []

  def keep(self, kept: np.ndarray) -> None:
    """Keeps the slots `kept`, in that order."""
    self.slot_pages = [self.slot_pages[slot] for slot in kept]
    self._age = self._age[kept]

  def next_chunk(
    self, slots: Slots, entries: Sequence[Sequence[Entry | None]]
  ) -> tuple[np.ndarray, PageTables]:
    """Gives every running completion the pages of its next chunk, or lets it wait; see `Space`."""
    sizes = self.sizes
    runs = slots.active.copy()
    held, need = _held_and_needed(self, slots, np.arange(len(runs)))
    ahead = np.minimum(slots.generated + sizes.chunk, slots.token_limits)
    want = np.maximum(sizes.pages_of(ahead) - held, 0)
    for shard, state in enumerate(self.shards):
      running = _running(slots, shard, len(self.shards))
      if not len(running):
        continue
      running = running[np.argsort(self._age[running], kind="stable")]
      enough = len(state.free) - want[running].sum() >= (need - want)[running].max()
      for i, slot in enumerate(running.tolist()):
        count = int(want[slot])
        if not count:
          continue
        after = np.zeros(len(running), np.int64)
        after[i] = count
        if enough or _is_safe(
          len(state.free) - count, held[running] + after, need[running] - after
        ):
          self.slot_pages[slot] += [state.free.pop() for _ in range(count)]
          held[slot] += count
          need[slot] -= count
        else:
          runs[slot] = False
    self._ran += int(runs.sum())
    self._waited += int(slots.active.sum() - runs.sum())
    return runs, page_tables(self, slots, entries, runs)

  def statistics(self) -> dict[str, float]:
    """Returns `sampling/waiting`, the share of chunks for which completions waited for pages."""
    return {"sampling/waiting": self._waited / max(self._waited + self._ran, 1)}


def page_tables(
  pool: PagePool, slots: Slots, entries: Sequence[Sequence[Entry | None]], runs: np.ndarray
) -> PageTables:
  """Returns the pages that slots read and write during the next chunk.

  Args:
    pool: the pages.
    slots, entries: as in `Space.next_chunk`.
    runs: bool[s], the slots whose completions run.
  """
  sizes = pool.sizes
  shards = len(pool.shards)
  count = len(runs) // shards
  width = sizes.slots_per_row
  prompts = _empty_rows(shards, count, width, sizes.prompt_pages)
  completions = _empty_rows(shards, count, 1, sizes.completion_pages)
  current = _empty_rows(shards, count, 1, 1)
  written = _unused_pages(sizes, shards, count, sizes.touched)
  completion_rows = np.full((shards, count), -1, np.int32)
  for shard in range(shards):
    first = shard * count
    for index, entry in enumerate(entries[shard]):
      running = [x for x in entry.slots if x >= 0 and runs[first + x]] if entry else []
      for start in range(0, len(running), width):
        pages = pool.shards[shard].entries[index]
        end = len(pages) * sizes.page
        of_row = running[start : start + width]
        _add_row(prompts, shard, count, of_row, pages, end - entry.prompt_length, end)
    for slot in np.flatnonzero(runs[first : first + count]).tolist():
      pages = pool.slot_pages[first + slot]
      generated = int(slots.generated[first + slot])
      if generated:
        completion_rows[shard, slot] = completions.count[shard]
        used = pages[: sizes.pages_of(generated)]
        _add_row(completions, shard, count, [slot], used, 0, generated)
      _add_row(current, shard, count, [slot], [slot], 0, 1)
      begin = generated // sizes.page
      window = pages[begin : begin + sizes.touched]
      written[shard, slot, : len(window)] = window
    row = first + prompts.count[shard]
    idle = np.flatnonzero(~runs[first : first + count])
    for start in range(0, len(idle), width):
      of_row = idle[start : start + width]
      prompts.slots[row] = of_row[0]
      prompts.slots[row, : len(of_row)] = of_row
      prompts.end[row] = -1
      row += 1
  written = written.reshape(shards * count, -1)
  return PageTables(prompts, completions, current, written, completion_rows.reshape(-1))


def places(pool: PagePool, part: Part, batch: PrefillBatch) -> np.ndarray:
  """Returns the pages that prompts are written to, or completions with tokens.

  Args:
    pool: the pages.
    part: the part of the cache that is written.
    batch: the sequences; its width is a multiple of the page.

  Returns:
    i32[shards, rows, width / page]. A prompt ends in the last of them, and a completion begins in
    the first. The others, and all of an unused row, are past the pool's last page.
  """
  pages = _unused_pages(pool.sizes, len(pool.shards), batch.rows, batch.width // pool.sizes.page)
  slots = len(pool.slot_pages) // len(pool.shards)
  for shard, pairs in enumerate(batch.assigned):
    for row, (into, _) in enumerate(pairs):
      if part == PROMPTS:
        held = pool.shards[shard].entries[into]
        pages[shard, row, -len(held) :] = held
      else:
        held = pool.slot_pages[shard * slots + into]
        pages[shard, row, : len(held)] = held
  return pages


def _unused_pages(sizes: PoolSizes, shards: int, rows: int, pages: int) -> np.ndarray:
  """Returns i32[shards, rows, pages] of numbers past the last page, different in each shard."""
  numbers = sizes.pages + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
  return np.repeat(numbers[None], shards, 0)


def _held_and_needed(
  pool: PagePool, slots: Slots, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the pages that the completions in the slots `which` hold, and those they may need."""
  held = np.asarray([len(pool.slot_pages[slot]) for slot in which], np.int64)
  return held, pool.sizes.pages_of(slots.token_limits[which]) - held


def _running(slots: Slots, shard: int, shards: int) -> np.ndarray:
  """Returns the slots of a shard that run a completion."""
  count = len(slots.generated) // shards
  first = shard * count
  return first + np.flatnonzero(slots.active[first : first + count])


def _is_safe(free: int, held: np.ndarray, need: np.ndarray) -> bool:
  """Returns whether completions can all grow by `need` pages in some order.

  Each gives back what it holds and what it got. Those that need least come first.
  """
  order = np.argsort(need, kind="stable")
  returned = np.cumsum(held[order]) - held[order]
  return free >= 0 and bool((need[order] <= free + returned).all())


def _empty_rows(shards: int, rows: int, width: int, pages: int) -> PageRows:
  """Returns rows that are not in use yet."""
  zeros = lambda *shape: np.zeros(shape, np.int32)
  total = shards * rows
  return PageRows(
    zeros(shards), zeros(total, width), zeros(total, pages), zeros(total), zeros(total)
  )


def _add_row(
  to: PageRows, shard: int, rows: int, slots: list[int], pages: list[int], start: int, end: int
) -> None:
  """Adds a row of `slots` to a shard's rows."""
  row = shard * rows + to.count[shard]
  to.count[shard] += 1
  to.slots[row] = slots[0]
  to.slots[row, : len(slots)] = slots
  to.pages[row, : len(pages)] = pages
  to.start[row] = start
  to.end[row] = end
