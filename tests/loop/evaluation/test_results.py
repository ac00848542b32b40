"""Evaluation results by hand: metrics, intervals, missing verdicts and rows of plain data."""

import dataclasses
import json

import numpy as np
import pytest

from gtpo_jax.data.records import Problem, user
from gtpo_jax.loop.evaluation.outcome import Evaluation, ScoredCompletions, default_ks

approx = pytest.approx


def completions(verdicts, texts=None, rewards=None, finished=None, answers=None):
  """Completions with these verdicts [n][g]; None for no verdict."""
  scored = np.array([[verdict is not None for verdict in row] for row in verdicts])
  correct = np.array([[bool(verdict) for verdict in row] for row in verdicts])
  texts = texts or [["1"] * len(row) for row in verdicts]
  return ScoredCompletions(
    texts=texts,
    answers=answers or texts,
    correct=correct,
    scored=scored,
    reward=np.asarray(correct if rewards is None else rewards, np.float32),
    lengths=np.full(correct.shape, 3),
    finished=np.ones_like(correct) if finished is None else np.array(finished),
  )


def evaluation(sampled, greedy, kind="last_number"):
  problems = [Problem(f"p{i}", user(f"{i}+1:"), "2", kind) for i in range(len(greedy))]
  return Evaluation("sums", problems, sampled, completions([[verdict] for verdict in greedy]))


VERDICTS = [[True, False, False], [True, True, True], [False, False, False]]
EVALUATION = evaluation(completions(VERDICTS), [True, True, False])


def test_metrics_by_hand():
  metrics = EVALUATION.metrics()
  assert metrics == {
    "eval/sums/mean@3": approx(4 / 9),
    "eval/sums/greedy": approx(2 / 3),
    "eval/sums/pass@1": approx(4 / 9),
    "eval/sums/pass@3": approx(2 / 3),
    "eval/sums/no_verdict": 0,
  }
  assert all(type(value) is float for value in metrics.values())


def test_the_summary_by_hand():
  texts = [["so 2", "it is 3", "4"], ["2", "2", "2"], ["5", "none", "5"]]
  rewards = [[1, 0.5, 0], [1, 1, 1], [0, 0.5, 0]]
  sampled = completions(VERDICTS, texts, rewards)
  summary = evaluation(sampled, [True, True, False]).summary([2])
  assert summary["problems"] == 3
  assert summary["samples"] == 3
  assert summary["eval/sums/pass@2"] == approx((2 / 3 + 1 + 0) / 3)
  best = ((1 + 1 + 0.5) / 3, 1, (0.5 + 0.5 + 0) / 3)
  assert summary["eval/sums/best@2"] == approx(sum(best) / 3)
  # In the first problem, two of three pairs have the answer 2, tied with another.
  assert summary["eval/sums/maj@2"] == approx((1 / 3 + 1 + 0) / 3)
  assert summary["eval/sums/length"] == 3
  assert summary["eval/sums/cut_off"] == 0
  names = ("mean@3", "greedy", "pass@2", "best@2", "maj@2")
  assert set(summary["intervals"]) == {f"eval/sums/{name}" for name in names}
  for key, (lower, upper) in summary["intervals"].items():
    assert 0 <= lower <= summary[key] <= upper <= 1
  assert summary["intervals"]["eval/sums/greedy"] == [0, 1]
  assert json.loads(json.dumps(summary)) == summary


def test_default_ks():
  assert default_ks(1) == [1]
  assert default_ks(2) == [1, 2]
  assert default_ks(3) == [1, 2, 3]
  assert default_ks(8) == [1, 2, 4, 8]
  assert default_ks(12) == [1, 2, 4, 8, 12]
  pass_keys = {key for key in EVALUATION.summary() if "pass@" in key}
  assert pass_keys == {f"eval/sums/pass@{k}" for k in (1, 2, 3)}


