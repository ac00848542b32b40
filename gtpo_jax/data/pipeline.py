"""Batches of problems: a pure function of (seed, step), so that a resumed run sees what it would have seen."""
from __future__ import annotations

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.data.tasks import Task


class Batches:
  """The training problems in shuffled epochs, `size` a batch, by random access."""

  def __init__(self, task: Task, size: int, seed: int):
    import grain
    problems = grain.MapDataset.source(task.train_ids).seed(seed).shuffle().repeat().map(task.problem)
    self._batches = problems.batch(size, batch_fn=list)

  def __getitem__(self, step: int) -> list[Problem]:
    return self._batches[step]


def held_out(task: Task, count: int) -> list[Problem]:
  """A fixed sample of held-out problems, the same for every seed and every run; all of them if there are fewer than `count`."""
  ids = np.random.default_rng(0).permutation(task.held_out_ids)[:count]
  return [task.problem(index) for index in ids]
