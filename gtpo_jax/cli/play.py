"""Plays episodes for `gtpo sample`, and prints their turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gtpo_jax.runtime.errors import UserError

if TYPE_CHECKING:
  import jax

  from gtpo_jax.environments.turns import Episode
  from gtpo_jax.models.params import Params
  from gtpo_jax.rollout.worker import RolloutWorker
  from gtpo_jax.sampling.settings import SamplingParams

DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # how a terminal shows what the model has read


def parse_row(text: str) -> Mapping[str, Any]:
  """Returns the row of `--row`, which is a JSON object."""
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
    worker: has the episodes.
    params: the parameters of the policy.
    prompt: the message of the user.
    row: further fields of the row that the environment gets.
    keys: returns the keys of `Engine.completion_keys` for (prompts, completions).
    n: how many episodes.
    sampling_params: how tokens are drawn.
    show: makes a text printable.
  """
  from gtpo_jax.rollout.sample import sample_prompt

  policy = worker.policy(params)
  for completion in sample_prompt(worker, policy, prompt, row, keys(1, n), sampling_params):
    transcript = _transcript(worker, completion.tokens, completion.mask, show)
    print(transcript, _outcome(completion.episode), sep="\n")


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
