"""Tasks with several turns, whose completions an environment or a tool answers.

Their teachers write one turn at a time, and read what was answered to the earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.task import split

# Probabilities of the teachers' errors, at `slips` = 1.
GUESS_SLIP = 0.5  # guesses the smallest or the largest number that is still possible
NO_CALL_SLIP = 0.8  # adds without the tool
FORGOTTEN_CARRY_SLIP = 0.9  # does not carry

COPIES = 256  # of each number to guess, so that the held-out part has all numbers too
LARGEST_GUESS = 31
ADDENDS = 3
ADDEND_DIGITS = 2


class GuessNumber:
  """A number from 0 to 31, to be found in the environment `environments.examples.guess:Guess`.

  The teacher guesses the middle one of the numbers that are still possible, or one of the ends,
  which rules out only that number.
  """

  name = "guess"
  needs = "env.make=gtpo_jax.environments.examples.guess:Guess"
  terms = 1
  largest = LARGEST_GUESS

  def __init__(self):
    self.size = (LARGEST_GUESS + 1) * COPIES
    self.train_ids, self.held_out_ids = split(self, np.arange(self.size))

  def problem(self, index: int) -> Problem:
    """Returns the question, which is always the same; the answer is the number."""
    number = index % (LARGEST_GUESS + 1)
    return Problem(f"guess-{index}", user(f"0-{LARGEST_GUESS}?"), str(number), "last_number")

  def turn(
    self, index: int, turns: Sequence[tuple[str, str]], rng: np.random.Generator, slips: float
  ) -> str:
    """Returns the teacher's next guess, given the earlier ones and their answers."""
    low, high = 0, LARGEST_GUESS
    for guess, answer in turns:
      if "higher" in answer:
        low = int(guess) + 1
      else:
        high = int(guess) - 1
    if rng.random() < slips * GUESS_SLIP:
      return str(rng.choice([low, high]))
    return str((low + high + 1) // 2)


class Calculator:
  """Sums such as `46+37+28:`, with the tool `environments.examples.calculator:add`.

  The teacher seldom calls the tool. Without it, it forgets to carry.
  """

  name = "calculator"
  needs = "env.tools=gtpo_jax.environments.examples.calculator:add"
  terms = ADDENDS
  largest = 10**ADDEND_DIGITS - 1

  def __init__(self):
    self.size = 1 << 16
    low = 10 ** (ADDEND_DIGITS - 1)
    rng = np.random.default_rng(0)
    self._numbers = rng.integers(low, 10 * low, (self.size, ADDENDS))  # i64[size, ADDENDS]
    codes = self._numbers @ (10 * low) ** np.arange(ADDENDS)
    self.train_ids, self.held_out_ids = split(self, codes)

  def problem(self, index: int) -> Problem:
    """Returns the sum as a question."""
    numbers = self._numbers[index].tolist()
    question = user("+".join(map(str, numbers)) + ":")
    return Problem(f"calculator-{index}", question, str(sum(numbers)), "last_number")

  def turn(
    self, index: int, turns: Sequence[tuple[str, str]], rng: np.random.Generator, slips: float
  ) -> str:
    """Returns the teacher's call or answer, or, after a call, the result."""
    numbers = self._numbers[index].tolist()
    if turns:
      return str(sum(numbers))
    if rng.random() >= slips * NO_CALL_SLIP:
      call = {"name": "add", "arguments": {"x": "+".join(map(str, numbers))}}
      return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"
    total = 0
    for number in numbers:
      carries = total % 10 + number % 10 >= 10
      forgets = carries and rng.random() < slips * FORGOTTEN_CARRY_SLIP
      total += number - 10 * forgets
    return str(total)
