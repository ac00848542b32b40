"""The studies of credit: stored results, statistics, arms, problems, products of credit."""

import json

import numpy as np
import pytest
from credit_arms import ARMS, BASELINE, TRAINED, ArmBatch
from credit_cancellation import products
from credit_tasks import HELD_OUT, TASKS, TRAINING_PROBLEMS, two_words, write_problems
from credit_tasks import config_of as task_config
from study import Cells, compare

from gtpo_jax.arrays import Rewards, Rollouts, Signals
from gtpo_jax.runtime.errors import UserError

N, G, T = 4, 4, 6


def test_results_are_computed_once_and_only_within_pattern_and_budget(tmp_path):
  now = [0.0]
  made = []

  def make():
    made.append(now[0])
    now[0] += 40.0
    return {"x": [1 / 3, float(len(made))]}

  cells = lambda **more: Cells(tmp_path / "out", tmp_path / "old", clock=lambda: now[0], **more)
  first = cells().compute("run-a", {"seed": 0}, make)
  assert first["x"] == [0.333333, 1.0] and first["settings"] == {"seed": 0}
  assert cells().compute("run-a", {"seed": 0}, make) == first and len(made) == 1
  with pytest.raises(UserError, match="other settings"):
    cells().compute("run-a", {"seed": 1}, make)

  some = cells(patterns=["run-b*"], budget_s=100.0)
  assert [some.compute(f"run-{name}", {}, make) is None for name in ("b1", "c", "b2", "b3")] == [
    False,
    True,
    False,
    True,  # 80 of 100 seconds are used, and a run takes 40
  ]
  assert some.left == ["run-c", "run-b3"]

  (tmp_path / "old").mkdir()
  (tmp_path / "old" / "run-d.json").write_text(json.dumps({"settings": {}, "x": 7}))
  assert cells().compute("run-d", {}, make)["x"] == 7 and len(made) == 3


def test_two_words_need_the_topic_and_both_words(tmp_path):
  extra = {"topic": "whale", "first": "rope", "second": "lamp"}
  texts = (
    "The whale carried a rope and a lamp.",
    "The whale carried a rope and a coin.",
    "The ship carried a rope and a lamp.",
  )
  assert two_words(texts, texts, texts, [extra] * 3) == [True, False, False]
  write_problems(tmp_path)
  held_out, training = (
    [
      json.loads(line)["prompt"]
      for line in (tmp_path / f"words-{x}.jsonl").read_text().splitlines()
    ]
    for x in ("eval", "train")
  )
  assert len(set(held_out)) == HELD_OUT and len(set(training)) == TRAINING_PROBLEMS
  assert not set(held_out) & set(training)


@pytest.mark.slow
def test_a_difference_is_paired_over_problems_and_seeds():
  run = lambda *correct: {"samples": 4, "correct": list(correct)}
  better = {0: run(3, 1, 2, 4), 1: run(3, 3, 4, 4), 2: run(0, 0, 0, 0)}
  worse = {0: run(2, 0, 1, 3), 1: run(2, 2, 3, 3)}
  difference, low, high, p_value = compare(better, worse)  # seed 2 has no pair
  assert (difference, low, high) == pytest.approx((0.25, 0.25, 0.25))
  assert p_value < 1e-3
  assert compare(worse, worse)[:3] == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def case():
  """A batch with known truth."""
  rng = np.random.default_rng(0)
  mask = np.arange(T) < rng.integers(2, T + 1, (N, G, 1))
  correct = rng.random((N, G)) < 0.5
  correct[:, :2] = [True, False]
  signals = Signals(
    entropy=np.where(mask, rng.gamma(1.0, 1.0, (N, G, T)), 0).astype(np.float32),
    mask=mask,
    correct=correct,
    reward=correct.astype(np.float32),
    penalty=np.zeros((N, G), np.float32),
  )
  codes = np.where(mask, rng.choice(np.uint8([1, 2, 3, 4, 11, 12]), mask.shape), 0)
  return ArmBatch(signals, codes, 0)


def advantages_of(name, batch):
  """Returns the advantages that an update with this arm computes."""
  signals = batch.signals
  rollouts = Rollouts(None, None, None, signals.mask, None, signals.entropy, None)
  rewards = Rewards(signals.correct, signals.reward, signals.penalty, None)
  rollouts, rewards = ARMS[name].changed(rollouts, rewards, batch)
  return np.asarray(ARMS[name].algorithm.advantages(Signals.of(rollouts, rewards)))


@pytest.mark.slow
def test_the_oracle_pays_deciding_tokens(case):
  uniform = advantages_of(BASELINE, case)
  oracle = advantages_of("oracle mask", case)
  decides = case.codes % 8 >= 3
  np.testing.assert_array_equal(oracle[decides], uniform[decides])
  assert not oracle[~decides].any() and oracle[decides].any()


@pytest.mark.slow
def test_shuffled_completions_exchange_the_credit_of_grpo_s_within_a_verdict(case):
  correct = case.signals.correct
  own, shuffled = (
    advantages_of(name, case).max(2, where=case.signals.mask, initial=-np.inf)
    for name in ("grpo_s, beta2 = 1", "grpo_s, entropies shuffled")
  )
  for i in range(len(correct)):
    for verdict in (False, True):
      of = correct[i] == verdict
      np.testing.assert_allclose(np.sort(shuffled[i, of]), np.sort(own[i, of]), atol=1e-5)
  assert not np.allclose(shuffled, own, atol=1e-2)


def test_every_task_has_a_config(tmp_path):
  for task, steps in TRAINED:
    name = task.partition("_lora")[0]
    config = task_config(task, tmp_path, seed=3)
    assert name in TASKS and steps in (12, 100) and config.seed == 3
    assert config.model.lora_rank == (16 if "_lora16" in task else 0)
  assert task_config("filler2", tmp_path).data.filler == 2


def test_credit_that_cancels_by_hand():
  """Two completions share the prefix (1,); the second token decides, and the first says nothing."""
  completions = [(1, 2), (1, 3)]
  log_probs = [np.log([0.5, 0.5])] * 2
  values = {(): 0.5, (1,): 0.5, (1, 2): 1.0, (1, 3): 0.0}
  found = products(completions, log_probs, np.array([1.0, 0.0]), [values, values])
  # As they stand, the credits are 1/2, 1/2, -1/2, -1/2, and the true ones 0, 1/2, 0, -1/2.
  assert found["tokens"] == pytest.approx((0.5, 1.0, 0.5))
  # By the logits, a token with p = 1/2 has (1/2, -1/2): the sum over both completions is (1/2,
  # -1/2) at the second state, and 0 at the first one.
  assert found["logits, alone"] == pytest.approx((0.25, 0.5, 0.25))
  assert found["logits, summed"] == found["from 2"] == pytest.approx((0.5, 0.5, 0.5))
  assert found["logits, summed"].cosine() == pytest.approx(1.0)
