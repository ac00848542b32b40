"""The rewards and the states of turns, as arrays over tokens, for algorithms that compare turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.arrays import Rewards
from gtpo_jax.environments.turns import Episode


def with_turns(
  rewards: Rewards,
  total: np.ndarray,
  env_weight: float,
  mask: np.ndarray,
  episodes: Sequence[Episode] | None,
) -> Rewards:
  """Returns the rewards of a group with those of its turns.

  A turn gets the environment's reward for it, times the weight of the part "env". The last turn
  also gets all that is left of the completion's reward. States are numbered from 0 in the order in
  which they first occur in the group.

  Args:
    rewards: of a group, [g].
    total: f32[g], the reward of each completion, with the length penalty.
    env_weight: the weight of the part "env".
    mask: bool[g, t], the tokens that were drawn.
    episodes: of the g completions; None without an environment, where each is one turn.
  """
  turn_reward = np.zeros(mask.shape, np.float32)
  turn_state = np.zeros(mask.shape, np.int32)
  begins = mask & ~np.pad(mask[:, :-1], ((0, 0), (1, 0)))
  numbers: dict[str, int] = {}
  for j, row in enumerate(np.cumsum(begins, -1) - 1):
    count = int(begins[j].sum())
    if not count:
      continue
    values = np.zeros(count, np.float32)
    states = [""] * count
    if episodes:
      known = episodes[j].rewards[:count]
      values[: len(known)] = env_weight * np.asarray(known, np.float64)
      states[: len(episodes[j].states)] = episodes[j].states[:count]
    values[-1] += total[j] - values.sum()
    numbered = np.asarray([numbers.setdefault(state, len(numbers)) for state in states], np.int32)
    turn_reward[j] = np.where(mask[j], values[row], 0.0)
    turn_state[j] = np.where(mask[j], numbered[row], 0)
  return rewards.replace(turn_reward=turn_reward, turn_state=turn_state)
