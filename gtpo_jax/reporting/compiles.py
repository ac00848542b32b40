"""Counts XLA compilations. After warm-up the count should not grow."""

from __future__ import annotations

import jax

_count = 0
_listening = False


def compile_count() -> int:
  """Returns the number of programs that this process has compiled since the first call.

  The first call starts the count and returns 0. Programs fetched from the compile cache count too.
  """
  global _listening
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    _listening = True
  return _count


def _on_event(event: str, *_: object, **__: object) -> None:
  global _count
  _count += event == "/jax/core/compile/backend_compile_duration"
