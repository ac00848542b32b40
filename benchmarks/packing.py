"""Estimates what the few shapes of a packed update cost, against 36 shapes.

  python benchmarks/packing.py

Lengths of completions are log-normal. The cost of a batch is that of its rows: the products of the
layers grow with the positions, attention with the positions times their row's length. At full
length, attention is taken to be a third of the update.
"""

from __future__ import annotations

import numpy as np

from gtpo_jax.arrays import array_lengths
from gtpo_jax.training.packing import plan_rows, row_shapes

ATTENTION = 0.5  # of the time of all other products, at full length
T = 18432
BATCHES = 4
MEDIANS = (300, 1000, 3000, 6000)
SPREADS = (0.5, 0.9)  # standard deviations of the logarithm
SIZES = ((16, 4), (64, 16))  # prompts, completions of each


def cost(rows: int, length: int) -> float:
  """Returns the relative cost of a prompt's rows."""
  return rows * length * (1 + ATTENTION * length / T)


def chosen_cost(lengths: np.ndarray) -> float:
  """Returns the cost of the shape that is chosen for lengths i32[n, g]."""
  packing = plan_rows(lengths, T)
  return cost(lengths.shape[1], T) if packing is None else cost(*packing.source.shape[1:])


def least_cost(lengths: np.ndarray) -> float:
  """Returns the least cost of 1/4, 2/4, 3/4 or 4/4 of the rows, of any halved length: 36 shapes."""
  g = lengths.shape[1]
  costs = []
  for s in array_lengths(T):
    if s >= lengths.max():
      quarters = -(-4 * fewest_rows(lengths, s) // g)
      costs += [cost(-(-quarters * g // 4), s)] if quarters <= 4 else []
  return min(costs)


def fewest_rows(lengths: np.ndarray, s: int) -> int:
  """Returns how many rows of length s every prompt's completions fit in, longest first."""
  most = 0
  for group in -np.sort(-lengths, axis=1):
    free: list[int] = []
    for length in group:
      fits = [i for i, space in enumerate(free) if space >= length]
      if not fits:
        free.append(s)
        fits = [len(free) - 1]
      free[max(fits, key=free.__getitem__)] -= length
    most = max(most, len(free))
  return most


def main() -> None:
  """Prints a table."""
  rng = np.random.default_rng(0)
  print(f"{len(row_shapes(16, T))} shapes, completions of up to {T} tokens")
  print("median  spread  prompts x group  cost, relative to the best of 36 shapes")
  for median in MEDIANS:
    for spread in SPREADS:
      for n, g in SIZES:
        draws = rng.lognormal(np.log(median), spread, (BATCHES, n, g))
        batches = np.clip(draws, 1, T).astype(np.int32)
        ratio = sum(map(chosen_cost, batches)) / sum(map(least_cost, batches))
        print(f"{median:6}  {spread:6}  {n:7} x {g:<5}  {ratio:.2f}")


if __name__ == "__main__":
  main()
