"""The compilations of a process, and a JAX profiler trace over steps, for XProf and Perfetto.

After warm-up the number of compilations should not grow.

The trace names the phases: `step`, and within it `sample`, `reward`, `update`, `save` and
`evaluate`. Each is marked with a `jax.profiler.TraceAnnotation` where it runs. `reward` runs on its
own thread while the engine still samples. The time that the main thread waits for rewards is marked
too.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath

from gtpo_jax.runtime.distributed import is_first_process

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"

_events: collections.Counter[str] = collections.Counter()


def compile_count() -> int:
  """Returns the number of programs that this process has compiled since the first call.

  The first call starts the count and returns 0. Programs fetched from the compile cache count too.
  """
  _listen()
  return _events[COMPILED]


@functools.cache
def _listen() -> None:
  def count(event: str, *_: object, **__: object) -> None:
    _events[event] += 1

  jax.monitoring.register_event_duration_secs_listener(count)
  jax.monitoring.register_event_listener(count)


def describe_compiles() -> str:
  """Returns one line: how many programs were found in the compile cache, and how many compiled."""
  count, found = compile_count(), _events[CACHE_HIT]
  return f"{count} programs are ready: {found} found, {count - found} compiled"


def describe_compile_cache() -> str:
  """Returns one line: where compiled programs are kept, and how many are there."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder or not jax.config.jax_enable_compilation_cache:
    return "compiled programs are not kept: this mesh does not use the compile cache"
  stored = sum(1 for _ in epath.Path(folder).glob("*-cache"))
  return f"the compile cache {folder} has {stored} programs, of this run and of others"


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
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would hide our annotations
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True, profiler_options=options)
        tracing = True
      with jax.profiler.StepTraceAnnotation("step", step_num=step + 1):
        yield step
      if tracing and step + 1 == last:
        tracing = False
        jax.profiler.stop_trace()
  finally:
    if tracing:
      jax.profiler.stop_trace()
