"""Samples episodes of problems to their ends: for evaluations, or of a prompt alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.data.records import Problem, user
from gtpo_jax.environments.turns import Episode
from gtpo_jax.rollout.episodes.driver import Start
from gtpo_jax.rollout.episodes.make import make_driver
from gtpo_jax.rollout.episodes.turns import episode_seed
from gtpo_jax.rollout.groups import EndedCompletion
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.sampling.settings import SamplingParams

EVALUATION = -1  # groups of training have the numbers of their batches, which are not negative


def sample_episodes(
  worker: RolloutWorker,
  policy: Policy,
  problems: Sequence[Problem],
  keys: np.ndarray,
  sampling_params: SamplingParams,
  pending: PendingRewards,
  stopping: Callable[[], bool],
  prompts_at_once: int | None = None,
  seed: int = 0,
  first: int = 0,
) -> Rollouts:
  """Samples g episodes of each problem, to their ends; see `RolloutWorker.sample`.

  Problem i of the evaluation has the random seed of (`seed`, -1, i).

  Args:
    worker: the worker, with a runner.
    policy: the policy to sample from.
    problems: n problems.
    keys: from `Engine.completion_keys`, u32[n, g, 2].
    sampling_params: how tokens are drawn.
    pending: scores each completion as soon as it ends.
    stopping: called after each chunk of tokens.
    prompts_at_once: at least n; batches with the same number share their compiled programs.
    seed: the run's seed.
    first: the index of the first problem in the evaluation.

  Returns:
    Rollouts [n, g, t] in host arrays.

  Raises:
    Stopped: `stopping` returned True.
  """
  driver = make_driver(worker, keys.shape[1])
  names = [(EVALUATION, first + i) for i in range(len(problems))]
  starts = [
    Start(name, problem, episode_seed(seed, name))
    for name, problem in zip(names, problems, strict=True)
  ]
  try:
    added = driver.open(starts, stopping)
    prompts = [
      driver.prompt(worker, problem, added[name])
      for name, problem in zip(names, problems, strict=True)
    ]
    buffer = policy.engine.buffer(prompts, keys)
    driver.attach(buffer, names)
    for turned in worker.generate(
      policy, buffer, sampling_params, stopping, prompts_at_once, driver
    ):
      pending.put(
        [
          EndedCompletion.of(buffer, i, j, problem=i, episode=driver.episode(i, j))
          for i, j in driver.advance(turned)
        ]
      )
  finally:
    driver.discard(names)
  return policy.engine.rollouts(buffer)


class _Ended:
  """Takes completions as `PendingRewards` does, and keeps their episodes."""

  def __init__(self):
    self.episodes: dict[int, Episode] = {}

  def put(self, completions: Sequence[EndedCompletion]) -> None:
    self.episodes |= {completion.index: completion.episode for completion in completions}


def play_prompt(
  worker: RolloutWorker,
  policy: Policy,
  prompt: str,
  row: Mapping[str, Any],
  keys: np.ndarray,
  sampling_params: SamplingParams,
) -> tuple[Rollouts, list[Episode]]:
  """Plays g episodes of a prompt, which nothing scores.

  Args:
    worker: the worker, with a runner.
    policy: the policy to sample from.
    prompt: the message of the user.
    row: further fields of the row that the environment gets.
    keys: from `Engine.completion_keys`, u32[1, g, 2].
    sampling_params: how tokens are drawn.

  Returns:
    Rollouts [1, g, t] in host arrays, and the g episodes.
  """
  fields = dict(row)
  answer = str(fields.pop("answer", ""))
  problem = Problem(str(fields.pop("id", "0")), user(prompt), answer, "", fields)
  ended = _Ended()
  rollouts = sample_episodes(worker, policy, [problem], keys, sampling_params, ended, lambda: False)
  return rollouts, [ended.episodes[j] for j in range(keys.shape[1])]
