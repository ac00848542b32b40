"""Batches of problems: a pure function of (seed, step), so a resumed run sees the same batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.runtime.errors import UserError

PREFETCHED_BATCHES = 2
MAX_DRAWS = 2**53  # problems of a run; Grain computes with their number as a float


class Batches:
  """Random access to batches of training problems, drawn in shuffled epochs.

  Several sources alternate in proportion to their weights, each in its own epochs. The next batches
  are prefetched.

  Args:
    sources: problems with their weights.
    size: problems per batch, over all processes together.
    seed: determines the order.
    process_index: index of this process.
    process_count: number of processes. Each receives a contiguous slice of every batch, the rows of
      its devices. The slices of all processes, concatenated in order, are the batch of a single
      process, so the data do not depend on the number of processes.
  """

  def __init__(
    self,
    sources: Sequence[tuple[Problems, float]],
    size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
  ):
    import grain

    if not 0 <= process_index < process_count <= size:
      raise UserError(
        f"batch.prompts = {size} cannot be divided for process {process_index} of {process_count}; "
        f"it must be at least {process_count}"
      )
    shuffled = [
      grain.MapDataset.source(problems).seed(seed).shuffle().repeat() for problems, _ in sources
    ]
    if len(sources) == 1:
      mixed = shuffled[0]
    else:
      mixed = grain.MapDataset.mix(shuffled, [weight for _, weight in sources])
    start = size * process_index // process_count
    stop = size * (process_index + 1) // process_count
    self._batches = mixed[:MAX_DRAWS].batch(size, batch_fn=lambda batch: list(batch)[start:stop])
    self._options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
    self._next_step = -1
    self._iterator = None

  def __getitem__(self, step: int) -> list[Problem]:
    if step != self._next_step:
      self._iterator = iter(self._batches[step:].to_iter_dataset(self._options))
    self._next_step = step + 1
    return next(self._iterator)


def fixed_sample(problems: Problems, count: int) -> list[Problem]:
  """Returns `count` problems, the same for every seed and run, or all if there are fewer."""
  order = np.random.default_rng(0).permutation(len(problems))
  return [problems[int(index)] for index in order[:count]]
