"""Scores of credit against the truth, checked by slow loops and by hand."""

import json

import numpy as np
import pytest
from toys import small_run

from gtpo_jax.logs.credit import credit_files, read_credit
from gtpo_jax.logs.credit_scores import (
  auroc,
  credit_scores,
  truth_metrics,
  turn_metrics,
  turn_table,
)
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train


def slow_auroc(x, target, mask):
  wins = pairs = 0
  for row in range(len(x)):
    for i in np.flatnonzero(mask[row] & target[row]):
      for j in np.flatnonzero(mask[row] & ~target[row]):
        pairs += 1
        wins += 1 if x[row, i] > x[row, j] else 0.5 if x[row, i] == x[row, j] else 0
  return wins / pairs


@pytest.mark.parametrize("rows", [1, 7])
def test_auroc_is_the_share_of_pairs_in_order(rows):
  rng = np.random.default_rng(rows)
  for _ in range(20):
    x = rng.integers(-3, 4, (rows, 12)).astype(float)  # many ties
    mask = rng.random(x.shape) < 0.8
    mask[0, :2] = True
    target = rng.random(x.shape) < 0.3
    target[0, :2] = [True, False]
    assert auroc(x, target, mask) == pytest.approx(slow_auroc(x, target, mask), abs=1e-12)


def test_auroc_of_scikit_learns_example():
  x = np.array([[0.1, 0.4, 0.35, 0.8]])
  assert auroc(x, np.array([[False, False, True, True]]), x > 0) == 0.75
  assert np.isnan(auroc(x, x > 0, x > 0))


def test_uniform_credit_scores_nothing_whatever_differs_between_completions():
  rng = np.random.default_rng(0)
  credit = np.broadcast_to(rng.normal(size=(4, 5, 1)).astype(np.float32), (4, 5, 9)) ** 2
  mask = np.arange(9) < rng.integers(3, 10, (4, 5, 1))
  target = rng.random(credit.shape) < 0.4
  scores = credit_scores(credit, target, mask)
  assert scores["auroc"] == 0.5
  assert scores["recall"] == 0.0
  assert np.isnan(scores["precision"])


def test_scores_by_hand():
  credit = np.float32([[[4.0, 1.0, 1.0, 2.0, 99.0]]])  # the mean is 2; 99 is padding
  target = np.array([[[True, False, True, False, True]]])
  mask = np.array([[[True] * 4 + [False]]])
  scores = credit_scores(credit, target, mask)
  # Pairs: 4 > 1, 4 > 2, 1 = 1, 1 < 2.
  assert scores["auroc"] == 2.5 / 4
  assert scores["lift"] == pytest.approx((5 / 8) / (2 / 4))
  assert (scores["precision"], scores["recall"]) == (1.0, 0.5)  # only the 4 is favoured


def test_metrics_by_hand():
  codes = np.uint8([[[4, 1, 0], [12, 1, 2]], [[4, 1, 2], [4, 1, 2]]])
  correct = np.array([[True, False], [True, True]])
  advantages = np.float32([[[3, 1, 9], [-1, -2, -3]], [[0, 0, 0], [0, 0, 0]]])
  entropy = np.float32([[[1, 0, 5], [2, 0, 4]], [[3, 0, 6], [2, 0, 8]]])
  metrics = truth_metrics(codes, correct, advantages, entropy)
  assert metrics["credit/truth_auroc_correct"] == 1.0  # 3 > 1
  assert metrics["credit/truth_auroc_incorrect"] == 0.0  # 1 < 2 and 1 < 3
  assert metrics["credit/truth_lift_correct"] == pytest.approx((3 / 4) / (1 / 2))
  assert metrics["credit/truth_lift_incorrect"] == pytest.approx((1 / 6) / (1 / 3))
  assert metrics["credit/truth_recall_incorrect"] == 0.0
  assert metrics["credit/w/decisive"] == 3 - -1
  assert metrics["credit/w/inert"] == 1 - -2
  assert np.isnan(metrics["credit/w/filler"])  # none in O+ of a group with advantages
  assert metrics["truth/entropy/decisive"] == (1 + 2 + 3 + 2) / 4
  assert metrics["truth/entropy/filler"] == (4 + 6 + 8) / 3
  assert metrics["truth/right/decisive"] == 3 / 4
  assert np.isnan(metrics["truth/right/copied"])


