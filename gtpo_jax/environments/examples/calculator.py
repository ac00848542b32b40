"""The tool of the task `calculator`."""

from __future__ import annotations

import re

TERM = re.compile(r"\d{1,9}")
MAX_TERMS = 100


def add(x: str) -> str:
  """Adds numbers.

  Args:
    x: The numbers, separated by plus signs.
  """
  terms = x.split("+")
  if len(terms) > MAX_TERMS or not all(map(TERM.fullmatch, terms)):
    raise ValueError(f"{x[:30]!r} is no sum of whole numbers")
  return str(sum(map(int, terms)))
