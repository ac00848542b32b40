"""The batches of a prefill: prompts, and prompts with completions that go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sampling.schedule.scheduler import Scheduler

# The most prompt tokens that a shard prefills at once. It bounds the memory of activations.
PREFILL_TOKENS = 8192
# A batch of prompts has one of a few numbers of rows. Each is a quarter of the next, as long as its
# tokens are worth a program of their own.
ROW_FACTOR = 4
LEAST_TOKENS = 256
# Sequences with completions that go on are padded to one of these fractions of the longest one, or
# to a half, a quarter ... of the shortest of these lengths.
SEQUENCE_FRACTIONS = (1.0, 0.5**0.5, 0.5, 0.5**1.5)
SHORTEST_SEQUENCE = 32  # positions

# Token ids, by the index of their prompt or sequence.
TokenIds = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
# For each shard, pairs of an entry or slot, and of the index of a sequence.
Assigned = list[list[tuple[int, int]]]


class Places(NamedTuple):
  """Where a cache puts keys and values.

  Both take the space, the assigned sequences, i32[shards, b / shards], the entry or slot of each
  row, and the positions of a row; both return what `Cache.insert` expects.
  """

  of_prompts: Callable[[Any, Assigned, np.ndarray, int], np.ndarray]
  of_completions: Callable[[Any, Assigned, np.ndarray, int], np.ndarray]


class RoutesRead(NamedTuple):
  """The experts that computed the tokens of a prefill.

  Attributes:
    routes: [rows, width, layers with experts, k], as in `Rollouts`, on the devices; the tokens of a
      row are its last ones.
    rows: pairs of a row, and what the caller calls its sequence.
  """

  routes: Any
  rows: list[tuple[int, Any]]

  def of_sequences(self, lengths: Callable[[Any], int]) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields the name of each sequence and its routes, given the number of its tokens."""
    routes = np.asarray(self.routes)
    for row, name in self.rows:
      yield name, routes[row, routes.shape[1] - lengths(name) :]


def rows_of(assigned: Assigned, rows: int) -> list[tuple[int, int]]:
  """Returns pairs of a row of a batch and the index of its sequence.

  Args:
    assigned: the sequences of each shard.
    rows: per shard.
  """
  return [
    (shard * rows + row, sequence)
    for shard, pairs in enumerate(assigned)
    for row, (_, sequence) in enumerate(pairs)
  ]