def test_turns_by_hand():
  """Two episodes of one prompt with three and two turns, and a prompt without any advantage.

  The credit of the turns is 1, -1, 2 (the mean of 1 and 3) and 0, 2. Of the truths 0.5, -0.5, 0.1
  and 0.2, NaN, three have a credit of the same sign, and that of 0.2 is 0. Of their six pairs, the
  credit orders (0.5, -0.5), (-0.5, 0.1), (-0.5, 0.2), (0.5, 0.2) rightly, and (0.5, 0.1) and (0.1,
  0.2) wrongly; in the first episode it orders two of three rightly.
  """
  nan = np.nan
  mask = np.array([[[1, 0, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0]], [[1, 0, 1, 0, 0, 0]] * 2], bool)
  advantages = np.float32([[[1, 9, -1, 9, 1, 3], [0, 9, 2, 0, 0, 0]], [[0] * 6] * 2])
  truth = np.float32(
    [
      [[0.5, nan, -0.5, nan, 0.1, 0.1], [0.2, nan, nan, nan, nan, nan]],
      [[7.0, nan, 7.0, nan, nan, nan]] * 2,
    ]
  )
  table = turn_table(truth, advantages, mask)
  assert table["credit"].tolist() == [1, -1, 2, 0, 2, 0, 0, 0, 0]
  assert table["episode"].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
  metrics = turn_metrics(truth, advantages, mask)
  assert metrics["known"] == 8 / 9
  assert metrics["sign"] == (3 + 0.5) / 4
  assert metrics["rank"] == pytest.approx((4 - 2) / 6)
  assert metrics["rank_episode"] == pytest.approx((2 - 1) / 3)
  unknown = turn_metrics(np.full_like(truth, nan), advantages, mask)
  assert unknown["known"] == 0 and np.isnan([unknown["sign"], unknown["rank"]]).all()
  uniform = np.broadcast_to(np.float32([[[1], [-1]], [[0], [0]]]), mask.shape)
  assert turn_metrics(truth, uniform, mask)["rank_episode"] == 0


def forks_config(**changes):
  common = {
    "steps": 1,
    "data.train": "forks",
    "data.terms": 1,
    "data.filler": 1,
    "sampling.max_tokens": 9,
    "batch.group": 8,
    "warm_start.steps": 60,
    "warm_start.batch": 64,
    "warm_start.optimizer.learning_rate": 6e-3,
  }
  return small_run(**{**common, **changes})


@pytest.mark.slow
def test_a_run_on_forks_logs_the_truth_and_stores_it(tmp_path):
  config = forks_config(**{"algorithm.compare": "sequence", "algorithm.alpha2": 1.0})
  assert train(config, tmp_path, Display(enabled=False)).finished
  row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
  record = read_credit(credit_files(tmp_path)[1])
  assert row["truth/known"] == pytest.approx((record.truth > 0).sum() / record.lengths.sum())
  assert row["truth/known"] > 0.3
  digit = [piece.isdigit() for piece in record.pieces]
  is_digit = np.asarray(digit)[record.piece] & record.mask[record.shown]
  known = record.truth[record.shown] > 0
  np.testing.assert_array_equal((record.truth[record.shown] & 7) >= 3, is_digit & known)
  assert row["truth/entropy/filler"] > row["truth/entropy/inert"]
  assert 0 < row["truth/right/decisive"] < 1
  assert {f"credit/w/{name}" for name in ("inert", "filler", "copied", "decisive")} <= row.keys()
