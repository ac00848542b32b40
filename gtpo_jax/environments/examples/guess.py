"""A number from 0 to 31 is to be found within five guesses; each answer is higher, lower or right.

The best player halves what is left with each guess. It finds 31 of the 32 numbers in time, after
four guesses on average. With a column `largest`, the number is from 0 to that, and there are as
many guesses as this has binary digits: seven for 127.

What every guess is worth is known, to the best player and to the policy.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gtpo_jax.environments.turns import Episode, Step, Turn

LARGEST = 31


class Left(NamedTuple):
  """What a player knows: the number is from `low` to `high`, and `guesses` may be made."""

  low: int
  high: int
  guesses: int

  @classmethod
  def begin(cls, row: Mapping[str, Any]) -> Left:
    """Returns what is left at the beginning of a row's game."""
    high = int(row.get("largest", LARGEST))
    return cls(0, high, high.bit_length())

  @property
  def numbers(self) -> int:
    """How many numbers are possible."""
    return max(0, self.high - self.low + 1)

  @property
  def found_by_best(self) -> int:
    """How many of these numbers the best player finds."""
    return min(self.numbers, 2**self.guesses - 1)

  def after(self, guess: int | None) -> tuple[Left, Left]:
    """Returns what is left after the answers `lower` and `higher`; None for what is no number."""
    lower = higher = self._replace(guesses=self.guesses - 1)
    if guess is not None:
      lower = lower._replace(high=min(self.high, guess - 1))
      higher = higher._replace(low=max(self.low, guess + 1))
    return lower, higher

  def found(self, guess: int | None, found_later: Any = None) -> float:
    """Returns how many of the numbers are found with this guess, by the best player from then on.

    Args:
      guess: any number, or None.
      found_later: returns how many are found of what is left; None for the best player.
    """
    later = found_later or (lambda left: left.found_by_best)
    lower, higher = self.after(guess)
    if guess is None:
      return later(lower)
    return (self.low <= guess <= self.high) + later(lower) + later(higher)


def read(text: str, row: Mapping[str, Any]) -> int | None:
  """Returns the guess that a turn makes; None if it is no number with as few digits."""
  digits = len(str(Left.begin(row).high))
  return int(text) if re.fullmatch(rf"\d{{1,{digits}}}", text) else None


class Guess:
  """The environment of the task `guess`. The answer of the row is the number."""

  def reset(self, row: Mapping[str, Any], seed: int) -> None:
    """Begins a game; see `Environment`."""
    self._row = row
    self._number = int(row["answer"])
    self._left = Left.begin(row)
    self._guesses = 0

  def step(self, turn: Turn) -> Step:
    """Answers a guess; see `Environment`."""
    self._guesses += 1
    left = self._left
    guess = read(turn.text, self._row)
    truth = (left.found(guess) - left.found_by_best) / left.numbers
    if guess == self._number:
      info = {"guesses": self._guesses}
      return Step("right", reward=1.0, done=True, correct=True, info=info, truth=truth)
    if left.guesses == 1:
      return Step(done=True, correct=False, truth=truth)
    answer = "a number" if guess is None else "higher" if guess < self._number else "lower"
    self._left = left.after(guess)[answer == "higher"]
    # What the player can know, whatever the guesses were.
    state = f"{self._left.low} to {self._left.high} after {self._guesses} guesses"
    return Step(answer, state=state, truth=truth)

  @staticmethod
  def policy_truth(
    rows: Sequence[Mapping[str, Any]], episodes: Sequence[Sequence[Episode]]
  ) -> list[list[list[float]]]:
    """Returns by how much each guess of a batch was better than the policy's mean guess.

    The policy does not see the number, so a game is a walk through what is left, and the guesses
    that the batch has in a state estimate how the policy guesses there. With these, the share of
    the numbers that it finds from each state follows without sampling. From a state that no game of
    the batch has reached, it is the best player's. Numbers are equally probable, as in the data.
    """
    games = [
      [_walk(row, episode) for episode in group] for row, group in zip(rows, episodes, strict=True)
    ]
    guesses: dict[Left, list[int | None]] = collections.defaultdict(list)
    for left, guess in (step for group in games for game in group for step in game):
      guesses[left].append(guess)

    @functools.cache
    def found(left: Left) -> float:
      if not left.guesses or not left.numbers:
        return 0.0
      if left not in guesses:
        return left.found_by_best
      return sum(left.found(guess, found) for guess in guesses[left]) / len(guesses[left])

    worth = lambda left, guess: (left.found(guess, found) - found(left)) / left.numbers
    return [[[worth(*step) for step in game] for game in group] for group in games]


def _walk(row: Mapping[str, Any], episode: Episode) -> list[tuple[Left, int | None]]:
  """Returns what was left before each guess of a game, and the guess."""
  left = Left.begin(row)
  number = int(row["answer"])
  steps = []
  for turn in episode.turns:
    guess = read(turn.text, row)
    steps.append((left, guess))
    left = left.after(guess)[guess is not None and guess < number]
  return steps
