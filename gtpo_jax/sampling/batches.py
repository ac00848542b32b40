"""The host arrays of a prefill: prompts, and prompts with completions that go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.sampling.host_arrays import pad_prefill
from gtpo_jax.sampling.scheduler import Scheduler

# The most prompt tokens that a shard prefills at once. It bounds the memory of activations.
PREFILL_TOKENS = 8192

# For each shard, pairs of an entry or slot, and of the index of a sequence.
Assigned = list[list[tuple[int, int]]]


class Places(NamedTuple):
  """Where a cache puts keys and values.

  Both take the space, the assigned sequences, i32[shards, b / shards], the entry or slot of each
  row, and the positions of a row; both return what `Cache.insert` expects.
  """

  of_prompts: Callable[[Any, Assigned, np.ndarray, int], np.ndarray]
  of_completions: Callable[[Any, Assigned, np.ndarray, int], np.ndarray]


class PrefillShape(NamedTuple):
  """The shapes of a prefill."""

  width: int  # positions of a row
  most: int  # entries or slots per shard
  pad: int  # the padding id

  @property
  def rows(self) -> int:
    """The rows per shard."""
    return max(min(self.most, PREFILL_TOKENS // self.width), 1)


def prefill_batch(
  places: Places,
  scheduler: Scheduler,
  assigned: Assigned,
  prompts: Sequence[Sequence[int]],
  shape: PrefillShape,
) -> tuple[Prompts, np.ndarray, np.ndarray]:
  """Returns a batch of prompts, their entries i32[shards, b / shards], and their places.

  Args:
    places: of the cache.
    scheduler: the schedule.
    assigned: the (entry, prompt) pairs of each shard; without any, nothing is written.
    prompts: the token ids of all prompts.
    shape: that of the batch.
  """
  batch, entries = pad_prefill(assigned, prompts, shape.width, shape.rows, shape.most, shape.pad)
  return batch, entries, places.of_prompts(scheduler.space, assigned, entries, shape.width)


def resume_batch(
  places: Places,
  scheduler: Scheduler,
  assigned: Assigned,
  sequences: Sequence[Sequence[int]],
  shape: PrefillShape,
) -> tuple[Prompts, np.ndarray, tuple[np.ndarray, np.ndarray]]:
  """Returns a batch of completions that go on, their slots i32[shards, b / shards], and places.

  Args:
    places: of the cache.
    scheduler: the schedule.
    assigned: the (slot, sequence) pairs of each shard; without any, nothing is written.
    sequences: the token ids of prompts with their completions.
    shape: that of the batch.
  """
  batch, slots = pad_prefill(assigned, sequences, shape.width, shape.rows, shape.most, shape.pad)
  first = np.full_like(slots, shape.width)
  for shard, pairs in enumerate(assigned):
    for row, (slot, _) in enumerate(pairs):
      first[shard, row] -= scheduler.slots.generated[shard * shape.most + slot]
  where = places.of_completions(scheduler.space, assigned, slots, shape.width)
  return batch, slots, (where, first)


def nothing(shards: int) -> Assigned:
  """Returns no sequences, for each shard."""
  return [[] for _ in range(shards)]
