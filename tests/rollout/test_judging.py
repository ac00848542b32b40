"""Scoring with a judge: verdicts, parts of the reward, and completions without a grade."""

import contextlib
import threading

import numpy as np
import pytest
from completions import completion
from judge_server import after, serving
from toys import config_of

from gtpo_jax.data.records import Problem, user
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.signals import Stopped

PROBLEMS = [Problem("a", user("1+1?"), "2", "math"), Problem("b", user("12+3:"), "15", "math")]
TEXTS = [r"\boxed{2}", r"\boxed{15}", "so", "cut off"]  # of each problem; the last is cut off
GRADES = dict(zip(TEXTS, ("Grade: 8", "Grade: 5", "no grade", "Grade: 10"), strict=True))


def by_text(message, count):
  return GRADES[message.split("|")[1]]


@contextlib.contextmanager
def managing(url, **changes):
  judge = {"base_url": url, "model": "m", "template": "{prompt}|{completion}|{answer}"}
  judge = {f"reward.judge.{key}": value for key, value in judge.items()}
  config = config_of(**{"algorithm.name": "grpo", **judge, **changes})
  with contextlib.closing(RewardManager(config)) as manager:
    yield manager


def pending_rewards(manager, group):
  problems = dict(enumerate(PROBLEMS))
  return PendingRewards(manager, problems, group, lambda rows: [TEXTS[row[0]] for row in rows])


def score(url, **changes):
  """The scores of TEXTS as completions of both problems, which end one after another."""
  with managing(url, **changes) as manager:
    pending = pending_rewards(manager, 4)
    for j in range(4):
      ended = [completion(i, j, [j], finished=j < 3) for i in range(2)]
      pending.put(ended)
    return pending.result()


def test_the_judge_decides():
  with serving(by_text) as server:
    found = score(server.url)
    # The one that was cut off is wrong, so the judge is not asked about it.
    assert {message.split("|")[1] for message in server.messages} == set(TEXTS[:3])
    assert {message.split("|")[0] for message in server.messages} == {"1+1?", "12+3:"}
  np.testing.assert_array_equal(found.correct, [[True, True, False, False]] * 2)
  np.testing.assert_array_equal(found.scored, [[True, True, False, True]] * 2)
  np.testing.assert_array_equal(found.valid, found.scored)
  np.testing.assert_array_equal(found.reward, [[1, 1, 0, 0]] * 2)
  assert found.metrics["reward/no_verdict"] == found.metrics["judge/failed"] == 2
  assert found.metrics["judge/grade"] == pytest.approx(0.65)
  assert found.metrics["judge/requests"] == 6 and found.metrics["judge/tokens"] == 42


def test_the_threshold():
  with serving(by_text) as server:
    found = score(server.url, **{"reward.judge.threshold": 0.6})
  np.testing.assert_array_equal(found.correct, [[True, False, False, False]] * 2)


def test_the_grade_as_the_reward():
  with serving(by_text) as server:
    found = score(server.url, **{"reward.parts": "verifier"})
    assert len(server.messages) == 8
  np.testing.assert_allclose(found.reward, [[0.8, 0.5, 0, 1]] * 2)
  np.testing.assert_array_equal(found.correct, [[True, True, False, False]] * 2)
  np.testing.assert_array_equal(found.scored, [[True, True, False, True]] * 2)
  assert found.metrics["reward/part/verifier"] == pytest.approx(2.3 / 3)


def test_the_judge_beside_the_verifiers():
  parts = {"reward.parts": "correct,judge*0.5", "reward.judge.decides": False}
  with serving(by_text) as server:
    found = score(server.url, **parts)
  np.testing.assert_array_equal(found.correct[:, :2], [[True, False], [False, True]])
  np.testing.assert_allclose(found.reward[:, [0, 1, 3]], [[1.4, 0.25, 0.5], [0.4, 1.25, 0.5]])
  np.testing.assert_array_equal(found.scored, [[True, True, False, True]] * 2)
  assert found.metrics["reward/part/judge"] == pytest.approx(2.3 / 3)


def test_a_slow_judgement_does_not_hold_up_others():
  """Completions that end later are graded while an earlier one still waits."""
  release = threading.Event()
  others = threading.Event()
  is_slow = lambda message: message.split("|")[1] == TEXTS[0]

  def answer(message, count):
    if is_slow(message):
      release.wait(20)
    elif sum(not is_slow(message) for message in server.messages) == 4:
      others.set()
    return "Grade: 5"

  with serving(answer) as server, managing(server.url) as manager:
    pending = pending_rewards(manager, 3)
    for j in range(3):
      pending.put([completion(i, j, [j]) for i in range(2)])
    assert others.wait(10)
    release.set()
    assert pending.result().scored.all()


def test_a_stop_request_ends_the_wait_and_the_grades_so_far_are_kept(tmp_path):
  slow = threading.Event()

  def answer(message, count):
    if message.split("|")[1] == TEXTS[0] and len(server.messages) < 7:
      slow.wait(30)
    return "Grade: 5"

  def pending_of(manager):
    pending = pending_rewards(manager, 3)
    ended = [completion(i, j, [j]) for i in range(2) for j in range(3)]
    pending.put(ended)
    return pending

  cached = lambda: len((tmp_path / "judge.jsonl").read_bytes().splitlines())
  with serving(answer) as server:
    with managing(server.url) as manager:
      manager.grader.use_cache(tmp_path)
      with pytest.raises(Stopped):
        pending_of(manager).result(lambda: cached() == 4)
    assert len(server.messages) == 6
    with managing(server.url) as manager:
      manager.grader.use_cache(tmp_path)
      found = pending_of(manager).result()
    assert len(server.messages) == 8  # the two that were not answered are asked for again
    assert found.scored.all() and found.metrics["judge/cached"] == 4
    slow.set()


def test_the_probe_of_a_run():
  said = []
  with serving(lambda *_: after(0, "ready")) as server, managing(server.url) as manager:
    manager.grader.probe(said.append)
    assert said[0].startswith(f"judge: m at {server.url} has replied in 0.")
    server.answer = lambda *_: (401, {}, {})
    with pytest.raises(UserError, match="wants a key"):
      manager.grader.probe(said.append)


def test_metrics_of_several_batches_are_of_all_completions_and_requests():
  answer = lambda message, count: after(0.0 if "C:a" in message else 0.1, "Grade: 7")
  with serving(answer) as server, managing(server.url) as manager:
    parts = []
    for texts in (["a"], ["b", "c", "d"], []):
      grades = np.asarray(
        [manager.grader.grade(PROBLEMS[:1] * len(texts), texts, [True] * len(texts))]
      )
      shape = np.ones(grades.shape, bool)
      values = [{}] if texts else []
      parts.append(manager.combine(grades, values, shape * 1, shape, grades).tallies)
  sums = [part.sums["judge/seconds"] for part in parts]
  assert sums[2] == 0 and np.isnan(parts[2].metrics["judge/seconds"])
  metrics = Tallies.total(parts).metrics
  assert metrics["judge/seconds"] == pytest.approx(sum(sums) / 4) and metrics["judge/requests"] == 4
  assert metrics["judge/grade"] == pytest.approx(0.7)
