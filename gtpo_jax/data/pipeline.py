"""Batches of problems: a pure function of (seed, step), so that a resumed run sees what it would have seen."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.records import Problem, Problems


class Batches:
  """The training problems in shuffled epochs, `size` a batch, by random access.

  Of several sources each goes through epochs of its own, and they take turns in proportion to their weights.

  Args:
    parts: sources with their weights.
    size: problems a batch.
    seed: of the order.
  """

  def __init__(self, parts: Sequence[tuple[Problems, float]], size: int, seed: int):
    import grain
    shuffled = [grain.MapDataset.source(problems).seed(seed).shuffle().repeat() for problems, _ in parts]
    whole = shuffled[0] if len(parts) == 1 else grain.MapDataset.mix(shuffled, [weight for _, weight in parts])
    self._size, self._batches = size, whole.batch(size, batch_fn=list)

  def __getitem__(self, step: int) -> list[Problem]:
    return self._batches[step]


def fixed_sample(problems: Problems, count: int) -> list[Problem]:
  """The same `count` problems for every seed and every run; all of them if there are fewer."""
  return [problems[int(index)] for index in np.random.default_rng(0).permutation(len(problems))[:count]]
