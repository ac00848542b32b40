"""The batches of a prefill: prompts, and prompts with completions that are resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.arrays import Prompts
from gtpo_jax.runtime.errors import UserError

# The most prompt tokens that a shard prefills at once. It bounds the memory of activations.
PREFILL_TOKENS = 8192
# A batch of prompts has one of a few numbers of rows. Each is a quarter of the next, as long as its
# tokens are worth a program of their own.
ROW_FACTOR = 4
LEAST_TOKENS = 256
# Sequences with completions that are resumed are padded to one of these fractions of the longest,
# or to a half, a quarter ... of the shortest of these lengths.
SEQUENCE_FRACTIONS = (1.0, 0.5**0.5, 0.5, 0.5**1.5)
SHORTEST_SEQUENCE = 32  # positions

# Token ids, by what their prompt or sequence is called.
TokenIds = Sequence[Sequence[int]] | Mapping[Any, Sequence[int]]
# For each shard, pairs of an entry or slot, and of what its sequence is called.
Assigned = list[list[tuple[int, Any]]]
# For each shard and each row of a batch, the pairs that it is written to.
Written = Sequence[Sequence[Sequence[tuple[int, Any]]]]


class RoutesRead(NamedTuple):
  """The experts that computed the tokens of a prefill."""

  # [rows, width, layers with experts, k], as in `Rollouts`, on the devices; the tokens of a row
  # are its last ones
  routes: Any
  rows: list[tuple[int, Any]]  # pairs of a row, and what the caller calls its sequence


def routes_of(
  read: Sequence[RoutesRead], lengths: Callable[[Any], int]
) -> Iterator[tuple[Any, np.ndarray]]:
  """Yields the name of each sequence and its routes, given the number of its tokens."""
  for part in read:
    routes = np.asarray(part.routes)
    for row, name in part.rows:
      yield name, routes[row, routes.shape[1] - lengths(name) :]


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Pads prompts on the left to host arrays [n, width]."""
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


def rows_at_once(width: int, most: int) -> int:
  """Returns how many of up to `most` rows of `width` positions a shard prefills at once."""
  return max(min(most, PREFILL_TOKENS // width), 1)


# For the (shard, entry) of a sequence, the pairs of others with the same tokens.
Copies = dict[tuple[int, int], list[tuple[int, Any]]]


def without_copies(assigned: Assigned, sequences: TokenIds) -> tuple[Assigned, Copies]:
  """Returns the first pair with each sequence, by shard, and the pairs of the others.

  Args:
    assigned: the pairs of each shard.
    sequences: their token ids.
  """
  distinct = nothing(len(assigned))
  copies: Copies = {}
  for shard, pairs in enumerate(assigned):
    first: dict[tuple[int, ...], int] = {}
    for entry, name in pairs:
      tokens = tuple(sequences[name])
      if tokens in first:
        copies.setdefault((shard, first[tokens]), []).append((entry, name))
      else:
        first[tokens] = entry
        distinct[shard].append((entry, name))
  return distinct, copies


def nothing(shards: int) -> Assigned:
  """Returns no sequences, for each shard."""
  return [[] for _ in range(shards)]


class PrefillBatch(NamedTuple):
  """Sequences that are prefilled together, padded to one width."""

  width: int
  rows: int  # per shard
  assigned: Assigned

  def tokens(self, sequences: TokenIds, pad: int) -> Prompts:
    """Returns the sequences [shards * rows, width]; unused rows are padding."""
    ids: list[Sequence[int]] = []
    for pairs in self.assigned:
      ids += [sequences[name] for _, name in pairs] + [[pad]] * (self.rows - len(pairs))
    return pad_prompts(ids, self.width, pad)

  def written(self, copies: Copies) -> Written:
    """Returns what the rows are written to: what they are assigned to, and its copies."""
    return [
      [[pair, *copies.get((shard, pair[0]), ())] for pair in pairs]
      for shard, pairs in enumerate(self.assigned)
    ]

  def names(self, copies: Copies) -> list[tuple[int, Any]]:
    """Returns pairs of a row of the batch and a sequence that is written from it."""
    return [
      (shard * self.rows + row, name)
      for shard, of_shard in enumerate(self.written(copies))
      for row, pairs in enumerate(of_shard)
      for _, name in pairs
    ]


def row_counts(width: int, most: int) -> list[int]:
  """Returns the numbers of rows per shard that a batch of prompts may have, descending.

  Args:
    width: the positions of a row.
    most: the most prompts that a shard prefills at once.
  """
  counts = [rows_at_once(width, most)]
  while (fewer := counts[-1] // ROW_FACTOR) * width >= LEAST_TOKENS:
    counts.append(fewer)
  return counts


def sequence_lengths(longest: int) -> list[int]:
  """Returns the lengths, ascending, to which sequences of up to `longest` tokens are padded.

  They are finer than other arrays' (`array_lengths`), because episodes read their sequences
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
