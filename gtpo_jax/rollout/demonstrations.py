"""Demonstrations of several turns: a script writes them instead of a model.

The environments are real, and the tokens are appended as in sampling, so that a model imitates what
it will see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.episodes import Added
from gtpo_jax.environments.writers import Drawn, Writer
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.errors import UserError

WAIT_S = 1.0
DEMONSTRATION = -2  # instead of the number of a batch, see `EVALUATION`

# (the index of the problem, its turns so far and what was answered to each) -> the next turn
Say = Callable[[int, Sequence[tuple[str, str]]], str]


class Demonstration(NamedTuple):
  """A prompt and the completion to imitate."""

  prompt: list[int]  # its token ids
  completion: list[int]  # its token ids, with the answers of an environment
  drawn: list[bool]  # for each token of the completion, whether it is to be imitated


class Script(Writer):
  """Writes turns that are known, and keeps their demonstration."""

  def __init__(
    self,
    worker: RolloutWorker,
    problem: Problem,
    say: Callable[[Sequence[tuple[str, str]]], str],
    max_tokens: int,
  ):
    self._worker = worker
    self._problem = problem
    self._say = say
    self._max_tokens = max_tokens
    self._turns: list[tuple[str, str]] = []
    self.demonstration = Demonstration([], [], [])

  def begin(self, name: str, added: Added) -> None:
    """See `Writer`."""
    self.added = added
    self.demonstration.prompt.extend(self._worker.encode(self._problem, added))

  async def turn(self, tokens: list[int]) -> Drawn:
    """See `Writer`."""
    chat = self._worker.chat
    if self._turns:
      self._turns[-1] = (self._turns[-1][0], chat.decode([tokens])[0])
    text = self._say(self._turns)
    self._turns.append((text, ""))
    ids = chat.encode_completion(text)
    _, completion, drawn = self.demonstration
    completion += [*tokens, *ids]
    drawn += [False] * len(tokens) + [True] * len(ids)
    return Drawn(ids, True, self._max_tokens - len(completion))


def play(
  worker: RolloutWorker, problems: Sequence[Problem], say: Say, max_tokens: int
) -> list[Demonstration]:
  """Plays an episode of each problem, and returns what a model would have to write.

  Args:
    worker: has the episodes.
    problems: the problems.
    say: returns the turns.
    max_tokens: the most tokens of a completion.
  """
  played = broadcast_from_first(lambda: _play(worker, problems, say, max_tokens))
  return [Demonstration(*map(list, demonstration)) for demonstration in played]


def _play(
  worker: RolloutWorker, problems: Sequence[Problem], say: Say, max_tokens: int
) -> list[tuple[list[int], list[int], list[bool]]]:
  episodes = worker.episodes
  scripts = [
    Script(worker, problem, functools.partial(say, i), max_tokens)
    for i, problem in enumerate(problems)
  ]
  for i, (problem, script) in enumerate(zip(problems, scripts, strict=True)):
    episodes.begin((DEMONSTRATION, i), problem.row, 0, [script])
  missing = len(problems)
  try:
    while missing:
      episodes.wait(WAIT_S)
      for (_, i), _, episode in episodes.poll():
        if not episode.scored:
          reason = f"no demonstration of problem {problems[i].id!r} could be played"
          raise UserError(f"{reason}: {episode.reason}")
        missing -= 1
  finally:
    for i in range(len(problems)):
      episodes.discard((DEMONSTRATION, i))
  return [tuple(script.demonstration) for script in scripts]
