"""Errors that are messages: one line for the user, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """Raised for input a user can mend. The message is one line: the value, the bound, the nearest valid name.

  The command line prints it without a traceback and exits with status 2.
  """


class RunError(RuntimeError):
  """Raised where a run cannot go on though its input was right. One line: what happened, what is safe, what to do.

  The command line prints it without a traceback and exits with status 1.
  """


class Damaged(Exception):
  """A checkpoint that is not what was saved. The message says in which way."""


KINDS = {kind.__name__: kind for kind in (UserError, RunError, Damaged)}


def first_line(error: BaseException) -> str:
  """The first line of another library's message, or its kind where it has none."""
  return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(word: str, choices: Iterable[str]) -> str:
  """The phrase ", did you mean ...?" where one of `choices` is close to `word`, else the empty string."""
  by_lower = {choice.lower(): choice for choice in choices}
  close = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
  return f", did you mean {by_lower[close[0]]!r}?" if close else ""
