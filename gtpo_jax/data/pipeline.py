"""Batches of problems: a pure function of (seed, step), so that a resumed run sees what it would have seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.runtime.errors import UserError


class Batches:
  """The training problems in shuffled epochs, `size` a batch, by random access; what comes next is read ahead.

  Of several sources each goes through epochs of its own, and they take turns in proportion to their weights.

  Args:
    parts: sources with their weights.
    size: problems a batch, of all processes together.
    seed: of the order.
    process: which of the `processes` this is. Each gets its rows of every batch, those behind one another that its devices hold: joined
      in order they are the batch of one process, so that the order does not depend on how many there are.
  """

  def __init__(
    self,
    parts: Sequence[tuple[Problems, float]],
    size: int,
    seed: int,
    process: int = 0,
    processes: int = 1,
  ):
    import grain

    if not 0 <= process < processes <= size:
      raise UserError(
        f"batch.prompts = {size} cannot be cut for process {process} of {processes}; it must be {processes} at least"
      )
    shuffled = [
      grain.MapDataset.source(problems).seed(seed).shuffle().repeat() for problems, _ in parts
    ]
    whole = (
      shuffled[0]
      if len(parts) == 1
      else grain.MapDataset.mix(shuffled, [weight for _, weight in parts])
    )
    rows = slice(size * process // processes, size * (process + 1) // processes)
    self._batches = whole.batch(size, batch_fn=lambda batch: list(batch)[rows])
    self._options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    self._next, self._ahead = -1, None

  def __getitem__(self, step: int) -> list[Problem]:
    if step != self._next:
      self._ahead = iter(self._batches[step:].to_iter_dataset(self._options))
    self._next = step + 1
    return next(self._ahead)


def fixed_sample(problems: Problems, count: int) -> list[Problem]:
  """The same `count` problems for every seed and every run; all of them if there are fewer."""
  return [
    problems[int(index)] for index in np.random.default_rng(0).permutation(len(problems))[:count]
  ]
