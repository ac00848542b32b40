"""Plays episodes for `gtpo sample`, and prints their turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gtpo_jax.runtime.errors import UserError

if TYPE_CHECKING:
  import jax

  from gtpo_jax.environments.turns import Episode
  from gtpo_jax.models.params import Params
  from gtpo_jax.rollout.groups import EndedCompletion
  from gtpo_jax.rollout.worker import RolloutWorker
  from gtpo_jax.sampling.settings import SamplingParams

DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # how a terminal shows what the model has read


class _Ended:
  """Takes completions as `PendingRewards` does, and keeps their episodes."""

  def __init__(self):
    self.episodes: dict[int, Episode] = {}

  def put(self, completions: Sequence[EndedCompletion]) -> None:
    self.episodes |= {completion.index: completion.episode for completion in completions}


def parse_row(text: str) -> Mapping[str, Any]:
  """Returns the row of `--row`, which is a JSON object.

  Raises:
    UserError: it is none.
  """
  try:
    row = json.loads(text)
  except ValueError as error:
    raise UserError(f"--row is not valid JSON: {error}") from error
  if not isinstance(row, dict):
    raise UserError(f'--row must be a JSON object, such as \'{{"answer": "20"}}\', got {text!r}')
  return row


def print_episodes(
  worker: RolloutWorker,
  params: Params,
  prompt: str,
  row: Mapping[str, Any],
  keys: Callable[[int, int], jax.Array],
  n: int,
  sampling_params: SamplingParams,
  show: Callable[[str], str],
) -> None:
  """Plays `n` episodes of a prompt, and prints each with why it ended.

  Args:
    worker: has the runner.
    params: the parameters of the policy.
    prompt: the message of the user.
    row: further fields of the row that the environment gets.
    keys: returns the keys of `Engine.completion_keys` for (prompts, completions).
    n: how many episodes.
    sampling_params: how tokens are drawn.
    show: makes a text printable.
  """
  from gtpo_jax.data.records import Problem, user
  from gtpo_jax.rollout.episodes.sample import sample_episodes

  fields = dict(row)
  answer = str(fields.pop("answer", ""))
  problem = Problem(str(fields.pop("id", "0")), user(prompt), answer, "", fields)
  ended = _Ended()
  policy = worker.policy(params)
  rollouts = sample_episodes(
    worker, policy, [problem], keys(1, n), sampling_params, ended, lambda: False
  )
  for j in range(n):
    present = rollouts.present[0, j]
    print(
      _transcript(worker, rollouts.tokens[0, j][present], rollouts.mask[0, j][present], show),
      _outcome(ended.episodes[j]),
      sep="\n",
    )


def _transcript(
  worker: RolloutWorker, tokens: np.ndarray, drawn: np.ndarray, show: Callable[[str], str]
) -> str:
  """Returns the text of a completion. On a terminal, what the model has read is dim."""
  if not len(tokens):  # the environment has failed before the first turn
    return ""
  begins = np.flatnonzero(np.diff(drawn, prepend=~drawn[0]))
  parts = []
  for begin, end in zip(begins, [*begins[1:], len(drawn)], strict=True):
    text = show(worker.decode([tokens[begin:end]])[0])
    is_read = not drawn[begin] and sys.stdout.isatty()
    parts.append(f"{DIM}{text}{PLAIN}" if is_read else text)
  return "".join(parts)


def _outcome(episode: Episode) -> str:
  verdict = {True: "correct", False: "incorrect", None: "no verdict"}[episode.correct]
  reason = f" ({episode.reason})" if episode.reason else ""
  return (
    f"[{episode.stop}{reason}: {verdict}, reward {episode.reward:g}, {len(episode.turns)} turns, "
    f"{episode.calls} calls]"
  )
