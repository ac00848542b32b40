"""Which completions of a prompt share a row, so that the trainer computes less padding.

A row holds completions of one prompt only: they attend to the same prompt keys and values, and each
attends only to itself after them. Packing therefore moves nothing between devices, and all
statistics are per completion, packed or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gtpo_jax.arrays import Packing, array_lengths, max_per_row

# A group is packed into 1/4, 2/4, 3/4 or 4/4 as many rows as it has completions: each number of
# rows is a program of its own.
ROW_FRACTIONS = 4


class _Layout(NamedTuple):
  """The row of each completion, and its position in it."""

  row: np.ndarray  # i32[n, g], of w
  start: np.ndarray  # i32[n, g], first position, of s
  index: np.ndarray  # i32[n, g], completions before it in its row


def plan_rows(lengths: np.ndarray, t: int, share: bool = True, shards: int = 1) -> Packing | None:
  """Packs the completions of arrays [n, g, t] into rows, on the host.

  Rows are as short as `array_lengths` allows for the longest completion. There are as few as can
  hold every group: the longest completion is placed first, each in the row with the most space.

  Args:
    lengths: i32[n, g], tokens of each completion, at most t.
    t: maximum tokens of a completion.
    share: whether completions may share rows; if not, rows are only made shorter.
    shards: devices that a row's positions are split over.

  Returns:
    The packing, or None if it saves nothing.
  """
  n, g = lengths.shape
  s = next(size for size in array_lengths(t, shards) if size >= lengths.max(initial=0))
  w, layout = _fewest_rows(lengths, s) if share else (g, _fill(lengths, g, s))
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


def _fewest_rows(lengths: np.ndarray, s: int) -> tuple[int, _Layout]:
  """Returns the smallest number of rows that holds every group, and the layout."""
  g = lengths.shape[1]
  for numerator in range(1, ROW_FRACTIONS + 1):
    w = -(-numerator * g // ROW_FRACTIONS)
    layout = _fill(lengths, w, s)
    if layout is not None:
      return w, layout
  raise AssertionError("as many rows as completions always suffice")


def _fill(lengths: np.ndarray, w: int, s: int) -> _Layout | None:
  """Places every completion in w rows of s positions; None if they do not fit."""
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
