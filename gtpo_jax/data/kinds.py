"""Chooses a verifier for problems that name none, by their answers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from gtpo_jax.data.records import Problem

UNSTATED = ""  # the kind of a problem that names none, while its source is read
DEFAULT_KIND = "math"

_CHOICE = re.compile(r"\(?[A-J]\)?")
# Words and simple punctuation: nothing that mathematics could compare.
_PLAIN = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[-'’.,;:!? ]+[^\W\d_]+)*[.!?]?", re.DOTALL)
_MATHEMATICAL = frozenset(("pi", "inf", "infinity", "undefined", "none"))
MAX_SHOWN = 40  # characters of an answer in a message


def with_kinds(problems: Sequence[Problem]) -> tuple[tuple[Problem, ...], str]:
  """Gives the problems without a kind the one that fits all of their answers.

  `choice` if they are letters from A to J, `exact` if they are words, else `math`.

  Returns:
    The problems in the same order, and a note for the user; "" if all state a kind or are numbers
    or formulas.
  """
  unstated = [problem for problem in problems if problem.kind == UNSTATED]
  if not unstated:
    return tuple(problems), ""
  plain = [problem.answer for problem in unstated if _is_plain(problem.answer)]
  letters = {problem.answer for problem in unstated}
  kind = DEFAULT_KIND
  note = ""
  if len(letters) > 1 and all(map(_CHOICE.fullmatch, letters)):
    kind = "choice"
    note = "kind choice, since the answers are letters (a column kind overrides it)"
  elif len(plain) == len(unstated):
    kind = "exact"
    note = "kind exact, since the answers are plain text (a column kind overrides it)"
  elif plain:
    note = (
      f"kind math, which is not made for the {len(plain)} answers that are plain text, such as "
      f"{plain[0][:MAX_SHOWN]!r}: give those rows a column kind with exact"
    )
  chosen = (
    dataclasses.replace(problem, kind=kind) if problem.kind == UNSTATED else problem
    for problem in problems
  )
  return tuple(chosen), note


def _is_plain(answer: str) -> bool:
  return bool(_PLAIN.fullmatch(answer)) and answer.lower() not in _MATHEMATICAL
