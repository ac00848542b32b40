"""A number from 0 to 31 is to be found within five guesses; each answer is higher, lower or right.

The best player halves what is left with each guess. It finds 31 of the 32 numbers in time, after
four guesses on average. With a column `largest`, the number is from 0 to that, and there are as many
guesses as this has binary digits: seven for 127.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gtpo_jax.environments.turns import Step, Turn

LARGEST = 31


class Guess:
  """The environment of the task `guess`. The answer of the row is the number."""

  def reset(self, row: Mapping[str, Any], seed: int) -> None:
    """Begins a game; see `Environment`."""
    self._number = int(row["answer"])
    self._guesses = 0
    self._low = 0
    self._high = int(row.get("largest", LARGEST))
    self._allowed = self._high.bit_length()
    self._pattern = rf"\d{{1,{len(str(self._high))}}}"

  def step(self, turn: Turn) -> Step:
    """Answers a guess; see `Environment`."""
    self._guesses += 1
    guess = int(turn.text) if re.fullmatch(self._pattern, turn.text) else None
    if guess == self._number:
      return Step("right", reward=1.0, done=True, correct=True, info={"guesses": self._guesses})
    if self._guesses == self._allowed:
      return Step(done=True, correct=False)
    if guess is None:
      answer = "a number"
    elif guess < self._number:
      answer = "higher"
      self._low = max(self._low, guess + 1)
    else:
      answer = "lower"
      self._high = min(self._high, guess - 1)
    # What the player can know, whatever the guesses were.
    return Step(answer, state=f"{self._low} to {self._high} after {self._guesses} guesses")
