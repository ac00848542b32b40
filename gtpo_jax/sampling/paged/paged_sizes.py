"""The number of pages of a paged cache, and of the slots and prompts that share them."""

from __future__ import annotations

import dataclasses
import math

from gtpo_jax.runtime.fields import AUTO
from gtpo_jax.sampling.cache import PROMPTS, SLOTS, Part
from gtpo_jax.sampling.paged.cache import PagedCache
from gtpo_jax.sampling.paged.gpu_kernel import SLOTS_PER_ROW
from gtpo_jax.sampling.paged.memory import page_bytes, temporary_bytes
from gtpo_jax.sampling.paged.pool import PagePool, PoolSizes
from gtpo_jax.sampling.prefill.batches import rows_at_once
from gtpo_jax.sampling.programs import CacheSizes, ProgramSettings, state_bytes
from gtpo_jax.sampling.schedule.scheduler import Scheduler
from gtpo_jax.sampling.schedule.slots import ENTRY_FACTOR, Capacity, capacity_for
from gtpo_jax.sampling.settings import Demand

TPU_SLOTS_PER_ROW = 16  # slots of a prompt whose queries fill a matrix unit together
# Once an eighth of the slots is enough for the completions that are left, the others are dropped.
# There are no further numbers of slots: each needs a program, and the kernel's cost follows the
# positions in use.
FEWER_SLOTS = 8
# Prompts are padded to the longest length, or to a quarter, a sixteenth ... of it.
WIDTH_FACTOR = 4
# Lengths have a long tail: the median completion of a run is about a sixth of the longest.
TYPICAL_FRACTION = 6
SERVED_TOKENS = 1024  # the most of a prompt, and of an answer, by which a server chooses its slots


