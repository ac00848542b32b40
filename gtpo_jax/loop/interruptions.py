"""What happens to a run that is interrupted: its last state is saved, and its logs are closed."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401, registers its function for the end of the program
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import ParamSpec

from gtpo_jax.loop.results import Result, Step
from gtpo_jax.loop.run import Run
from gtpo_jax.runtime.errors import FunctionError, UserError, first_line
from gtpo_jax.runtime.signals import Stopped


def saved_if_interrupted(
  learning: Generator[Step, None, Result], run: Run
) -> Generator[Step, None, Result]:
  """Passes on the steps of `learn`, and saves the run if something ends it early.

  A request to stop (`Stopped`) and a caller that stops iterating (GeneratorExit) end the run as its
  last step does, with the state of its last update. So does a function of the user that raises
  KeyboardInterrupt or the like (`FunctionError`), but this error is raised again. All other errors
  pass: the run resumes from its last checkpoint.

  Returns:
    The result. If the run was stopped before it had a state, only the summary says so.
  """
  try:
    return (yield from learning)
  except Stopped as error:
    if run.state is None:
      return Result(0, False, f"stopped {error}")
  except GeneratorExit:
    pass
  except FunctionError as error:
    if run.state is None:
      raise
    raise run.saved_error(error) from error
  return run.finish()


P = ParamSpec("P")
_open_runs: weakref.WeakSet[Generator[Step, None, Result]] = weakref.WeakSet()


def closed_at_exit(
  steps: Callable[P, Generator[Step, None, Result]],
) -> Callable[P, Generator[Step, None, Result]]:
  """Makes `steps` return generators that are closed when the program ends, if not before.

  A script that leaves its loop at module level keeps its generator until Python has dismantled its
  modules, when nothing can be saved any more.
  """

  @functools.wraps(steps)
  def begin(*args: P.args, **kwargs: P.kwargs) -> Generator[Step, None, Result]:
    _close_runs_at_exit()
    run = _with_short_errors(steps(*args, **kwargs))
    _open_runs.add(run)  # weakly: a generator that nothing refers to is closed at once
    return run

  return begin


def _with_short_errors(run: Generator[Step, None, Result]) -> Generator[Step, None, Result]:
  """Passes on the steps; an error of the user's input comes without the frames of this package."""
  try:
    return (yield from run)
  except UserError as error:
    raise error.with_traceback(None) from None


@functools.cache
def _close_runs_at_exit() -> None:
  """Has the open runs closed at the end of the program, while threads can still be started.

  A function of `atexit` would be called too late: the pools of threads that save checkpoints are
  shut down before. Functions of `threading` are called in reverse order, so this one is called
  before `concurrent.futures`'s.
  """
  threading._register_atexit(_close_open_runs)


def _close_open_runs() -> None:
  for run in list(_open_runs):
    if not run.gi_running:  # in another thread
      try:
        run.close()
      except Exception as error:
        print(f"gtpo: the run could not be saved: {first_line(error)}", file=sys.stderr)
