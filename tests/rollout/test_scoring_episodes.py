"""Scores of episodes: who decides, what is wrong in any case, and what has no verdict."""

import math

import numpy as np
import pytest
from completions import completion
from toys import nested

from gtpo_jax.config import freeze
from gtpo_jax.data.records import Problem, user
from gtpo_jax.environments.turns import Episode, Stop, ToolCall, Turn
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards

PROBLEMS = [Problem("a", user("1+1="), "2", "last_number")]
SEEN = []


def episode(stop=Stop.ANSWERED, correct=None, scored=True, text="2", reward=0.5, tokens=3):
  """An episode of two turns, with a call in the first."""
  turns = (Turn("", calls=(ToolCall("add", {"a": 2**70}),)), Turn(text, index=1))
  info = {"near": 0.25}
  return Episode(turns, stop, reward, (0.0, reward), correct, scored, tokens, 0.1, info)


def score(*episodes, verifier=None, finished=True, **changes):
  """The scores of the completions of a problem, and their lengths."""
  settings = {"env.make": "m:C", "batch.group": len(episodes), **changes}
  manager = RewardManager(freeze(nested(settings)), verifier)
  problems = dict(enumerate(PROBLEMS))
  pending = PendingRewards(manager, problems, len(episodes), lambda rows: ["all"] * len(rows))
  completions = [completion(0, j, range(7), finished, x) for j, x in enumerate(episodes)]
  pending.put(completions)
  result = pending.result()
  manager.close()
  return result, completions


def test_the_environment_decides_or_else_the_verifier_of_the_last_text():
  result, completions = score(
    episode(), episode(text="3"), episode(correct=True, text="3"), episode(correct=False)
  )
  assert result.correct.tolist() == [[True, False, True, False]]
  assert result.scored.all()
  assert [x.drawn for x in completions] == [3, 3, 3, 3]  # not 7: observations were not drawn
  assert [x.text for x in completions] == ["all"] * 4
  assert [x.answer for x in completions] == ["2", "3", "3", "2"]
  assert completions[0].episode == episode()


def test_rewards_of_the_environment_that_nothing_reads_are_said_once(capsys):
  line = "the environment's rewards, such as 0.5, are not part of reward.parts = 'correct'"
  for _ in range(2):
    score(episode(), episode())
    assert capsys.readouterr().err.count(line) == 1  # of each run
  score(episode(correct=True, reward=1.0), episode(correct=False, reward=0.0))
  score(episode(), episode(), **{"reward.parts": "correct,env"})
  own = lambda prompts, completions, answers, extras, episodes: [True] * 2
  score(episode(), episode(), verifier=own)
  assert line not in capsys.readouterr().err


def test_a_limit_of_the_model_is_wrong_and_a_fault_of_the_environment_no_verdict():
  result, _ = score(
    episode(Stop.MAX_TURNS, correct=False),
    episode(Stop.ENV_ERROR, scored=False),
    episode(Stop.TIMEOUT, scored=False),
    episode(Stop.TIMEOUT, correct=False),  # env.on_timeout = "wrong"
    episode(),
  )
  assert result.correct.tolist() == [[False, False, False, False, True]]
  assert result.scored.tolist() == [[True, False, False, True, True]]
  assert result.metrics["reward/no_verdict"] == 2
  assert result.metrics["env/stop/timeout"] == pytest.approx(0.4)
  assert result.metrics["env/turns"] == 2 and result.metrics["env/near"] == 0.25


def test_a_fault_after_the_completion_was_cut_off_is_not_called_wrong():
  result, _ = score(episode(Stop.ENV_ERROR, scored=False), episode(), finished=False)
  assert result.scored.tolist() == [[False, True]] and not result.correct.any()


def test_a_users_verifier_gets_the_episodes_and_decides():
  def verifier(prompts, completions, answers, extras, episodes):
    SEEN.append((completions, [x.stop for x in episodes]))
    episodes[0].turns[0].calls[0].arguments.clear()  # its own copy
    return [True, True, None, True]

  result, completions = score(
    episode(correct=False),
    episode(Stop.MAX_CALLS, correct=False),
    episode(text="x"),
    episode(Stop.ENV_ERROR, scored=False),
    verifier=verifier,
  )
  assert SEEN == [(["2", "2", "x", "2"], ["answered", "max_calls", "answered", "env_error"])]
  assert result.correct.tolist() == [[True, False, False, False]]
  assert result.scored.tolist() == [[True, True, False, False]]
  assert completions[0].episode == episode(correct=False)


def test_rewards_of_the_environment_are_a_part():
  result, _ = score(
    episode(reward=0.5),
    episode(reward=-2.0, text="3"),
    reward__parts="correct*1,env*0.5",
    algorithm__name="grpo",
  )
  assert result.metrics["reward/part/env"] == pytest.approx(-0.75)
  np.testing.assert_allclose(result.reward, [[1 + 0.25, 0 - 1.0]])


def test_scores_without_episodes_have_no_metrics_of_them():
  manager = RewardManager(freeze({}))
  pending = PendingRewards(manager, dict(enumerate(PROBLEMS)), 1, lambda rows: ["2"] * len(rows))
  ended = completion(0, 0, range(2))
  pending.put([ended])
  result = pending.result()
  manager.close()
  assert result.correct.all() and ended.episode is None
  assert ended.answer == ended.text == "2"
  assert not [name for name in result.metrics if name.startswith("env/")]
  assert not math.isnan(result.reward[0, 0])
