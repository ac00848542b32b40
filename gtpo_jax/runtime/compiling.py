"""Compiles programs on another thread, so that a stop request does not wait for the compiler."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from gtpo_jax.runtime.distributed import any_process
from gtpo_jax.runtime.signals import Stopped, poll

POLL_S = 0.5  # seconds between questions whether to stop

_stopping: Callable[[], bool] | None = None
_abandoned: list[threading.Thread] = []


@contextlib.contextmanager
def stoppable_compiles(stopping: Callable[[], bool]) -> Iterator[None]:
  """Within the context, `stopping` is asked while a `StoppableProgram` compiles.

  All processes must enter it, and they stop together.
  """
  global _stopping
  outer = _stopping
  _stopping = stopping
  try:
    yield
  finally:
    _stopping = outer


def has_abandoned_compiles() -> bool:
  """Whether a compilation that was stopped still runs. A normal exit waits for it."""
  return any(thread.is_alive() for thread in _abandoned)


def compile_stoppably(lower: Callable[[], jax.stages.Lowered]) -> None:
  """Compiles a program, which JAX keeps for a later call with such arguments.

  Args:
    lower: lowers the program.

  Raises:
    Stopped: the run was asked to stop before the program was compiled.
  """
  if _stopping is None:
    lower().compile()
    return
  errors: list[Exception] = []

  def work() -> None:
    try:
      lower().compile()
    except Exception as error:  # raised below, on the thread that needs the program
      errors.append(error)

  thread = threading.Thread(target=work, name="gtpo compile", daemon=True)
  thread.start()
  thread.join(POLL_S)
  while any_process(thread.is_alive()):
    if poll(_stopping):
      _abandoned.append(thread)
      atexit.register(thread.join)  # Python would end the thread within the compiler and crash
      raise Stopped("while compiling")
    thread.join(POLL_S)
  if errors:
    raise errors[0]


class StoppableProgram:
  """A jitted function. Its compilation can be stopped; its execution cannot.

  Args:
    program: the function. The shapes of its first argument must always be the same, and its keyword
      arguments must be static.
  """

  def __init__(self, program: Any):
    self._program = program
    self._compiled: set[Any] = set()
    self.lower = program.lower

  def __call__(self, *arguments: Any, **static: Any) -> Any:
    """Calls the function.

    Raises:
      Stopped: the run was asked to stop before the program was compiled; `arguments` are not
        donated then.
    """
    if _stopping is not None:
      shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments[1:]))
      key = (shapes, jax.tree.structure(arguments[1:]), *static.values())
      if key not in self._compiled:
        compile_stoppably(lambda: self.lower(*arguments, **static))
        self._compiled.add(key)
    return self._program(*arguments, **static)
