"""Demonstrations of several turns: a scripted player instead of the engine.

The environments are real, and the tokens are appended as in sampling, so that a model imitates what
it will see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.turns import Differs, Ended, Observed, Opened
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError

WAIT_S = 1.0

# (the index of the problem, its turns so far and what was answered to each) -> the next turn
Player = Callable[[int, Sequence[tuple[str, str]]], str]


class Demonstration(NamedTuple):
  """A prompt and the completion to imitate.

  Attributes:
    prompt: its token ids.
    completion: its token ids, with the answers of an environment.
    drawn: for each token of the completion, whether it is to be imitated.
  """

  prompt: list[int]
  completion: list[int]
  drawn: list[bool]


def play(
  worker: RolloutWorker, problems: Sequence[Problem], player: Player, max_tokens: int
) -> list[Demonstration]:
  """Plays an episode of each problem, and returns what a model would have to write.

  Args:
    worker: has the runner.
    problems: the problems.
    player: writes the turns.
    max_tokens: the most tokens of a completion.

  Raises:
    UserError: the environment failed in one of them.
  """
  played = broadcast_from_first(lambda: _Play(worker, problems, player, max_tokens).all())
  return [Demonstration(*map(list, demonstration)) for demonstration in played]


class _Play:
  """Episodes that are played at the same time."""

  def __init__(
    self, worker: RolloutWorker, problems: Sequence[Problem], player: Player, max_tokens: int
  ):
    self._worker = worker
    self._problems = problems
    self._player = player
    self._max_tokens = max_tokens
    self._played = [Demonstration([], [], []) for _ in problems]
    self._turns: list[list[tuple[str, str]]] = [[] for _ in problems]

  def all(self) -> list[tuple[list[int], list[int], list[bool]]]:
    """Plays all episodes to their ends."""
    runner = self._worker.runner
    for i, problem in enumerate(self._problems):
      runner.begin(i, problem.row, 0, 1)
    missing = len(self._problems)
    try:
      while missing:
        runner.wait(WAIT_S)
        for event in runner.poll():
          missing -= self._take(event)
    finally:
      for i in range(len(self._problems)):
        runner.discard(i)
    return [tuple(demonstration) for demonstration in self._played]

  def _take(self, event: Opened | Observed | Ended | Differs) -> bool:
    """Goes on with an episode; returns whether it has ended."""
    i = event.group
    if isinstance(event, Ended):
      if not event.episode.scored:
        raise UserError(
          f"no demonstration of problem {self._problems[i].id!r} could be played: "
          f"{event.episode.reason}"
        )
      return True
    chat = self._worker.chat
    played = self._played[i]
    if isinstance(event, Opened):
      played.prompt.extend(self._worker.encode(self._problems[i], event.added))
    else:
      played.completion.extend(event.tokens)
      played.drawn.extend([False] * len(event.tokens))
      turn, _ = self._turns[i][-1]
      self._turns[i][-1] = (turn, chat.decode([event.tokens])[0])
    turn = self._player(i, self._turns[i])
    self._turns[i].append((turn, ""))
    tokens = chat.encode_completion(turn)
    played.completion.extend(tokens)
    played.drawn.extend([True] * len(tokens))
    left = self._max_tokens - len(played.completion)
    self._worker.runner.end_turn(i, 0, tokens, True, left)
    return False
