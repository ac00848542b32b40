"""Means over episodes."""

from gtpo_jax.environments.metrics import episode_metrics
from gtpo_jax.environments.turns import Episode, Stop, ToolCall, Turn


def episode(stop, calls, seconds, **info):
  turns = tuple(Turn("", calls=(ToolCall("f", {}),) * count) for count in calls)
  return Episode(turns, stop, 0.0, (), None, True, 0, seconds, info)


def test_metrics_are_means_over_episodes():
  metrics = episode_metrics(
    [
      episode(Stop.ANSWERED, [2, 1, 0], 1.0, failed_calls=1.0, turns=9.0),
      episode("max_turns", [1], 2.0, failed_calls=0.0, distance=4.0),
      episode(Stop.ANSWERED, [], 0.0),
      episode(Stop.TIMEOUT, [0, 0, 0, 0], 5.0, distance=2.0),
    ]
  )
  assert metrics["env/turns"] == 2.0
  assert metrics["env/calls"] == 1.0
  assert metrics["env/seconds"] == 2.0
  assert metrics["env/failed_calls"] == 0.25
  assert metrics["env/distance"] == 3.0
  assert metrics["env/stop/answered"] == 0.5
  assert metrics["env/stop/max_turns"] == metrics["env/stop/timeout"] == 0.25
  assert sum(value for name, value in metrics.items() if name.startswith("env/stop/")) == 1
