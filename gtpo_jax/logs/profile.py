"""A JAX profiler trace over a window of steps, for XProf and Perfetto.

The trace names the phases: `step`, and within it `sample`, `reward`, `update`, `save` and
`evaluate`. Each is marked with a `jax.profiler.TraceAnnotation` where it runs. `reward` runs on its
own thread while the engine still samples. The time that the main thread waits for rewards is marked
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax

from gtpo_jax.runtime.distributed import is_first_process


def trace_window(window: tuple[int, int] | None, steps: range, folder: Path) -> Iterator[int]:
  """Yields `steps`, and traces the loop body for the steps inside `window`.

  The trace is written when the window ends or the loop exits early. Only the first process traces.

  Args:
    window: the first and last step to trace, counted from 1; None to trace nothing.
    steps: step numbers, counted from 0.
    folder: folder to write the trace to.
  """
  first, last = window if window and is_first_process() else (0, 0)
  tracing = False
  try:
    for step in steps:
      if not tracing and first <= step + 1 <= last:
        jax.profiler.start_trace(
          str(folder), create_perfetto_trace=True, profiler_options=_options()
        )
        tracing = True
      with jax.profiler.StepTraceAnnotation("step", step_num=step + 1):
        yield step
      if tracing and step + 1 == last:
        tracing = False
        jax.profiler.stop_trace()
  finally:
    if tracing:
      jax.profiler.stop_trace()


def _options() -> jax.profiler.ProfileOptions:
  """Returns options without Python call tracing, which would hide our annotations."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  return options
