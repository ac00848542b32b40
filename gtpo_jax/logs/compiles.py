"""Counts XLA compilations. After warm-up the count should not grow."""

from __future__ import annotations

import jax
from etils import epath

CACHE_HIT = "/jax/compilation_cache/cache_hits"

_count = 0
_found = 0
_listening = False


def compile_count() -> int:
  """Returns the number of programs that this process has compiled since the first call.

  The first call starts the count and returns 0. Programs fetched from the compile cache count too.
  """
  global _listening
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)
    _listening = True
  return _count


def describe_compiles() -> str:
  """Returns one line: how many programs were found in the compile cache, and how many compiled."""
  return f"{compile_count()} programs are ready: {_found} found, {_count - _found} compiled"


def describe_compile_cache() -> str:
  """Returns one line: where compiled programs are kept, and how many are there."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder or not jax.config.jax_enable_compilation_cache:
    return "compiled programs are not kept: this mesh does not use the compile cache"
  stored = sum(1 for _ in epath.Path(folder).glob("*-cache"))
  return f"the compile cache {folder} has {stored} programs, of this run and of others"


def _on_duration(event: str, *_: object, **__: object) -> None:
  global _count
  _count += event == "/jax/core/compile/backend_compile_duration"


def _on_event(event: str, *_: object, **__: object) -> None:
  global _found
  _found += event == CACHE_HIT