def test_completions_without_a_verdict_are_left_out_and_counted():
  sampled = completions([[True, None, False], [None, None, None], [True, True, True]])
  summary = evaluation(sampled, [None, True, False]).summary([1, 3])
  assert summary["eval/sums/mean@3"] == approx((1 / 2 + 1) / 2) == summary["eval/sums/pass@1"]
  assert summary["eval/sums/pass@3"] == 1  # only the third problem has three verdicts
  assert summary["eval/sums/greedy"] == 1 / 2
  assert summary["eval/sums/no_verdict"] == 5


def test_without_any_verdict_there_is_no_number():
  unscored = evaluation(completions([[None, None]]), [None])
  summary = unscored.summary()
  assert summary["eval/sums/mean@2"] is None
  assert summary["intervals"]["eval/sums/pass@2"] == [None, None]
  assert np.isnan(unscored.metrics()["eval/sums/mean@2"])


def test_a_completion_that_was_cut_off_abstains():
  finished = [[True, False, False]]
  sampled = completions([[True, False, False]], [["2", "3", "3"]], finished=finished)
  assert evaluation(sampled, [True]).summary([3])["eval/sums/maj@3"] == 1


def test_episodes_vote_with_the_texts_of_their_last_turns():
  """Their transcripts end with a number that no turn has."""
  answers = [["so 2", "it is 2", "4"]]
  sampled = completions([[True, True, False]], [["2 9", "2 9", "4 9"]], answers=answers)
  assert evaluation(sampled, [True]).summary([3])["eval/sums/maj@3"] == 1
  assert evaluation(sampled, [True]).summary([2])["eval/sums/maj@2"] == approx((1 + 0.5 * 2) / 3)
  rows = list(evaluation(sampled, [True]).rows())
  assert [sample["text"] for sample in rows[0]["samples"]] == ["2 9", "2 9", "4 9"]


def test_a_kind_without_answers_has_no_majority():
  summary = evaluation(completions([[True, False]]), [True], "code").summary()
  assert not any("maj@" in key for key in summary)


def test_a_k_above_the_number_of_samples_is_rejected():
  with pytest.raises(ValueError, match="got k = 4 and n = 3"):
    EVALUATION.summary([1, 4])


def test_rows_contain_every_completion():
  sampled = completions([[True, None]], [["2", "é"]], [[1.5, 0]], [[True, False]])
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


@pytest.mark.parametrize(
  ("verdicts", "finished", "judged"),
  [
    ([[True, None]], [[True, True]], True),
    ([[None, None]], [[True, True]], False),
    ([[None, False]], [[True, False]], False),  # cut off, so wrong without being judged
    ([[False, False]], [[False, False]], True),  # nothing to judge
  ],
)
def test_whether_anything_was_judged(verdicts, finished, judged):
  assert evaluation(completions(verdicts, finished=finished), [None]).judged is judged


def test_problems_of_several_sources_have_metrics_of_all_and_of_each():
  problems = [
    Problem(f"p{i}", user("1+1:"), "2", "last_number", source=source)
    for i, source in enumerate(["rg:gcd", "sums", "rg:gcd"])
  ]
  greedy = completions([[True], [True], [False]])
  mixed = Evaluation("all", problems, completions(VERDICTS), greedy)
  metrics = mixed.metrics()
  assert next(iter(metrics)) == "eval/all/mean@3"  # the one that summaries show
  assert metrics["eval/all/mean@3"] == approx(4 / 9)
  assert metrics["eval/rg:gcd/mean@3"] == approx(1 / 6)
  assert metrics["eval/sums/mean@3"] == 1 and metrics["eval/sums/greedy"] == 1
  assert metrics["eval/rg:gcd/greedy"] == 0.5 and metrics["eval/rg:gcd/pass@3"] == 0.5
  problems[1] = dataclasses.replace(problems[1], kind="code")
  summary = mixed.summary([1, 3])
  assert summary["eval/rg:gcd/pass@3"] == 0.5
  assert "eval/rg:gcd/maj@3" in summary and "eval/sums/maj@3" not in summary
  lower, upper = summary["intervals"]["eval/rg:gcd/pass@3"]
  assert 0 <= lower <= 0.5 <= upper <= 1
