"""Samples completions of problems to their ends: for evaluations, or of a prompt alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.sampling.completion import Completion
from gtpo_jax.sampling.settings import SamplingParams

EVALUATION = -1  # groups of training have the numbers of their batches, which are not negative


def sample_problems(
  turns: Turns,
  policy: Policy,
  problems: Sequence[Problem],
  keys: np.ndarray,
  sampling_params: SamplingParams,
  pending: PendingRewards | None = None,
  stopping: Callable[[], bool] = lambda: False,
  first: int = 0,
) -> list[list[Completion]]:
  """Samples g completions of each problem, to their ends; each may be an episode.

  Args:
    turns: for g completions. Problem i of an evaluation has the random seed of (its seed, -1, i).
    policy: the policy to sample from.
    problems: n problems.
    keys: from `Engine.completion_keys`, u32[m >= n, g, 2]. Batches with the same m share their
      compiled programs.
    sampling_params: how tokens are drawn.
    pending: scores each completion as soon as it ends, while others are sampled.
    stopping: called after each chunk of tokens.
    first: the index of the first problem in the evaluation.

  Returns:
    n rows of g completions, group (-1, first + i) in row i.
  """
  groups = [Group((EVALUATION, i), problem, 0) for i, problem in enumerate(problems, first)]
  try:
    groups = turns.open(groups, 0, stopping)
    rows = policy.engine.completions([turns.encode(group) for group in groups], keys[: len(groups)])
    for group, row in zip(groups, rows, strict=True):
      for completion in row:
        completion.group = group.index
    for ended in turns.generate(policy, rows, sampling_params, stopping, len(keys)):
      if pending:
        pending.put(ended)
  finally:
    turns.discard()
  return rows


def sample_prompt(
  worker: RolloutWorker,
  policy: Policy,
  prompt: str,
  row: Mapping[str, Any],
  keys: np.ndarray,
  sampling_params: SamplingParams,
) -> list[Completion]:
  """Returns g completions of a prompt, which nothing scores.

  Args:
    worker: the worker.
    policy: the policy to sample from.
    prompt: the message of the user.
    row: further fields of the row that an environment gets.
    keys: from `Engine.completion_keys`, u32[1, g, 2].
    sampling_params: how tokens are drawn.
  """
  fields = dict(row)
  answer = str(fields.pop("answer", ""))
  problem = Problem(str(fields.pop("id", "0")), user(prompt), answer, "", fields)
  turns = Turns(worker, keys.shape[1])
  return sample_problems(turns, policy, [problem], keys, sampling_params)[0]
