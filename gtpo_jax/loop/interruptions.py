"""What happens to a run that is interrupted: its last state is saved, and its logs are closed."""

from __future__ import annotations

from collections.abc import Generator

from gtpo_jax.api.results import Result, Step
from gtpo_jax.loop.run import Run
from gtpo_jax.runtime.errors import FunctionError
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
