"""Batches without a training signal, and rewards that fail during sampling.

The run continues, and the metrics count groups without a signal and missing verdicts.
"""

import collections
import sys
import threading
import types

import jax
import numpy as np
import pytest
from toys import small_run

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.data.records import Problem, user
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.loop import train
from gtpo_jax.models.params import init_params
from gtpo_jax.rollout.sample import EVALUATION, sample_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import RolloutWorker

T = 14


def make_config(**changes):
  return small_run(**{"steps": 3, "sampling.max_tokens": T, "checkpoint.every": 3, **changes})


def save_base_model(workdir, config, stop_logit):
  """Saves a base model that ends each completion almost immediately or almost never.

  Without attention and MLP outputs, its logits depend only on the last token's embedding.
  """
  worker = RolloutWorker(config)
  params = init_params(worker.model, jax.random.key(0))
  layers = params["layers"]
  for part in ("o", "down"):
    layers[part]["kernel"] = layers[part]["kernel"] * 0
  table = params["embedding"].at[:, 0].set(1.0)
  params["embedding"] = jax.device_put(
    table.at[np.asarray(worker.chat.stop), 0].set(stop_logit), params["embedding"].sharding
  )
  checkpoints = Checkpoints(workdir / "base", keep=1)
  checkpoints.save_params(params)
  checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("stop_logit", "changes", "expected"),
  [
    (30.0, {}, {"length/mean": 1, "length/cut_off": 0, "completions/not_counted": 0}),
    pytest.param(
      -30.0,
      {},
      {"length/mean": T, "length/cut_off": 1, "completions/not_counted": 0},
      marks=pytest.mark.manual,
    ),
    (
      -30.0,
      {"algorithm.overlong_filter": True},
      {"length/mean": T, "length/cut_off": 1, "completions/not_counted": 1},
    ),
  ],
  ids=["empty completions", "everything cut off", "everything cut off and filtered"],
)
def test_batches_without_a_training_signal(tmp_path, stop_logit, changes, expected):
  config = make_config(**changes)
  save_base_model(tmp_path / "run", config, stop_logit)
  assert train(config, tmp_path / "run", Display(enabled=False)).finished
  rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  for row in rows[1:]:
    assert {name: row[name] for name in expected} == expected
    assert row["reward/accuracy"] == 0
    assert row["groups/all_wrong"] == 1
    assert row["reward/no_verdict"] == 0
    # No token is trained on, so there is neither a loss nor a gradient.
    signal = [row[name] for name in ("update/empty", "update/skipped", "grad_norm", "loss")]
    assert signal == [1, 0, None, None], signal
  for row in read_jsonl(tmp_path / "run" / "samples.jsonl"):
    assert (row["completion"] == "") == (stop_logit > 0)
    assert row["correct"] is False


@pytest.mark.slow
def test_a_reward_that_raises_during_sampling(monkeypatch):
  """Completions that are still being sampled do not change.

  After one group is complete, the engine delays its next chunk until the reward has failed.
  """
  failing = False
  failed = threading.Event()
  ended = collections.Counter()  # completions per problem
  ended_at_failure = []

  def verify(prompts, completions, answers, extras):
    if not failing:
      return [True] * len(completions)
    failed.set()
    raise RuntimeError("the reward is broken")

  class WaitingRewards(PendingRewards):
    def put(self, completions):
      super().put(completions)
      ended.update(completion.group for completion in completions)
      if failing and 4 in ended.values() and not failed.is_set():
        assert failed.wait(60)
        ended_at_failure.append(ended.total())

  monkeypatch.setitem(sys.modules, "failing_reward", types.SimpleNamespace(verify=verify))
  config = make_config(**{"reward.verifier": "failing_reward:verify", "sampling.slots": 8})
  worker = RolloutWorker(config)
  reward_manager = RewardManager(config)
  problems = [Problem(str(i), user(f"{i}+1:"), str(i + 1), "last_number") for i in range(8)]
  policy = worker.policy(init_params(worker.model, jax.random.key(0)))

  keys = worker.engine.completion_keys(jax.random.key(1), len(problems), 4)

  def sample():
    by_group = {(EVALUATION, i): problem for i, problem in enumerate(problems)}
    pending = WaitingRewards(reward_manager, by_group, 4, worker.chat.decode)
    rows = sample_problems(
      Turns(worker, 4), policy, problems, keys, config.sampling_params, pending
    )
    return worker.engine.rollouts(rows), pending.result()

  expected, result = sample()
  assert result.metrics["reward/no_verdict"] == 0
  ended.clear()
  failing = True
  rollouts, result = sample()
  reward_manager.close()
  assert ended_at_failure[0] < 32  # the reward failed before all completions were sampled
  jax.tree.map(np.testing.assert_array_equal, rollouts, expected)
  # A completion that was cut off is wrong without calling a function.
  finished = np.asarray(rollouts.finished)
  np.testing.assert_array_equal(result.scored, ~finished)
  np.testing.assert_array_equal(result.valid, result.scored)
  assert result.metrics["reward/no_verdict"] == finished.sum() > 0
  assert not result.correct.any()