class PagedSizes(CacheSizes):
  """The sizes of a paged cache, for all batches; see `CacheSizes`.

  Attributes:
    pool: the sizes of the pool of each shard.
    slots: the most slots per shard.
    entries: the most cached prompts per shard.
    slot_counts: the numbers of slots per shard, descending.
  """

  def __init__(self, settings: ProgramSettings, cache: PagedCache):
    """Chooses the sizes.

    Args:
      settings: what the programs are made for, resolved for the platform.
      cache: the device functions of the cache.
    """
    super().__init__(settings, cache.model)
    config = settings.config
    page = config.page_size
    self._cache = cache
    self._max_tokens = settings.max_tokens
    self.slots, self.pool = self._slots_and_pool(settings)
    self.entries = self._entries(self.slots, settings.demand)
    self.longest_at_once = self.shards * self._holds(self._max_tokens)
    self.config = dataclasses.replace(config, slots=self.shards * self.slots)
    self.slot_counts = [count for count in (self.slots, self.slots // FEWER_SLOTS) if count]
    prompt_pages = self.pool.prompt_pages
    completion_pages = self.pool.completion_pages
    self.widths = {
      PROMPTS: _widths(prompt_pages, page),
      SLOTS: _widths(prompt_pages + completion_pages, page),
    }
    if config.batch_invariant:  # each program has one shape
      self.slot_counts = self.slot_counts[:1]
      self.widths = {part: widths[-1:] for part, widths in self.widths.items()}

  def _slots_and_pool(self, settings: ProgramSettings) -> tuple[int, PoolSizes]:
    """Returns the slots of each shard, and the sizes of its pool.

    Slots that follow the memory are halved until the pool holds as many completions of half the
    longest length, with their prompts. Otherwise many slots would wait for pages. What a server
    gets is taken to be shorter.
    """
    config = settings.config
    demand = settings.demand
    slots = max(self.most_slots // self.shards, 1)
    if demand.completions:
      slots = min(slots, -(-demand.completions // self.shards))
    while True:
      sizes = self._all_pages(settings, slots)
      pages = self._pages(config.cache_fraction, demand, slots, sizes)
      half = -(-sizes.completion_pages // 2)
      prompt = sizes.prompt_pages
      if demand.serves:
        half, prompt = (min(x, sizes.pages_of(SERVED_TOKENS)) for x in (half, prompt))
      typical = slots * half + -(-slots // demand.group) * prompt
      if config.slots != AUTO or pages >= typical or slots == 1:
        return slots, sizes._replace(pages=max(pages, sizes.completion_pages + sizes.prompt_pages))
      slots //= 2

  def _entries(self, slots: int, demand: Demand) -> int:
    """Returns the most cached prompts per shard.

    Gated delta nets keep as much of a prompt as of a completion, so that there are only half as
    many again as full groups need.
    """
    if not self.model.config.delta:
      return slots
    full_groups = -(-slots // demand.group)
    return min(slots, full_groups + -(-full_groups // 2))

  def _all_pages(self, settings: ProgramSettings, slots: int) -> PoolSizes:
    """Returns the sizes of a pool in which all slots can reach their longest length."""
    c = self.model.config
    page = settings.config.page_size
    prompt_pages = -(-min(settings.max_prompt_tokens, c.max_length) // page)
    completion_pages = -(-settings.max_tokens // page)
    cached_prompts = min(slots, ENTRY_FACTOR * -(-slots // settings.demand.group))
    everything = slots * completion_pages + cached_prompts * prompt_pages
    is_gpu = settings.config.attention == "triton"
    row = SLOTS_PER_ROW if is_gpu else TPU_SLOTS_PER_ROW
    return PoolSizes(everything, page, prompt_pages, completion_pages, self.chunk, row)

  def _pages(self, fraction: float | str, demand: Demand, slots: int, sizes: PoolSizes) -> int:
    """Returns the number of pages per shard, at most as in `sizes`."""
    if fraction != AUTO:
      return math.ceil(fraction * sizes.pages)
    if self.memory_left is None:
      return sizes.pages
    beside = temporary_bytes(self.model, slots, sizes)
    beside += state_bytes(self.model) * (slots + self._entries(slots, demand))
    return min((self.memory_left - beside) // page_bytes(self._cache), sizes.pages)

  def describe(self) -> str:
    """Returns how much the cache of a device holds."""
    size = self.pool.pages * page_bytes(self._cache) / 2**30
    median = max(self._max_tokens // TYPICAL_FRACTION, 1)
    return (
      f"{self.slots} slots and {self.pool.pages} pages of {self.pool.page} tokens per device "
      f"({size:.2f} GiB), which hold "
      f"{self._holds(self._max_tokens)} completions of {self._max_tokens} tokens, or "
      f"{self._holds(median)} of {median}"
    )

  def _holds(self, tokens: int) -> int:
    """Returns how many completions of so many tokens the pool of a shard holds, and a prompt."""
    pages = self.pool.pages - self.pool.prompt_pages
    return min(pages // self.pool.pages_of(tokens), self.slots)

  def scheduler(self, prompts: int, group: int) -> Scheduler:
    """Returns an empty schedule for about `prompts` x `group` completions."""
    needed = capacity_for(prompts, group, self.shards, self.slots * self.shards)
    slots = min(count for count in self.slot_counts if count >= needed.slots)
    capacity = needed._replace(slots=slots, entries=min(needed.entries, self.entries))
    return Scheduler(capacity, PagePool(capacity, self.pool))

  def idle(self, slots: int) -> Scheduler:
    """Returns a schedule without prompts, with this number of slots per shard."""
    capacity = Capacity(self.shards, slots, 1, 1)
    return Scheduler(capacity, PagePool(capacity, self.pool))

  def row_counts(self, scheduler: Scheduler, part: Part, width: int) -> list[int]:
    """Returns the one number of rows per shard that a batch of a width has."""
    return [rows_at_once(width, self.entries if part == PROMPTS else scheduler.capacity.slots)]


def _widths(pages: int, page: int) -> list[int]:
  """Returns the lengths, ascending, to which sequences of up to `pages` pages are padded."""
  widths = {pages}
  while pages > 1:
    pages = -(-pages // WIDTH_FACTOR)
    widths.add(pages)
  return [count * page for count in sorted(widths)]
