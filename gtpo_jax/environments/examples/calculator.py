"""The tool of the task `calculator`, which knows which turn called rightly."""

from __future__ import annotations

import re

from gtpo_jax.environments.adapters.methods import from_methods
from gtpo_jax.environments.turns import Turn

TERM = re.compile(r"\d{1,9}")
MAX_TERMS = 100


class Calculator:
  """A tool for the sum that is the answer of the row.

  The best player cannot add by himself. He calls once, since there is no room for more in
  `configs/calculator.py`, and repeats what he is told. So a state is worth 1 until a turn has
  called wrongly or has answered something else, and then 0: such a turn's truth is -1. One that
  calls or answers rightly has 0, or 1 if the turn before it was wrong.
  """

  def reset(self, answer: str) -> None:
    """Begins a sum."""
    self._total = answer
    self._value = 1.0
    self._told = None

  def add(self, x: str) -> str:
    """Adds numbers.

    Args:
      x: The numbers, separated by plus signs.
    """
    terms = x.split("+")
    if len(terms) > MAX_TERMS or not all(map(TERM.fullmatch, terms)):
      raise ValueError(f"{x[:30]!r} is no sum of whole numbers")
    self._told = str(sum(map(int, terms)))
    return self._told

  def turn_truth(self, turn: Turn) -> float:
    """Returns the true advantage of a turn; see `Environment`."""
    numbers = re.findall(r"\d+", turn.text)
    said = self._told if turn.calls else numbers and numbers[-1]
    before = self._value
    self._value = float(said == self._total)
    self._told = None
    return self._value - before


calculator = from_methods(Calculator)
