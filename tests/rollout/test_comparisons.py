"""A judge that compares the completions of a group, and 64 completions of a step at once."""

import re
import threading

import numpy as np
import pytest
from completions import completion
from judge_server import serving
from test_judging import managing

from gtpo_jax.data.records import Problem, user
from gtpo_jax.rewards.judge.judge import pairs_of, win_rates
from gtpo_jax.rollout.scoring.pending import PendingRewards

COMPARES = {
  "reward.judge.opponents": 2,
  "reward.judge.template": "{prompt}|{completion}|{other}",
  "reward.judge.pattern": "better: (A|B|tie)",
  "reward.judge.scale": "A=1,tie=0.5,B=0",
  "reward.parts": "verifier",
}


def longer(message, count):
  """The reply of a judge that prefers the longer text."""
  _, first, second = message.split("|")
  better = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
  return f"better: {better}"


def score(manager, texts, evaluates=False, answer=""):
  """The scores of groups of texts, whose completions end one after another."""
  problems = [Problem(str(i), user(f"q{i}"), answer, "exact") for i in range(len(texts))]
  decode = lambda rows: [texts[row[0]][row[1]] for row in rows]
  group = len(texts[0])
  pending = PendingRewards(manager, dict(enumerate(problems)), group, decode, evaluates)
  for j in range(group):
    ended = [completion(i, j, [i, j]) for i in range(len(texts))]
    pending.put(ended)
  return pending.result()


@pytest.mark.parametrize(("count", "opponents"), [(8, 1), (8, 3), (8, 7), (5, 2), (2, 1), (3, 9)])
def test_each_completion_is_equally_often_in_each_place(count, opponents):
  pairs = pairs_of(count, opponents)
  used = min(opponents, count - 1)
  assert len(set(pairs)) == len(pairs) == count * used
  assert all(first != second for first, second in pairs)
  for place in (0, 1):
    places = [pair[place] for pair in pairs]
    assert [places.count(i) for i in range(count)] == [used] * count
  assert pairs_of(1, 3) == []


def test_win_rates_by_hand():
  pairs = [(0, 1), (1, 2), (2, 0)]
  assert win_rates(3, pairs, [1.0, 0.5, None]) == [1.0, 0.25, 0.5]
  assert win_rates(3, pairs, [None, 1.0, None]) == [None, 1.0, 0.0]
  assert win_rates(2, [], []) == [None, None]


def test_the_completions_of_a_group_are_compared():
  groups = [["a", "bbb", "cc", "dddd"], ["ee", "ee", "f", "f"]]
  with serving(longer) as server, managing(server.url, **COMPARES) as manager:
    found = score(manager, groups)
    asked = {tuple(re.split(r"\|", message)) for message in server.messages}
  # Of 16 comparisons, 4 are of equal texts, and others are of the same texts.
  assert len(server.messages) == len(asked) == 8 + 2
  assert all(prompt == "q0" or {first, second} == {"ee", "f"} for prompt, first, second in asked)
  # By hand: distance 1 is a-bbb, bbb-cc, cc-dddd, dddd-a; distance 2 meets twice.
  np.testing.assert_allclose(found.reward[0], [0, 0.5, 0.5, 1])
  np.testing.assert_allclose(found.reward[1], [0.875, 0.875, 0.125, 0.125])
  np.testing.assert_array_equal(
    found.correct, [[False, True, True, True], [True, True] + [False] * 2]
  )
  assert found.scored.all() and found.metrics["judge/grade"] == pytest.approx(0.5)


def test_a_comparison_without_a_reply_is_left_out():
  bad = lambda message, count: "?" if "|a|" in message else longer(message, count)
  changes = COMPARES | {"reward.judge.opponents": 1}
  with serving(bad) as server, managing(server.url, **changes) as manager:
    found = score(manager, [["a", "bbb", "cc"]])
    np.testing.assert_allclose(found.reward, [[0, 1, 0.5]])  # a-bbb has no reply
    assert found.metrics["judge/failed"] == 1 and found.scored.all()
    np.testing.assert_array_equal(score(manager, [["a", "b"]]).scored, [[True, True]])


def test_an_evaluation_compares_with_the_answers():
  with serving(longer) as server, managing(server.url, **COMPARES) as manager:
    found = score(manager, [["a", "bbb", "cc"]], evaluates=True, answer="xx")
    texts = ("a", "bbb", "cc")
    both = {f"q0|{text}|xx" for text in texts} | {f"q0|xx|{text}" for text in texts}
    assert set(server.messages) == both and len(server.messages) == 6
    np.testing.assert_allclose(found.reward, [[0, 1, 0.5]])
    assert not score(manager, [["a"]], evaluates=True).scored.any()  # there is no answer


def test_sixty_four_completions_of_a_step_are_graded_sixteen_at_once(tmp_path):
  together = threading.Barrier(16)

  def answer(message, count):
    together.wait(60)  # until sixteen requests are under way
    return "Grade: 7"

  groups = [[f"{i}-{j}" for j in range(8)] for i in range(8)]
  for served in (64, 0):  # the second time, as in a resumed run, all replies are known
    with serving(answer) as server, managing(server.url, **{"reward.judge.model": "m"}) as manager:
      manager.grader.use_cache(tmp_path)
      found = score(manager, groups)
      assert found.correct.all() and len(server.messages) == served
      assert server.most == min(served, 16)
      assert found.metrics["judge/requests"] == served
      assert found.metrics["judge/cached"] == 64 - served
