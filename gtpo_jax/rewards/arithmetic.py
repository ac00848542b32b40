"""Exact verifiers of the synthetic tasks. They take any text and never raise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_STEP = re.compile(r"(\d{1,9})([+\-*])(\d{1,9})=(\d{1,9})", re.ASCII)


def last_number(completion: str) -> str | None:
  """The digits of the last whole number in the text; None where there is none."""
  numbers = re.findall(r"\d+", completion, re.ASCII)
  return numbers[-1] if numbers else None


def last_number_correct(completion: str, answer: str) -> bool:
  """Whether the last whole number in the text is `answer`."""
  return last_number(completion) == answer


def countdown_correct(completion: str, numbers: Sequence[int], target: int) -> bool:
  """Whether the text is a chain of true steps `a+b=c,...` that uses every number once and ends at the target.

  A step takes two values from what is left, the given numbers or earlier results, and puts its result back; +, - and * are
  allowed. At the end the target alone must be left.
  """
  left = Counter(numbers)
  for part in completion.strip().split(","):
    step = _STEP.fullmatch(part.strip())
    if not step:
      return False
    a, b, c = (int(step[i]) for i in (1, 3, 4))
    left[a] -= 1
    left[b] -= 1
    if min(left[a], left[b]) < 0 or {"+": a + b, "-": a - b, "*": a * b}[step[2]] != c:
      return False
    left[c] += 1
  return +left == Counter([target])
