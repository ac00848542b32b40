"""Which completions of a prompt share a row, so that the trainer computes less padding.

A row holds completions of one prompt alone: they look at the same keys and values, each behind them at itself only. So packing moves
nothing between devices, and all statistics are of the completions, packed or not.
"""

from __future__ import annotations

import numpy as np

from gtpo_jax.arrays import Packing, most_in_row

QUARTERS = (
  4  # rows are so many quarters of a group at most: few numbers, for each is a program of its own
)
LEAST = 64  # the shortest rows


def widths(most: int, shards: int = 1) -> list[int]:
  """The lengths that rows of up to `most` places are made of: `most` and halves of it that divide over `shards`, down to `LEAST`."""
  sizes = [most]
  while sizes[0] % (2 * shards) == 0 and sizes[0] // 2 >= LEAST:
    sizes.insert(0, sizes[0] // 2)
  return sizes


def plan_rows(lengths: np.ndarray, t: int, share: bool = True, shards: int = 1) -> Packing | None:
  """The packing of completions of `lengths` i32[n, g] in arrays [n, g, t], on the host; None where it saves nothing.

  Rows are as wide as the longest completion needs, in steps of `widths`. Then as few as hold every group: the longest completion first,
  each into the row that has the most room left.

  Args:
    lengths: tokens of each completion, at most t.
    t: the most tokens of a completion.
    share: whether completions may share rows; else rows are made narrower alone.
    shards: over how many devices a row's positions are split.
  """
  n, g = lengths.shape
  s = next(size for size in widths(t, shards) if size >= lengths.max(initial=0))
  rows = (-(-quarters * g // QUARTERS) for quarters in range(1, QUARTERS + 1)) if share else (g,)
  w, found = next((w, found) for w in rows if (found := _fill(lengths, w, s)) is not None)
  if (w, s) == (g, t):
    return None
  (row, begin, number) = found
  m = most_in_row(g, w)
  segment = np.full((n, w, s), m, np.int32)
  source = np.full((n, w, s), -1, np.int32)
  for i, j in np.ndindex(n, g):
    places = i, row[i, j], slice(begin[i, j], begin[i, j] + lengths[i, j])
    segment[places] = number[i, j]
    source[places] = j * t + np.arange(lengths[i, j])
  return Packing(segment if m > 1 else None, source, row * s + begin)


def _fill(lengths: np.ndarray, w: int, s: int) -> np.ndarray | None:
  """Of each completion its row of w, its first place of s, and how many are before it in its row, i32[3, n, g]; None: they do not fit."""
  n, g = lengths.shape
  most = most_in_row(g, w)
  prompts = np.arange(n)
  used = np.zeros((n, w), np.int32)
  held = np.zeros((n, w), np.int32)
  found = np.zeros((3, n, g), np.int32)
  for j in np.argsort(-lengths, axis=1, kind="stable").T:  # of every prompt the next shorter one
    row = np.where(held < most, used, s + 1).argmin(1)
    at = prompts, row
    found[:, prompts, j] = row, used[at], held[at]
    used[at] += lengths[prompts, j]
    held[at] += 1
    if used.max() > s or held.max() > most:
      return None
  return found
