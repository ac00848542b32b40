"""Comparisons within a group: which completions meet, and the share that each of them wins."""

from __future__ import annotations

from collections.abc import Sequence


def pairs_of(count: int, opponents: int) -> list[tuple[int, int]]:
  """Returns the comparisons of a group, each as the completion in the first place and the other.

  Completion i is in the first place against each of the next `opponents` ones, of which the first
  follow the last. So each is equally often in the first and in the second place.

  Args:
    count: the number of completions.
    opponents: at most count - 1 are used.
  """
  distances = range(1, min(opponents, count - 1) + 1)
  return [(i, (i + distance) % count) for distance in distances for i in range(count)]


def win_rates(
  count: int, pairs: Sequence[tuple[int, int]], rewards: Sequence[float | None]
) -> list[float | None]:
  """Returns the mean reward of each completion over its comparisons.

  Args:
    count: the number of completions.
    pairs: the comparisons.
    rewards: what the completion in the first place got, from 0 to 1; the other one gets the rest.
      Comparisons with None are left out. A completion without any other has None.
  """
  won: list[list[float]] = [[] for _ in range(count)]
  for (first, second), reward in zip(pairs, rewards, strict=True):
    if reward is not None:
      won[first].append(reward)
      won[second].append(1 - reward)
  return [sum(values) / len(values) if values else None for values in won]
