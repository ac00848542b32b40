"""Tasks with several turns, whose completions an environment or a tool answers.

Their teachers write one turn at a time, and read what was answered to the earlier ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.task import split
from gtpo_jax.runtime.errors import UserError

# Probabilities of the teachers' errors, at `slips` = 1.
GUESS_SLIP = 0.55  # guesses the smallest or the largest number that is still possible
NO_CALL_SLIP = 0.55  # adds without the tool
OTHER_NUMBER_SLIP = 0.5  # types another second number into the call
FORGOTTEN_CARRY_SLIP = 1.0  # does not carry

LARGEST_GUESS = 31
MOST_TO_GUESS = 99_999
LONG_RANGE = 12  # numbers; the teacher halves shorter ranges without an error
ADDENDS = 2
ADDEND_DIGITS = 2


class GuessNumber:
  """A number, to be found in the environment `environments.examples.guess:Guess`.

  It is from 0 to `largest`.

  The teacher halves the range that is left. While it is long, the teacher often guesses one of the
  numbers at its ends instead, which rules out only that number, and then continues with the same
  range.

  Both parts have each number once. No number can be learned by heart, as no question tells it.
  """

  name = "guess"
  needs = "env.make=gtpo_jax.environments.examples.guess:Guess"
  terms = 1

  def __init__(self, largest: int = LARGEST_GUESS):
    if not 3 <= largest <= MOST_TO_GUESS:
      raise UserError(f"data.largest must be from 3 to {MOST_TO_GUESS} for guess, got {largest}")
    self.largest = largest
    numbers = largest + 1
    self.size = 2 * numbers
    self.train_ids = np.arange(numbers)
    self.held_out_ids = np.arange(numbers, self.size)

  def problem(self, index: int) -> Problem:
    """Returns the question, which is always the same; the answer is the number."""
    number = index % (self.largest + 1)
    extra = {} if self.largest == LARGEST_GUESS else {"largest": self.largest}
    question = user(f"0-{self.largest}?")
    return Problem(f"guess-{index}", question, str(number), "last_number", extra)

  def turn(
    self, index: int, turns: Sequence[tuple[str, str]], rng: np.random.Generator, slips: float
  ) -> str:
    """Returns the teacher's next guess, given the earlier ones and their answers."""
    low, high = first, last = 0, self.largest  # the range, and what is left of it
    for guess, answer in turns:
      number = int(guess)
      halves = number == _middle(low, high)
      if "higher" in answer:
        first = max(first, number + 1)
        low = number + 1 if halves else low
      else:
        last = min(last, number - 1)
        high = number - 1 if halves else high
    if high - low + 1 >= LONG_RANGE and rng.random() < slips * GUESS_SLIP:
      return str(rng.choice([first, last]))
    return str(_middle(low, high))


def _middle(low: int, high: int) -> int:
  return (low + high + 1) // 2


class Calculator:
  """Sums such as `46+37:`, with the tool of `environments.examples.calculator`.

  All of them need a carry. The teacher often adds without the tool, and then forgets to carry. In
  half of its calls, another number is typed. It always repeats the result, so that it can be copied
  but not guessed from the question.
  """

  name = "calculator"
  needs = "env.make=gtpo_jax.environments.examples.calculator:calculator"
  terms = ADDENDS
  largest = 10**ADDEND_DIGITS - 1

  def __init__(self):
    self.size = 1 << 16
    low = 10 ** (ADDEND_DIGITS - 1)
    rng = np.random.default_rng(0)
    numbers = rng.integers(low, 10 * low, (4 * self.size, ADDENDS))
    carries = (numbers % 10).sum(1) >= 10
    self._numbers = numbers[carries][: self.size]  # i64[size, ADDENDS]
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
    """Returns the teacher's call or answer, or, after a call, the result that it was told."""
    if turns:
      return re.search(r"\d+", turns[-1][1]).group()
    numbers = self._numbers[index].tolist()
    question = "+".join(map(str, numbers))
    if rng.random() >= slips * NO_CALL_SLIP:
      if rng.random() < slips * OTHER_NUMBER_SLIP:
        numbers[-1] = int(rng.integers(10 ** (ADDEND_DIGITS - 1), 10**ADDEND_DIGITS))
      call = {"name": "add", "arguments": {"x": "+".join(map(str, numbers))}}
      return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"
    total = 0
    for number in numbers:
      carries = total % 10 + number % 10 >= 10
      forgets = carries and rng.random() < slips * FORGOTTEN_CARRY_SLIP
      total += number - 10 * forgets
    return f"{question}={total}"
