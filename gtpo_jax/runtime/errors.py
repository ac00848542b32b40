"""Errors that are reported to the user as one line, without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(ValueError):
  """Raised for input that the user can correct.

  The message is one line: the value, the bound or the fix, and the nearest valid name. The command
  line prints it without a traceback and exits with status 2.
  """


class RunError(RuntimeError):
  """Raised when a run cannot continue although its input is valid.

  The message is one line: what happened, what is safe, what to do. The command line prints it
  without a traceback and exits with status 1.
  """


class FunctionError(RunError):
  """Raised when a user's function raises KeyboardInterrupt, SystemExit or the like.

  The state of the last update is saved before the run ends.
  """


class JudgeError(FunctionError):
  """Raised when the model that grades completions has stopped to answer (`reward.judge`).

  The state of the last update is saved before the run ends.
  """


class CorruptCheckpoint(Exception):
  """Raised when a checkpoint differs from what was saved. The message names the difference."""


# The errors whose type `broadcast_from_first` preserves when it raises them on every process.
SHARED_ERRORS = {
  kind.__name__: kind
  for kind in (UserError, RunError, FunctionError, JudgeError, CorruptCheckpoint)
}


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, or the error's type if it has no message."""
  return escape_controls(next(iter(str(error).strip().splitlines()), type(error).__name__))


def escape_controls(text: str) -> str:
  """Returns a text without the control characters that change a terminal, such as `\\x1b`."""
  return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def described(error: BaseException) -> str:
  """Returns the type and the first line of the message of an exception of any class."""
  try:
    return f"{type(error).__name__}: {first_line(error)}"
  except Exception:  # its __str__ raises
    return type(error).__name__


def did_you_mean(word: str, choices: Iterable[str]) -> str:
  """Returns ", did you mean 'NAME'?" if a choice is close to `word`, else the empty string."""
  by_lower = {choice.lower(): choice for choice in choices}
  close = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
  return f", did you mean {by_lower[close[0]]!r}?" if close else ""
