"""Means over episodes, of one batch and of several."""

import math
import random

from gtpo_jax.environments.metrics import Tallies, episode_tallies
from gtpo_jax.environments.turns import Episode, Stop, ToolCall, Turn


def episode(stop, calls, seconds, **info):
  turns = tuple(Turn("", calls=(ToolCall("f", {}),) * count) for count in calls)
  return Episode(turns, stop, 0.0, (), None, True, 0, seconds, info)


def test_metrics_are_means_over_episodes():
  metrics = episode_tallies(
    [
      episode(Stop.ANSWERED, [2, 1, 0], 1.0, failed_calls=1.0, turns=9.0),
      episode("max_turns", [1], 2.0, failed_calls=0.0, distance=4.0),
      episode(Stop.ANSWERED, [], 0.0),
      episode(Stop.TIMEOUT, [0, 0, 0, 0], 5.0, distance=2.0),
    ]
  ).metrics
  assert metrics["env/turns"] == 2.0
  assert metrics["env/calls"] == 1.0
  assert metrics["env/seconds"] == 2.0
  assert metrics["env/failed_calls"] == 0.25
  assert metrics["env/distance"] == 3.0
  assert metrics["env/stop/answered"] == 0.5
  assert metrics["env/stop/max_turns"] == metrics["env/stop/timeout"] == 0.25
  assert sum(value for name, value in metrics.items() if name.startswith("env/stop/")) == 1


def test_means_of_several_batches_are_means_over_all_their_episodes():
  """Random batches of any sizes; each metric is recomputed from all episodes together."""
  rng = random.Random(0)
  for _ in range(100):
    batches = [
      [
        episode(
          rng.choice(list(Stop)),
          [rng.randint(0, 3) for _ in range(rng.randint(0, 3))],
          rng.random(),
          **{name: rng.random() for name in ("a", "b", "failed_calls") if rng.random() < 0.5},
        )
        for _ in range(rng.randint(0, 5))
      ]
      for _ in range(rng.randint(1, 4))
    ]
    episodes = [x for batch in batches for x in batch]
    found = Tallies.total([episode_tallies(batch) for batch in batches]).metrics
    values = {
      "env/turns": [len(x.turns) for x in episodes],
      "env/calls": [x.calls for x in episodes],
      "env/seconds": [x.seconds for x in episodes],
      "env/failed_calls": [x.info.get("failed_calls", 0) for x in episodes],
      **{f"env/stop/{stop}": [x.stop == stop for x in episodes] for stop in Stop},
      **{f"env/{name}": [x.info[name] for x in episodes if name in x.info] for name in "ab"},
    }
    for name, numbers in values.items():
      if numbers:
        assert math.isclose(found[name], sum(numbers) / len(numbers), abs_tol=1e-12), name
      else:
        assert math.isnan(found.get(name, math.nan))
    assert found.keys() <= values.keys()
