"""Metrics of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.environments.turns import Episode, Stop


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
  """Returns means over episodes, by name: at least one episode.

  These are turns, calls, failed calls and the seconds that environments took; the share of each
  reason to stop, as `env/stop/NAME`; and the numbers of `Step.info`, as `env/NAME`, over the
  episodes that have them.
  """
  metrics = {
    "env/turns": _mean([len(episode.turns) for episode in episodes]),
    "env/calls": _mean([episode.calls for episode in episodes]),
    "env/seconds": _mean([episode.seconds for episode in episodes]),
  }
  for stop in Stop:
    metrics[f"env/stop/{stop}"] = _mean([episode.stop == stop for episode in episodes])
  for name in sorted({name for episode in episodes for name in episode.info}):
    values = [episode.info[name] for episode in episodes if name in episode.info]
    metrics.setdefault(f"env/{name}", _mean(values))
  failed = [episode.info.get("failed_calls", 0.0) for episode in episodes]
  metrics["env/failed_calls"] = _mean(failed)
  return metrics


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values))
