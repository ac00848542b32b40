"""Packs the completions of a prompt into fewer or shorter rows, which saves work on padding.

All completions in a row belong to the same prompt. Each attends to the prompt's keys and values and
to its own tokens. Packing therefore moves nothing between devices, and every statistic is computed
per completion, packed or not.

Dimension letters: n prompts, g completions per prompt, t completion positions, w rows per prompt,
s positions per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gtpo_jax.arrays import Packing, array_lengths, max_per_row

# A group is packed into 1/4, 2/4, 3/4 or 4/4 as many rows as it has completions. More choices would
# save more padding, but each number of rows is compiled separately.
ROW_FRACTIONS = 4


class _Layout(NamedTuple):
  """Where each completion is placed."""

  row: np.ndarray  # i32[n, g], in [0, w)
  start: np.ndarray  # i32[n, g], its first position in the row, in [0, s)
  index: np.ndarray  # i32[n, g], number of completions before it in the row


def plan_rows(lengths: np.ndarray, t: int, shards: int = 1) -> Packing | None:
  """Plans, on the host, how the completions of arrays [n, g, t] are packed into rows [n, w, s].

  s is the smallest of `array_lengths` that fits the longest completion. w is the smallest of the
  allowed numbers of rows (see `ROW_FRACTIONS`) that fits every group. Completions are placed from
  the longest to the shortest, each in the row with the most space left. A row has at most
  `max_per_row` completions.

  Args:
    lengths: i32[n, g], tokens of each completion, at most t.
    t: maximum tokens of a completion.
    shards: number of devices that a row's positions are sharded over.

  Returns:
    The packing, or None if it saves nothing.
  """
  n, g = lengths.shape
  s = next(size for size in array_lengths(t, shards) if size >= lengths.max(initial=0))
  w, layout = _fewest_rows(lengths, s)
  if (w, s) == (g, t):
    return None
  padding = max_per_row(g, w)
  segment = np.full((n, w, s), padding, np.int32)
  source = np.full((n, w, s), -1, np.int32)
  for i, j in np.ndindex(n, g):
    start = layout.start[i, j]
    positions = (i, layout.row[i, j], slice(start, start + lengths[i, j]))
    segment[positions] = layout.index[i, j]
    source[positions] = j * t + np.arange(lengths[i, j])
  return Packing(segment if padding > 1 else None, source, layout.row * s + layout.start)


def count_shapes(g: int, t: int, shards: int = 1) -> int:
  """Returns the number of shapes [w, s] that `plan_rows` may choose for completions [g, t]."""
  return len(_row_counts(g)) * len(array_lengths(t, shards))


def _row_counts(g: int) -> list[int]:
  """Returns the allowed numbers of rows for g completions, ascending."""
  return sorted({-(-numerator * g // ROW_FRACTIONS) for numerator in range(1, ROW_FRACTIONS + 1)})


def _fewest_rows(lengths: np.ndarray, s: int) -> tuple[int, _Layout]:
  """Returns the smallest allowed number of rows that fits every group, and the layout."""
  for w in _row_counts(lengths.shape[1]):
    layout = _fill(lengths, w, s)
    if layout is not None:
      return w, layout
  raise AssertionError("as many rows as completions always suffice")


def _fill(lengths: np.ndarray, w: int, s: int) -> _Layout | None:
  """Places each group's completions in w rows of s positions; returns None if they do not fit."""
  n, g = lengths.shape
  max_completions = max_per_row(g, w)
  prompts = np.arange(n)
  used = np.zeros((n, w), np.int32)  # positions
  count = np.zeros((n, w), np.int32)  # completions
  layout = _Layout(*np.zeros((3, n, g), np.int32))
  for j in np.argsort(-lengths, axis=1, kind="stable").T:  # each prompt's next shorter completion
    row = np.where(count < max_completions, used, s + 1).argmin(1)
    layout.row[prompts, j] = row
    layout.start[prompts, j] = used[prompts, row]
    layout.index[prompts, j] = count[prompts, row]
    used[prompts, row] += lengths[prompts, j]
    count[prompts, row] += 1
    if used.max() > s or count.max() > max_completions:
      return None
  return layout
