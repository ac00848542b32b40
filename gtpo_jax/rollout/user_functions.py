"""Reward functions that users write: imported by name, called with a time limit."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gtpo_jax.data.records import Problem
from gtpo_jax.rewards import PARTS
from gtpo_jax.runtime.errors import UserError, first_line

BUILTIN_PARTS = ("correct", "verifier")  # parts of the reward that are computed from the verdicts

# (prompts, completions, answers, extras) -> a number, bool or None for each completion
RewardFunction = Callable[
  [Sequence[str], Sequence[str], Sequence[str], Sequence[dict]], Sequence[float | None]
]


def import_function(name: str) -> RewardFunction:
  """Returns the function that `module:function` names.

  Raises:
    UserError: the name has another form, or the function cannot be imported.
  """
  module, colon, function = name.partition(":")
  if not (module and colon and function):
    raise UserError(
      f"reward part {name!r} is none of {', '.join([*BUILTIN_PARTS, *PARTS])}, "
      "nor a function named as module:function"
    )
  if "" not in sys.path:
    sys.path.insert(0, "")  # finds a module beside the config, as `python -m` would
  try:
    imported = getattr(importlib.import_module(module), function)
  except Exception as error:  # the import runs the user's code
    raise UserError(
      f"reward function {name!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
    ) from error
  if not callable(imported):
    raise UserError(
      f"reward function {name!r} is of type {type(imported).__name__} and cannot be called"
    )
  return imported


class FunctionCaller:
  """Calls users' reward functions, and shows the first failure of each.

  A function that fails never ends the run: its completions get no value.
  """

  def __init__(self, timeout_s: float):
    self._timeout_s = timeout_s
    self._shown: set[str] = set()

  def __call__(
    self, name: str, function: RewardFunction, problem: Problem, texts: Sequence[str]
  ) -> list[float]:
    """Returns the value of each completion of a problem; NaN if there is none.

    All are NaN if the function raises, takes longer than the limit, or returns a list of another
    length.
    """
    n = len(texts)
    prompts = [problem.messages[-1]["content"]] * n
    extras = [dict(problem.extra) for _ in texts]
    try:
      returned = list(
        _call_within(self._timeout_s, function, prompts, list(texts), [problem.answer] * n, extras)
      )
      values = [None if value is None else float(value) for value in returned]
      if len(values) != n:
        raise ValueError(f"returned {len(values)} values for {n} completions")
    except (Exception, SystemExit):  # the user's code may raise anything
      self._show_once(name, traceback.format_exc())
      return [math.nan] * n
    unusable = [value for value in values if value is not None and not math.isfinite(value)]
    if unusable:
      self._show_once(name, f"it returned {unusable[0]}\n")
    usable = lambda value: value is not None and math.isfinite(value)
    return [value if usable(value) else math.nan for value in values]

  def _show_once(self, name: str, error: str) -> None:
    if name not in self._shown:
      self._shown.add(name)
      print(
        f"gtpo: reward function {name!r} failed; its completions are left out and counted as "
        f"reward/no_verdict:\n{error}",
        file=sys.stderr,
        end="",
        flush=True,
      )


def _call_within(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
  """Returns what `function(*args)` returns, or raises what it raises.

  It runs on a thread of its own, which is abandoned after `limit_s` seconds.

  Raises:
    TimeoutError: it took longer than `limit_s`.
  """
  outcome: Future[Any] = Future()

  def work() -> None:
    try:
      outcome.set_result(function(*args))
    except BaseException as error:  # SystemExit would otherwise end this thread silently
      outcome.set_exception(error)

  # A daemon, so that a function that hangs cannot keep the program from ending.
  threading.Thread(target=work, name="gtpo reward function", daemon=True).start()
  try:
    return outcome.result(limit_s)
  except TimeoutError:
    if outcome.done():  # the function's own TimeoutError
      raise
    raise TimeoutError(f"it took longer than {limit_s:g} s (reward.function_timeout_s)") from None