class PrefillShape(NamedTuple):
  """The shapes of a prefill."""

  width: int  # positions of a row
  most: int  # entries or slots per shard
  pad: int  # the padding id

  @property
  def rows(self) -> int:
    """The rows per shard."""
    return max(min(self.most, PREFILL_TOKENS // self.width), 1)


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Pads prompts on the left to host arrays [n, width].

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  tokens = np.full((len(ids), width), pad, np.int32)
  for row, prompt in zip(tokens, ids, strict=True):
    if not len(prompt):
      raise UserError("a prompt is empty; give at least one token")
    if len(prompt) > width:
      raise UserError(
        f"a prompt has {len(prompt)} tokens, over the limit of {width}; "
        "raise data.max_prompt_tokens or shorten the prompt"
      )
    row[-len(prompt) :] = prompt
  return Prompts(tokens, np.asarray([len(prompt) for prompt in ids], np.int32))


def pad_prefill(
  assigned: list[list[tuple[int, int]]],
  prompts: TokenIds,
  width: int,
  rows: int,
  entries: int,
  pad: int,
) -> tuple[Prompts, np.ndarray]:
  """Builds one prefill batch of fixed shape from the scheduler's assignments.

  Args:
    assigned: for each shard, the (entry, prompt) pairs to prefill; at most `rows`.
    prompts: token ids of every prompt.
    width: tokens per row, at least the length of the longest prompt.
    rows: rows per shard; unused rows are padding.
    entries: prompt cache entries per shard.
    pad: the padding id.

  Returns:
    The prompts [shards * rows, width], and their entries i32[shards, rows]. The entry of an unused
    row is `entries`, which is out of bounds, so its write is dropped.
  """
  ids: list[Sequence[int]] = []
  entry_of_row: list[list[int]] = []
  for pairs in assigned:
    unused = rows - len(pairs)
    ids += [prompts[prompt] for _, prompt in pairs] + [[pad]] * unused
    entry_of_row.append([entry for entry, _ in pairs] + [entries] * unused)
  return pad_prompts(ids, width, pad), np.asarray(entry_of_row, np.int32)


def prefill_batch(
  places: Places, scheduler: Scheduler, assigned: Assigned, prompts: TokenIds, shape: PrefillShape
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
  rows: int,
) -> tuple[Prompts, np.ndarray, tuple[np.ndarray, np.ndarray]]:
  """Returns a batch of completions that go on, their slots i32[shards, b / shards], and places.

  Args:
    places: of the cache.
    scheduler: the schedule.
    assigned: the (slot, sequence) pairs of each shard; without any, nothing is written.
    sequences: the token ids of prompts with their completions.
    shape: that of the batch.
    rows: the rows of the batch per shard.
  """
  batch, slots = pad_prefill(assigned, sequences, shape.width, rows, shape.most, shape.pad)
  first = np.full_like(slots, shape.width)
  for shard, pairs in enumerate(assigned):
    for row, (slot, _) in enumerate(pairs):
      first[shard, row] -= scheduler.slots.generated[shard * shape.most + slot]
  where = places.of_completions(scheduler.space, assigned, slots, shape.width)
  return batch, slots, (where, first)


def without_copies(
  assigned: Assigned, prompts: TokenIds
) -> tuple[Assigned, dict[tuple[int, int], list[int]]]:
  """Returns the pairs with different prompts, and the entries of others with the same tokens.

  Args:
    assigned: the (entry, prompt) pairs of each shard.
    prompts: the token ids of all prompts.

  Returns:
    The first pair with each prompt, by shard; for its (shard, entry), the entries of the others.
  """
  distinct = nothing(len(assigned))
  copies: dict[tuple[int, int], list[int]] = {}
  for shard, pairs in enumerate(assigned):
    first: dict[tuple[int, ...], int] = {}
    for entry, prompt in pairs:
      tokens = tuple(prompts[prompt])
      if tokens in first:
        copies.setdefault((shard, first[tokens]), []).append(entry)
      else:
        first[tokens] = entry
        distinct[shard].append((entry, prompt))
  return distinct, copies


def with_copies(
  batch: Assigned, rows: int, assigned: Assigned, copies: Mapping[tuple[int, int], list[int]]
) -> list[tuple[int, int]]:
  """Returns pairs of a row of a batch and a prompt that it computes; copies have the same row.

  Args:
    batch: the (entry, prompt) pairs of the batch, by shard.
    rows: of the batch, per shard.
    assigned: all pairs.
    copies: from `without_copies`.
  """
  prompts = list(map(dict, assigned))
  return [
    (shard * rows + row, prompts[shard][same])
    for shard, pairs in enumerate(batch)
    for row, (entry, _) in enumerate(pairs)
    for same in (entry, *copies.get((shard, entry), ()))
  ]


def places_of_copies(
  assigned: Assigned, copies: Mapping[tuple[int, int], list[int]], like: np.ndarray, entries: int
) -> Iterator[np.ndarray]:
  """Yields arrays of entries i32[shards, b / shards] until every copy of a batch has had a place.

  Args:
    assigned: the (entry, prompt) pairs of the batch, by shard.
    copies: from `without_copies`.
    like: i32[shards, b / shards], the entries of the batch itself.
    entries: what says that a row has no entry.
  """
  left = {
    (shard, row): list(copies.get((shard, entry), ()))
    for shard, pairs in enumerate(assigned)
    for row, (entry, _) in enumerate(pairs)
  }
  while any(left.values()):
    places = np.full_like(like, entries)
    for place, others in left.items():
      if others:
        places[place] = others.pop()
    yield places


def nothing(shards: int) -> Assigned:
  """Returns no sequences, for each shard."""
  return [[] for _ in range(shards)]


class PrefillBatch(NamedTuple):
  """Prompts that are prefilled together, padded to one width."""

  width: int
  rows: int  # per shard
  assigned: Assigned


def row_counts(width: int, most: int) -> list[int]:
  """Returns the numbers of rows per shard that a batch of prompts may have, descending.

  Args:
    width: the positions of a row.
    most: the most prompts that a shard prefills at once.
  """
  counts = [PrefillShape(width, most, 0).rows]
  while (fewer := counts[-1] // ROW_FACTOR) * width >= LEAST_TOKENS:
    counts.append(fewer)
  return counts


def sequence_lengths(longest: int) -> list[int]:
  """Returns the lengths, ascending, to which sequences of up to `longest` tokens are padded.

  They are finer than those of other arrays (`array_lengths`), because episodes read their sequences
  again after each turn, and only the programs that do so depend on them.
  """
  lengths = [math.ceil(longest * fraction) for fraction in SEQUENCE_FRACTIONS]
  while (half := -(-lengths[-1] // 2)) >= SHORTEST_SEQUENCE:
    lengths.append(half)
  return sorted({length for length in lengths if length >= SHORTEST_SEQUENCE} | {longest})


def prefill_batches(
  assigned: Assigned, prompts: TokenIds, counts: Mapping[int, Sequence[int]], by_width: bool = False
) -> Iterator[PrefillBatch]:
  """Divides prompts into batches that are padded little: by width, and in numbers of rows.

  Rows that a batch does not need take the next shorter prompts.

  Args:
    assigned: the (entry, prompt) pairs of each shard.
    prompts: the token ids of all prompts.
    counts: the widths that batches may have, and for each the numbers of rows (`row_counts`).
    by_width: whether each prompt gets the width that it would get alone, because sums over arrays
      of another width are rounded otherwise.
  """
  longest_first = lambda pair: -len(prompts[pair[1]])
  left = [sorted(pairs, key=longest_first) for pairs in assigned]
  while any(left):
    longest = max(len(prompts[pairs[0][1]]) for pairs in left if pairs)
    width = min(width for width in counts if width >= longest)
    shorter = max((other for other in counts if other < width), default=0)
    needed = max(sum(len(prompts[prompt]) > shorter for _, prompt in pairs) for pairs in left)
    rows = _rows_for(needed, counts[width])
    least = shorter + 1 if by_width else 0
    taken = [[pair for pair in pairs[:rows] if len(prompts[pair[1]]) >= least] for pairs in left]
    yield PrefillBatch(width, rows, taken)
    left = [pairs[len(part) :] for pairs, part in zip(left, taken, strict=True)]


def _rows_for(needed: int, counts: Sequence[int]) -> int:
  """Returns the rows of the next batch: enough, unless more than half would be padding."""
  enough = [count for count in counts if needed <= count <= 2 * needed]
  fewer = [count for count in counts if count <= needed]
  return min(enough, default=max(fewer, default=counts[-1]))
