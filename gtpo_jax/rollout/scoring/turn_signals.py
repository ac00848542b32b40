"""Rewards and states of turns, as arrays over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
  """Returns the rewards of a group with its turns'.

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
  numbers: dict[str, int] = {}
  for j, count in enumerate(first_tokens(mask).sum(-1)):
    if not count:
      continue
    values = np.zeros(count, np.float32)
    states = [""] * count
    if episodes:
      known = episodes[j].rewards[:count]
      values[: len(known)] = env_weight * np.asarray(known, np.float64)
      states[: len(episodes[j].states)] = episodes[j].states[:count]
    values[-1] += total[j] - values.sum()
    write_turns(values, mask[j], turn_reward[j])
    write_turns(
      [numbers.setdefault(state, len(numbers)) for state in states], mask[j], turn_state[j]
    )
  return rewards.replace(turn_reward=turn_reward, turn_state=turn_state)


def first_tokens(mask: np.ndarray) -> np.ndarray:
  """Returns the first tokens of turns, bool[..., t]."""
  before = np.zeros_like(mask)
  before[..., 1:] = mask[..., :-1]
  return mask & ~before


def write_turns(values: Sequence[Any], mask: np.ndarray, out: np.ndarray) -> None:
  """Writes the values of an episode's first turns on their tokens; `mask` and `out` are [t]."""
  turn = np.cumsum(first_tokens(mask)) - 1
  known = mask & (turn < len(values))
  out[known] = np.asarray(values, out.dtype)[turn[known]]
