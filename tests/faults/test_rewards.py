"""Batches with nothing to learn from, and rewards that fail in the midst of sampling: the run goes on, and the counters tell."""

import sys
import threading
import types

import jax
import numpy as np
import pytest

from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.config import default_config, freeze
from gtpo_jax.data.records import Problem, user
from gtpo_jax.loop import train
from gtpo_jax.models.qwen2 import init_params
from gtpo_jax.reporting.display import Display
from gtpo_jax.reporting.journal import read_jsonl
from gtpo_jax.rollout.scoring import PendingRewards
from gtpo_jax.rollout.worker import RolloutWorker

T = 14


def config_of(**changes):
  config = default_config()
  config.steps = 3
  config.mesh.data = 2
  config.mesh.fsdp = 2
  config.mesh.tensor = 2
  config.data.terms = 2
  config.data.max_prompt_tokens = 20
  config.sampling.max_tokens = T
  config.batch.prompts, config.batch.group = 8, 4
  config.eval.every = 0
  config.eval.problems = 8
  config.eval.samples = 1
  config.eval.batch = 8
  config.checkpoint.every, config.log.tensorboard = 3, False
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return freeze(config)


def keep_base(workdir, config, stop_logit):
  """A base model for which the end of a completion is (nearly) certain or impossible: each token predicts the embedding alone."""
  worker = RolloutWorker(config)
  params = init_params(worker.model, jax.random.key(0))
  layers = params["layers"]
  for part in ("o", "down"):
    layers[part]["kernel"] = layers[part]["kernel"] * 0
  table = params["embedding"].at[:, 0].set(1.0)
  params["embedding"] = jax.device_put(
    table.at[np.asarray(worker.chat.stop), 0].set(stop_logit), params["embedding"].sharding
  )
  kept = Checkpoints(workdir / "base", keep=1)
  kept.save_params(params)
  kept.close()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("stop_logit", "changes", "expected"),
  [
    (30.0, {}, {"length/mean": 1, "length/cut_off": 0, "completions/not_counted": 0}),
    (-30.0, {}, {"length/mean": T, "length/cut_off": 1, "completions/not_counted": 0}),
    (
      -30.0,
      {"algorithm.overlong_filter": True},
      {"length/mean": T, "length/cut_off": 1, "completions/not_counted": 1},
    ),
  ],
  ids=["empty completions", "everything cut off", "everything cut off and filtered"],
)
def test_batches_with_nothing_to_learn_from(tmp_path, stop_logit, changes, expected):
  config = config_of(**changes)
  keep_base(tmp_path / "run", config, stop_logit)
  assert train(config, tmp_path / "run", Display(enabled=False)).finished
  rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
  for row in rows[1:]:
    assert {name: row[name] for name in expected} == expected
    assert (
      row["reward/accuracy"] == 0 and row["groups/all_wrong"] == 1 and row["reward/no_verdict"] == 0
    )
    assert np.isfinite([row["loss"], row["grad_norm"]]).all() and row["update/skipped"] == 0
  for row in read_jsonl(tmp_path / "run" / "samples.jsonl"):
    assert (row["completion"] == "") == (stop_logit > 0) and row["correct"] is False


@pytest.mark.slow
def test_a_reward_that_raises_while_others_are_sampled(monkeypatch):
  """The sampler waits with its next chunk until the reward has failed: what it goes on to write is what it would have written."""
  failed = threading.Event()
  put = PendingRewards.put
  lives = []

  def judge(prompts, completions, answers, extras):
    if not lives:
      return [True] * len(completions)
    failed.set()
    raise RuntimeError("the reward is broken")

  def put_and_wait(self, ended):
    put(self, ended)
    for (i, _), *_ in ended:
      lives[0][i] += 1
    if 4 in lives[0] and not failed.is_set():
      assert failed.wait(60)
      lives.append(sum(lives[0]))

  monkeypatch.setitem(sys.modules, "failing_reward", types.SimpleNamespace(judge=judge))
  worker = RolloutWorker(
    config := config_of(**{"reward.verifier": "failing_reward:judge", "sampling.slots": 8})
  )
  problems = [Problem(str(i), user(f"{i}+1:"), str(i + 1), "last_number") for i in range(8)]
  policy = worker.policy(init_params(worker.model, jax.random.key(0)))

  def write():
    pending = worker.pending(problems, 4)
    return worker.generate(
      policy, problems, jax.random.key(1), 4, config.sampling_params, pending
    ), pending.result()

  whole, judged = write()
  assert judged.metrics["reward/no_verdict"] == 0
  lives.append([0] * 8)
  monkeypatch.setattr(PendingRewards, "put", put_and_wait)
  rollouts, found = write()
  assert lives[1] < 32  # it failed before all was written
  jax.tree.map(np.testing.assert_array_equal, rollouts, whole)
  np.testing.assert_array_equal(
    found.reached, ~np.asarray(rollouts.finished)
  )  # what was cut off is wrong without being asked
  np.testing.assert_array_equal(found.valid, found.reached)
  assert (
    found.metrics["reward/no_verdict"] == np.asarray(rollouts.finished).sum() > 0
    and not found.correct.any()
  )
