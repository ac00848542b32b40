"""Counts XLA compilations: after warm-up there should be none."""

from __future__ import annotations

import jax

_count = 0
_listening = False


def compile_count() -> int:
  """Programs compiled (or fetched from the compile cache) by this process since the first call."""
  global _listening
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    _listening = True
  return _count


def _on_event(event: str, *_: object, **__: object) -> None:
  global _count
  _count += event == "/jax/core/compile/backend_compile_duration"
