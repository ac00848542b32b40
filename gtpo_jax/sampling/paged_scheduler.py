"""Gives pages of keys and values to prompts and completions, and takes them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gtpo_jax.sampling.page_tables import PageRows, PageTables
from gtpo_jax.sampling.scheduler import Capacity, DecodeInputs, Scheduler


class Pool(NamedTuple):
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
class _Shard:
  """The free pages of a shard, and the pages of its prompts."""

  free: list[int]
  entries: dict[int, list[int]]


class PagedScheduler(Scheduler):
  """A scheduler that also gives out pages, and lets completions wait if there are too few.

  A completion gets the pages of its next chunk only if afterwards some order remains in which all
  running completions can grow to their limits, each with the pages that those before it give back
  (the banker's algorithm). Otherwise it waits in its slot. Pages may therefore run out, but some
  completion always goes on, and none is lost or sampled again. Older completions come first.
  """

  def __init__(
    self,
    capacity: Capacity,
    prompt_lengths: np.ndarray,
    token_limits: np.ndarray,
    keys: np.ndarray,
    pool: Pool,
    drawn: np.ndarray | None = None,
  ):
    """Initialises the schedule with all prompts waiting; see `Scheduler`."""
    super().__init__(capacity, prompt_lengths, token_limits, keys, drawn)
    self._pool = pool
    self._shards = [_Shard(list(range(pool.pages))[::-1], {}) for _ in range(capacity.shards)]
    self._slot_pages: list[list[int]] = [[] for _ in self.generated]
    self._age = np.zeros(len(self.generated), np.int64)
    self._paused = np.zeros(len(self.generated), bool)
    self._started = 0
    self._waited = 0
    self._ran = 0

  def places(self, assigned: list[list[tuple[int, int]]], rows: int, width: int) -> np.ndarray:
    """Returns the pages of newly assigned prompts.

    Args:
      assigned: from `assign`.
      rows: rows of the prefill batch per shard.
      width: positions of a row, a multiple of the page.

    Returns:
      i32[shards, rows, width / page]. Prompts are padded on the left, so those before a prompt's
      first page, and those of unused rows, are past the pool's last page.
    """
    pages = [
      [shard.entries[entry] for entry, _ in pairs]
      for shard, pairs in zip(self._shards, assigned, strict=True)
    ]
    return self._placed(pages, rows, width, lambda count: slice(-count, None))

  def completion_places(
    self, slots: list[list[tuple[int, int]]], rows: int, width: int
  ) -> np.ndarray:
    """Returns the pages of the tokens that newly assigned completions have already.

    Args:
      slots: for each shard, the (slot, row) pairs.
      rows: rows of the prefill batch per shard.
      width: positions of a row, a multiple of the page.

    Returns:
      i32[shards, rows, width / page], from the first page of a completion on. Those after its last
      token are past the pool's last page.
    """
    pages = [
      [self._slot_pages[shard * self.capacity.slots + slot] for slot, _ in pairs]
      for shard, pairs in enumerate(slots)
    ]
    return self._placed(pages, rows, width, slice)

  def inputs(self) -> DecodeInputs:
    """Gives out pages for the next chunk, and returns the inputs of the decode program."""
    self._grant()
    inputs = super().inputs()
    active = inputs.active & ~self._paused
    self._waited += int(self._paused.sum())
    self._ran += int(active.sum())
    return inputs._replace(active=active, is_new=inputs.is_new & active)

  def tables(self) -> PageTables:
    """Returns the pages that slots read and write during the next chunk."""
    shards = self.capacity.shards
    slots = self.capacity.slots
    width = self._pool.slots_per_row
    prompts = _empty_rows(shards, slots, width, self._pool.prompt_pages)
    completions = _empty_rows(shards, slots, 1, self._pool.completion_pages)
    current = _empty_rows(shards, slots, 1, 1)
    written = self._unused_pages(shards, slots, self._pool.touched)
    for shard in range(shards):
      first = shard * slots
      for index, entry in enumerate(self._entries[shard]):
        running = (
          [x for x in entry.slots if x >= 0 and not self._paused[first + x]] if entry else []
        )
        for start in range(0, len(running), width):
          pages = self._shards[shard].entries[index]
          end = len(pages) * self._pool.page
          length = int(self._prompt_lengths[entry.prompt])
          _add_row(prompts, shard, slots, running[start : start + width], pages, end - length, end)
      for slot in np.flatnonzero((self.active & ~self._paused)[first : first + slots]).tolist():
        pages = self._slot_pages[first + slot]
        generated = int(self.generated[first + slot])
        if generated:
          used = pages[: self._pool.pages_of(generated)]
          _add_row(completions, shard, slots, [slot], used, 0, generated)
        _add_row(current, shard, slots, [slot], [slot], 0, 1)
        begin = generated // self._pool.page
        window = pages[begin : begin + self._pool.touched]
        written[shard, slot, : len(window)] = window
    return PageTables(prompts, completions, current, written.reshape(shards * slots, -1))

  def statistics(self) -> dict[str, float]:
    """Returns `sampling/waiting`, the share of chunks for which completions waited for pages."""
    return {"sampling/waiting": self._waited / max(self._waited + self._ran, 1)}

  def shrink(self, slots: int) -> np.ndarray:
    """Reduces every shard to `slots` slots; see `Scheduler`."""
    before = self.capacity.slots
    order = super().shrink(slots)
    kept = (order + np.arange(self.capacity.shards)[:, None] * before).ravel()
    self._slot_pages = [self._slot_pages[slot] for slot in kept]
    self._age = self._age[kept]
    self._paused = self._paused[kept]
    return order

  def _grant(self) -> None:
    """Gives every running completion the pages of its next chunk, or lets it wait."""
    pool = self._pool
    self._paused[:] = False
    limits = self._token_limits[self.completions[:, 0], self.completions[:, 1]]
    held = np.asarray([len(pages) for pages in self._slot_pages])
    need = pool.pages_of(limits) - held
    want = np.maximum(pool.pages_of(np.minimum(self.generated + pool.chunk, limits)) - held, 0)
    for shard, state in enumerate(self._shards):
      first = shard * self.capacity.slots
      running = first + np.flatnonzero(self.active[first : first + self.capacity.slots])
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
          self._slot_pages[slot] += [state.free.pop() for _ in range(count)]
          held[slot] += count
          need[slot] -= count
        else:
          self._paused[slot] = True

  def _has_space(self, shard: int, prompt: int) -> bool:
    """Returns whether the pool can hold another prompt and still let every completion end."""
    state = self._shards[shard]
    count = self._pool.pages_of(int(self._prompt_lengths[prompt]))
    cached = sum(map(len, state.entries.values()))
    if cached + count + self._pool.completion_pages > self._pool.pages:
      return False
    return _is_safe(len(state.free) - count, *self._running_pages(shard))

  def _running_pages(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pages that each running completion of a shard holds, and those it may need."""
    first = shard * self.capacity.slots
    running = first + np.flatnonzero(self.active[first : first + self.capacity.slots])
    held = np.asarray([len(self._slot_pages[slot]) for slot in running], np.int64)
    limits = self._token_limits[self.completions[running, 0], self.completions[running, 1]]
    return held, self._pool.pages_of(limits) - held

  def _entry_taken(self, shard: int, index: int, prompt: int) -> None:
    state = self._shards[shard]
    count = self._pool.pages_of(int(self._prompt_lengths[prompt]))
    state.entries[index] = [state.free.pop() for _ in range(count)]

  def _entry_freed(self, shard: int, index: int) -> None:
    state = self._shards[shard]
    state.free += state.entries.pop(index)

  def _can_start(self, shard: int, prompt: int, index: int) -> bool:
    count = self._pool.pages_of(int(self._drawn[prompt, index]))
    if not count:
      return True
    need = self._pool.pages_of(int(self._token_limits[prompt, index])) - count
    held, needed = self._running_pages(shard)
    free = len(self._shards[shard].free) - count
    return _is_safe(free, np.append(held, count), np.append(needed, need))

  def _slot_started(self, slot: int) -> None:
    self._age[slot] = self._started
    self._started += 1
    free = self._shards[slot // self.capacity.slots].free
    count = self._pool.pages_of(int(self.generated[slot]))
    self._slot_pages[slot] = [free.pop() for _ in range(count)]

  def _slots_freed(self, slots: np.ndarray) -> None:
    for slot in slots.tolist():
      self._shards[slot // self.capacity.slots].free += self._slot_pages[slot]
      self._slot_pages[slot] = []

  def _placed(
    self, pages: list[list[list[int]]], rows: int, width: int, where: Callable[[int], slice]
  ) -> np.ndarray:
    """Returns i32[shards, rows, width / page] with each row's pages at `where(their number)`."""
    places = self._unused_pages(len(pages), rows, width // self._pool.page)
    for of_shard, of_rows in zip(places, pages, strict=True):
      for place, numbers in zip(of_shard, of_rows, strict=False):
        place[where(len(numbers))] = numbers
    return places

  def _unused_pages(self, shards: int, rows: int, pages: int) -> np.ndarray:
    """Returns i32[shards, rows, pages] of numbers past the last page, different in each shard."""
    numbers = self._pool.pages + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    return np.repeat(numbers[None], shards, 0)


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
