"""Functions and classes that users write: imported by name; reward functions are called.

This is the one place where a user's reward function is called. Whatever it returns or raises, each
completion gets a number that the statistics of a batch can use, or no value.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import itertools
import math
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.turns import MAX_NUMBER, Episode, as_number
from gtpo_jax.rewards import PARTS
from gtpo_jax.runtime.errors import FunctionError, UserError, described, escape_controls
from gtpo_jax.runtime.resource_limits import within

# Parts of the reward that no function computes.
BUILTIN_PARTS = ("correct", "verifier", "judge", "env")

EPISODES = "episodes"  # the parameter of a reward function that gets the episodes

# (prompts, completions, answers, extras) -> a number, bool or None for each completion. `extras`
# are rows, as in `Problem.row`. A function with a parameter `episodes` gets those too.
RewardFunction = Callable[..., Sequence[float | None]]


def import_function(name: str, what: str = "reward part") -> RewardFunction:
  """Returns the reward function that `module:function` names; `what` sets it."""
  if not _is_qualified(name):
    if "." in name or what != "reward part":
      like = name.rpartition(".")
      hint = f", such as {like[0]}:{like[2]}" if like[0] else ""
      raise UserError(f"{what} {name!r} is not named as module:function{hint}")
    raise UserError(
      f"reward part {name!r} is none of {', '.join([*BUILTIN_PARTS, *PARTS])}, "
      "nor a function named as module:function"
    )
  return checked_function(import_name(name, "reward function"), name)


def checked_function(function: Any, name: str) -> RewardFunction:
  """Returns a reward function, if it can be called as one."""
  checked_callable(function, f"reward function {name!r}")
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # a builtin has none
    return function
  known = {EPISODES: ()} if EPISODES in signature.parameters else {}
  try:
    signature.bind((), (), (), (), **known)
  except TypeError as error:
    raise UserError(
      f"reward function {name!r} takes {signature}, but is called as function(prompts, "
      f"completions, answers, extras): {error}"
    ) from None
  return function


def import_name(name: str, what: str) -> Any:
  """Returns what `module:name` names, such as a function or a class.

  Args:
    name: the module, a colon, and the name in it.
    what: what it is, for messages, such as "tool".

  Raises:
    UserError: the name has another form, or it cannot be imported.
  """
  if not _is_qualified(name):
    raise UserError(f"{what} {name!r} is not named as module:name")
  folder = os.getcwd()
  if folder not in sys.path:
    sys.path.insert(0, folder)  # finds modules in the working directory, as `python -m` would
  module, _, attribute = name.partition(":")
  try:
    with _unchanged_jax_settings(f"the module of {what} {name!r}"):
      return getattr(importlib.import_module(module), attribute)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # the import runs the user's code
    raise UserError(f"{what} {name!r} cannot be imported: {described(error)}") from error


def checked_callable(value: Any, what: str) -> Callable[..., Any]:
  """Returns a value that can be called."""
  if not callable(value):
    raise UserError(f"{what} is of type {type(value).__name__} and cannot be called")
  return value


def qualified_name(function: Any, default: str = "") -> str:
  """Returns what a function or class is called in a config: module:name."""
  own = getattr(function, "__qualname__", default or type(function).__qualname__)
  return f"{getattr(function, '__module__', '')}:{own}"


def _is_qualified(name: str) -> bool:
  module, colon, attribute = name.partition(":")
  return bool(module and colon and attribute)


class FunctionCaller:
  """Calls users' reward functions, and shows the first failure of each.

  If a function raises an `Exception` or returns an unusable value, the run continues, and the
  completions get no value. An exception that is not an `Exception`, such as KeyboardInterrupt or
  asyncio.CancelledError, asks the program to end and does end the run. SystemExit is treated like
  an `Exception`, because programs written for the command line raise it for bad input.
  """

  def __init__(self, timeout_s: float):
    self._timeout_s = timeout_s
    self._shown: set[str] = set()

  def __call__(
    self,
    name: str,
    function: RewardFunction,
    problem: Problem,
    texts: Sequence[str],
    episodes: Sequence[Episode] | None = None,
  ) -> list[float]:
    """Returns the value of each completion of a problem; NaN if there is none.

    All are NaN if the function raises, takes longer than the limit, or does not return a number,
    bool or None for each completion. A single value is NaN if it is None or NaN, or if its
    magnitude is over `MAX_NUMBER`.

    Raises:
      FunctionError: the function raised an exception that is not an `Exception`.
    """
    n = len(texts)
    work = lambda: _values(function, problem, texts, episodes)
    try:
      with _unchanged_jax_settings(f"reward function {name!r}"):
        values = self._within_limit(work)
    except (Exception, SystemExit):  # the user's code may raise anything
      self._show_once(name, escape_controls(traceback.format_exc()))
      return [math.nan] * n
    except BaseException as error:
      raise FunctionError(
        f"reward function {name!r} raised {described(error)}, which ends the run"
      ) from error
    usable = lambda value: abs(value) <= MAX_NUMBER  # False for NaN
    unusable = [value for value in values if value is not None and not usable(value)]
    if unusable:
      self._show_once(
        name, f"it returned {unusable[0]}; a value is at most {MAX_NUMBER:g} in size\n"
      )
    return [value if value is not None and usable(value) else math.nan for value in values]

  def _within_limit(self, work: Callable[[], Any]) -> Any:
    try:
      return within(self._timeout_s, work, "gtpo reward function")
    except TimeoutError as error:
      if str(error) != f"it took longer than {self._timeout_s:g} s":  # the function's own error
        raise
      raise TimeoutError(f"{error} (reward.function_timeout_s)") from None

  def _show_once(self, name: str, error: str) -> None:
    """Prints why a function has no usable value, but only the first time this happens."""
    self.show_once(
      name,
      f"reward function {name!r} failed; its completions are left out and counted as "
      f"reward/no_verdict:\n{error.removesuffix(chr(10))}",
    )

  def show_once(self, key: str, message: str) -> None:
    """Prints a message, the first time for its key."""
    if key not in self._shown:
      self._shown.add(key)
      print(f"gtpo: {message}", file=sys.stderr, flush=True)

  def show_sum_once(self, parts: str, sizes: Mapping[str, float]) -> None:
    """Prints, the first time, that a weighted sum of parts is too large, and which part is.

    Args:
      parts: the config's `reward.parts`.
      sizes: the largest magnitude of each part times its weight.
    """
    name = max(sizes, key=sizes.get)
    self.show_once(
      f"the sum of {parts}",
      f"the weighted sum of reward.parts = {parts!r} is over {MAX_NUMBER:g} in size, since the "
      f"part {name!r} times its weight is up to {sizes[name]:g}; these completions are left out "
      "and counted as reward/no_verdict; lower the weight",
    )


def takes_episodes(function: RewardFunction) -> bool:
  """Whether a reward function has a parameter `episodes`."""
  try:
    return EPISODES in inspect.signature(function).parameters
  except (TypeError, ValueError):  # a builtin has no signature
    return False


def _values(
  function: RewardFunction,
  problem: Problem,
  texts: Sequence[str],
  episodes: Sequence[Episode] | None,
) -> list[float | None]:
  """Calls a function on the completions of a problem, with arguments that it may change.

  Reading what it returns is part of the call: a generator may be slow, or never end.
  """
  n = len(texts)
  prompts = [problem.messages[-1]["content"]] * n
  extras = [copy.deepcopy(problem.row) for _ in texts]
  further = {}
  if episodes is not None and takes_episodes(function):
    further[EPISODES] = copy.deepcopy(list(episodes))
  returned = function(prompts, list(texts), [problem.answer] * n, extras, **further)
  if inspect.isawaitable(returned):
    returned = asyncio.run(_result_of(returned))
  if returned is None:
    raise TypeError(f"returned None, not a list of {n} values; is a return missing?")
  if isinstance(returned, str | bytes | bytearray | Mapping | Set):
    raise TypeError(f"returned {type(returned).__name__}, not a list of numbers")
  values = list(itertools.islice(returned, n + 1))
  if len(values) != n:
    count = len(values) if len(values) < n else f"more than {n}"
    raise ValueError(f"returned {count} values for {n} completions")
  return [None if value is None else as_number(value, "returned") for value in values]


async def _result_of(awaitable: Awaitable[Any]) -> Any:
  return await awaitable


@contextlib.contextmanager
def _unchanged_jax_settings(culprit: str) -> Iterator[None]:
  """Undoes changes of JAX's global settings, such as `jax_enable_x64`, and prints the first one.

  Otherwise, all programs would be compiled again under the new settings.
  """
  before = jax.config.values
  try:
    yield
  finally:
    now = jax.config.values
    changed = [name for name, value in before.items() if now[name] is not value]
    changed = [name for name in changed if now[name] != before[name]]
    for name in changed:
      jax.config.update(name, before[name])
    if changed:
      print(
        f"gtpo: {culprit} changed JAX's setting {changed[0]} to {now[changed[0]]!r}, which was "
        f"undone; use a context in the function instead, such as `with jax.enable_x64(True):`",
        file=sys.stderr,
        flush=True,
      )
