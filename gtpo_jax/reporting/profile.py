"""A window of steps, traced by JAX's profiler: what XProf and Perfetto open, with the phases by name.

The phases are `step`, and within it `sample`, `reward` (on the reward's own thread while others are sampled, and on the main one as long as
that waits), `update`, `save` and `evaluate`; where they happen they are marked with `jax.profiler.TraceAnnotation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax

from gtpo_jax.runtime.distributed import is_first_process


def trace_window(window: tuple[int, int] | None, steps: range, folder: Path) -> Iterator[int]:
  """Passes on the numbers of `steps`, from 0; the bodies of those from the first to the last of `window`, from 1, are traced.

  The trace is written into `folder` when the window is over, or the loop is left within it. The first process alone traces.
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
  """Our own marks and the runtime's, without a line for every Python call, which would crowd them out."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  return options
