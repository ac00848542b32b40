"""Evaluations by hand: metrics, intervals, missing verdicts, and what is written of each problem."""

import json

import numpy as np
import pytest

from gtpo_jax.data.records import Problem, user
from gtpo_jax.evaluation.evaluate import Answers, Evaluation, default_ks

N = None


def answers(verdicts, texts=None, rewards=None, finished=None):
  """Verdicts [n][g], None where there is none."""
  reached = np.array([[verdict is not None for verdict in row] for row in verdicts])
  correct = np.array([[bool(verdict) for verdict in row] for row in verdicts])
  return Answers(
    texts or [["1"] * len(row) for row in verdicts],
    correct,
    reached,
    np.asarray(correct if rewards is None else rewards, np.float32),
    np.full(correct.shape, 3),
    np.ones_like(correct) if finished is None else np.array(finished),
  )


def evaluation(sampled, greedy, kind="last_number"):
  problems = [Problem(f"p{i}", user(f"{i}+1:"), "2", kind) for i in range(len(greedy))]
  return Evaluation("sums", problems, sampled, answers([[verdict] for verdict in greedy]))


EVALUATION = evaluation(
  answers([[True, False, False], [True, True, True], [False, False, False]]), [True, True, False]
)
third = pytest.approx


def test_metrics_of_a_line_by_hand():
  assert EVALUATION.metrics() == {
    "eval/sums/mean@3": third(4 / 9),
    "eval/sums/greedy": third(2 / 3),
    "eval/sums/pass@1": third(4 / 9),
    "eval/sums/pass@3": third(2 / 3),
    "eval/sums/no_verdict": 0,
  }
  assert all(type(value) is float for value in EVALUATION.metrics().values())


def test_the_summary_by_hand():
  texts = [["so 2", "it is 3", "4"], ["2", "2", "2"], ["5", "none", "5"]]
  found = evaluation(
    answers(
      [[True, False, False], [True, True, True], [False, False, False]],
      texts,
      rewards=[[1, 0.5, 0], [1, 1, 1], [0, 0.5, 0]],
    ),
    [True, True, False],
  ).summary([2])
  assert found["problems"] == 3 and found["samples"] == 3
  assert found["eval/sums/pass@2"] == third((2 / 3 + 1 + 0) / 3)
  assert found["eval/sums/best@2"] == third(((1 + 1 + 0.5) / 3 + 1 + (0.5 + 0.5 + 0) / 3) / 3)
  assert found["eval/sums/maj@2"] == third(
    (1 / 3 + 1 + 0) / 3
  )  # two of three pairs hold the 2, in a tie
  assert found["eval/sums/length"] == 3 and found["eval/sums/cut_off"] == 0
  assert set(found["intervals"]) == {
    "eval/sums/" + key for key in ("mean@3", "greedy", "pass@2", "best@2", "maj@2")
  }
  for key, (lower, upper) in found["intervals"].items():
    assert 0 <= lower <= found[key] <= upper <= 1
  assert found["intervals"]["eval/sums/greedy"] == [0, 1]
  assert json.loads(json.dumps(found)) == found


def test_ks_by_default():
  assert [default_ks(g) for g in (1, 2, 3, 8, 12)] == [
    [1],
    [1, 2],
    [1, 2, 3],
    [1, 2, 4, 8],
    [1, 2, 4, 8, 12],
  ]
  assert {key for key in EVALUATION.summary() if "pass@" in key} == {
    f"eval/sums/pass@{k}" for k in (1, 2, 3)
  }


def test_completions_without_a_verdict_are_left_out_and_counted():
  found = evaluation(
    answers([[True, N, False], [N, N, N], [True, True, True]]), [N, True, False]
  ).summary([1, 3])
  assert found["eval/sums/mean@3"] == third((1 / 2 + 1) / 2) == found["eval/sums/pass@1"]
  assert found["eval/sums/pass@3"] == 1  # of the third problem alone: the first has two verdicts
  assert found["eval/sums/greedy"] == 1 / 2 and found["eval/sums/no_verdict"] == 5


def test_nothing_but_missing_verdicts_is_no_number():
  found = evaluation(answers([[N, N]]), [N]).summary()
  assert found["eval/sums/mean@2"] is None and found["intervals"]["eval/sums/pass@2"] == [
    None,
    None,
  ]
  assert np.isnan(evaluation(answers([[N, N]]), [N]).metrics()["eval/sums/mean@2"])


def test_what_was_cut_off_abstains():
  sampled = answers([[True, False, False]], [["2", "3", "3"]], finished=[[True, False, False]])
  assert evaluation(sampled, [True]).summary([3])["eval/sums/maj@3"] == 1


def test_kinds_without_answers_have_no_majority():
  assert not any(
    "maj@" in key for key in evaluation(answers([[True, False]]), [True], "code").summary()
  )


def test_more_samples_than_were_drawn_are_refused():
  with pytest.raises(ValueError, match="got k = 4 and n = 3"):
    EVALUATION.summary([1, 4])


def test_rows_tell_every_completion():
  sampled = answers([[True, N]], [["2", "é"]], rewards=[[1.5, 0]], finished=[[True, False]])
  (row,) = evaluation(sampled, [False]).rows()
  assert row == {
    "id": "p0",
    "prompt": "0+1:",
    "answer": "2",
    "kind": "last_number",
    "samples": [
      {"text": "2", "correct": True, "reward": 1.5, "length": 3, "finished": True},
      {"text": "é", "correct": None, "reward": 0.0, "length": 3, "finished": False},
    ],
    "greedy": {"text": "1", "correct": False, "reward": 0.0, "length": 3, "finished": True},
  }
