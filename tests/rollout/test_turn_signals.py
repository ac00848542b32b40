"""The rewards and states of turns on their way from episodes to the advantages."""

import dataclasses
import json

import numpy as np
import pytest

import gtpo_jax
from gtpo_jax.arrays import Rewards
from gtpo_jax.config import freeze
from gtpo_jax.environments import Step
from gtpo_jax.environments.episodes import Rules
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.turns import Episode, Stop, Turn
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.truth import turn_truth
from gtpo_jax.rollout.scoring.turn_signals import with_turns
from gtpo_jax.runtime.errors import UserError

SMALL = {
  "steps": 2,
  "data": {"max_prompt_tokens": 40},
  "model": {"preset": "tiny"},
  "batch": {"prompts": 2, "group": 4},
  "sampling": {"max_tokens": 48, "stop": ("a", "e", "i", "o", "u", " ")},
  "eval": {"problems": 2, "samples": 1, "batch": 2},
  "env": {"max_turns": 3},
  "reward": {"parts": "correct*1,env*0.5"},
  "log": {"tensorboard": False, "credit_every": 1},
}
ROWS = [{"prompt": f"{i}+1:", "answer": str(i + 1)} for i in range(6)]


def episode(rewards, states):
  turns = tuple(Turn(str(i)) for i in range(len(states)))
  total = sum(rewards)
  return Episode(turns, Stop.ENV_DONE, total, tuple(rewards), None, True, 3, 0.1, {}, "", states)


def test_rewards_and_states_of_tokens_by_hand():
  """A turn has half of its reward; the last one also has the rest of the completion's."""
  mask = np.array([[1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 0, 0], [0] * 6], bool)
  episodes = [
    episode([1.0, 0.0, 2.0], ("", "a", "b")),
    episode([0.0, 4.0], ("", "b")),
    episode([], ()),
  ]
  rewards = Rewards(*[np.zeros(3)] * 3)
  got = with_turns(rewards, np.array([5.0, 2.5, 1.0]), 0.5, mask, episodes)
  expected = [[0.5, 0.5, 0, 0, 0, 4.5], [0, 0, 2.5, 2.5, 0, 0], [0] * 6]
  np.testing.assert_allclose(got.turn_reward, expected)
  np.testing.assert_array_equal(got.turn_state, [[0, 0, 0, 1, 0, 2], [0, 0, 2, 2, 0, 0], [0] * 6])
  alone = with_turns(rewards, np.array([5.0, 2.5, 1.0]), 0.5, mask[:, :1], None)
  np.testing.assert_allclose(alone.turn_reward, [[5.0], [2.5], [0]])
  assert not alone.turn_state.any()


def test_truths_of_tokens_by_hand():
  """The second group has no episodes; the last turn of an episode was not answered."""
  mask = np.array([[[1, 1, 0, 1], [1, 0, 1, 0]]] * 2, bool)
  truths = [(0.5, None), (-0.25,)]
  played = [dataclasses.replace(episode([0.0] * 2, ("", "a")), truths=values) for values in truths]
  rules = Rules(EpisodeLimits())
  nan = np.nan
  rows = [{"answer": "1"}, {}]
  got = turn_truth(mask, rows, [played, None], rules)
  np.testing.assert_array_equal(got.pop("best")[0], [[0.5, 0.5, nan, nan], [-0.25] + [nan] * 3])
  assert not got

  class Knowing(Rules):
    def policy_truth(self, rows, episodes):
      assert rows == [{"answer": "1"}] and episodes == [played]
      return [[[1.0, 2.0], [nan, 3.0]]]

  got = turn_truth(mask, rows, [played, None], Knowing(EpisodeLimits()))["policy"]
  np.testing.assert_array_equal(got[0], [[1, 1, nan, 2], [nan, nan, 3, nan]])
  assert np.isnan(got[1]).all()
  assert turn_truth(mask, rows, [None, None], rules) == {}
  assert turn_truth(mask, rows, [played, None], None) == {}


class Steps:
  """Answers each turn by the parity of its length, and names the state by the number of turns."""

  def reset(self, row, seed):
    self.turns = 0

  def step(self, turn):
    self.turns += 1
    even = len(turn.text) % 2 == 0
    done = self.turns == 3
    return Step(
      "even" if even else "odd",
      reward=even,
      done=done,
      correct=done and even,
      state=str(self.turns),
      truth=even - 0.5,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  "settings",
  [
    {"name": "gigpo"},
    {"name": "gtpo", "turn_credit": "state", "compare": "state", "contrast": False},
  ],
)
def test_a_run_learns_from_turns(settings, tmp_path):
  """What its credit records hold are the turns of its episodes."""
  config = freeze(SMALL | {"algorithm": settings})
  gtpo_jax.train(config, tmp_path, Display(False), environment=Steps, data=ROWS, held_out=ROWS)
  from gtpo_jax.logs.credit import credit_files, read_credit, shaped_and_advantages

  record = read_credit(credit_files(tmp_path)[2])
  begins = record.mask & ~np.pad(record.mask[..., :-1], ((0, 0), (0, 0), (1, 0)))
  assert begins.sum(-1).max() == 3
  turns = np.where(begins, record.turn_reward, 0).sum(-1)
  np.testing.assert_allclose(turns, record.reward + record.penalty, atol=1e-5)
  assert set(record.turn_state[begins]) == {0, 1, 2}
  assert set(record.turn_truth[begins]) == {-0.5, 0.5}
  row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
  assert row["truth/turn_known/best"] == 1 and "truth/turn_known/policy" not in row
  assert row["truth/turn_sign/best"] > 0.6 and row["truth/turn_rank_episode/best"] > 0.3
  algorithm = config.resolved_algorithm
  _, advantages = shaped_and_advantages(algorithm, record.signals(algorithm))
  of_turns = np.where(record.mask, advantages, np.nan)
  assert np.isfinite(of_turns[record.mask]).all() and np.nanstd(of_turns, -1).max() > 0.1


def test_an_agent_has_no_rewards_of_turns():
  config = {"env": {"agent": "my_agent:run"}, "algorithm": {"name": "gigpo"}}
  with pytest.raises(UserError, match=r"turn_credit = 'state' compares turns of an environment"):
    freeze(config)
  assert dataclasses.replace(freeze({"algorithm": {"name": "gigpo"}}), steps=3).steps == 3
