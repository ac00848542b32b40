"""Metrics as sums and numbers of values, so that means over several batches are true means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.environments.turns import Episode, Stop


class Tallies(NamedTuple):
  """Metrics of some completions, to which metrics of others can be added.

  Attributes:
    sums: by name.
    counts: the numbers of their values. A metric with a count is a mean, any other one the sum.
  """

  sums: Mapping[str, float]
  counts: Mapping[str, float]

  @classmethod
  def mean(cls, name: str, values: Any) -> Tallies:
    """Returns the mean of an array or a list of numbers; NaN stands for no value."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return cls({name: float(numbers.sum())}, {name: numbers.size})

  @classmethod
  def total(cls, parts: Sequence[Tallies]) -> Tallies:
    """Returns the metrics of the completions of all parts together."""
    return cls(_added([part.sums for part in parts]), _added([part.counts for part in parts]))

  def only(self, prefixes: tuple[str, ...]) -> Tallies:
    """Returns the metrics whose names have one of these prefixes."""
    return Tallies(
      *({name: x for name, x in part.items() if name.startswith(prefixes)} for part in self)
    )

  @property
  def metrics(self) -> dict[str, float]:
    """The metrics by name. A mean of nothing is NaN."""
    counts = {name: count or np.nan for name, count in self.counts.items()}
    return {name: total / counts.get(name, 1) for name, total in self.sums.items()}


def episode_tallies(episodes: Sequence[Episode]) -> Tallies:
  """Returns means over episodes, by name.

  These are turns, calls, failed calls and the seconds that environments took; the share of each
  reason to stop, as `env/stop/NAME`; and the numbers of `Step.info`, as `env/NAME`, over the
  episodes that have them.
  """
  failed = [episode.info.get("failed_calls", 0.0) for episode in episodes]
  values = {
    "turns": [len(episode.turns) for episode in episodes],
    "calls": [episode.calls for episode in episodes],
    "seconds": [episode.seconds for episode in episodes],
    "failed_calls": failed,
  }
  for stop in Stop:
    values[f"stop/{stop}"] = [episode.stop == stop for episode in episodes]
  for name in sorted({name for episode in episodes for name in episode.info} - values.keys()):
    values[name] = [episode.info[name] for episode in episodes if name in episode.info]
  return Tallies.total([Tallies.mean(f"env/{name}", numbers) for name, numbers in values.items()])


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  names = dict.fromkeys(name for part in parts for name in part)
  return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
