"""Metrics of sampled groups by source, by hand."""

import numpy as np
from completions import completion

from gtpo_jax.arrays import Rewards
from gtpo_jax.data.records import Problem, user
from gtpo_jax.rollout.group_metrics import source_metrics
from gtpo_jax.rollout.groups import Group


def group(source, correct, scored=(True, True)):
  """A group of two completions with one token each."""
  correct = np.array(correct)
  scored = np.array(scored)
  rewards = Rewards(correct, correct * 2.0, np.full(2, -0.5), scored, scored)
  problem = Problem("1", user("q"), "2", "exact", source=source)
  completions = [completion((0, 0), j, [1]) for j in range(2)]
  return Group((0, 0), problem, 0, completions, rewards)


def test_accuracy_reward_and_share_of_each_source():
  groups = [
    group("rg:gcd", [True, False]),
    group("sums", [True, True], scored=[True, False]),
    group("rg:gcd", [False, False]),
    group("rg:gcd", [True, True]),
  ]
  assert source_metrics(groups) == {
    "source/rg:gcd/accuracy": 0.5,
    "source/rg:gcd/reward": 0.5,  # 2 * 0.5 - 0.5
    "source/rg:gcd/groups": 0.75,
    "source/sums/accuracy": 1.0,
    "source/sums/reward": 1.5,
    "source/sums/groups": 0.25,
  }


def test_a_run_with_one_source_has_no_such_metrics():
  assert source_metrics([group("", [True, False])]) == {}


def test_a_source_without_a_verdict_has_no_accuracy():
  metrics = source_metrics([group("a", [True, True], [False, False]), group("b", [True, True])])
  assert np.isnan(metrics["source/a/accuracy"]) and metrics["source/b/accuracy"] == 1
