"""Compares what the processes of a run are going to do, before any of them compiles a program.

They compare through the key-value store of JAX's coordinator. A collective would be a program of
its own, which processes with other settings of JAX could not run together.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gtpo_jax
from gtpo_jax.runtime.cluster.joining import TIMEOUT, join_timeout
from gtpo_jax.runtime.errors import RunError, UserError, first_line

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings of JAX and XLA that may differ: what is logged, cached, shown or found on a machine.
_OWN = re.compile(
  r"cache|log|dump|debug_info|traceback|pprint|color|visible|address|timeout|platform|thread"
  r"|device_count|default_device|num_cpu_devices|pgle|profile|preemption|recoverability"
)
SHOWN_NAMES = 5
SHOWN_CHARS = 80  # of a value
READ_S = 10  # for which the first process waits until the others have read its verdict
END_S = 3.0  # for them to say so and to end
_FAILED = "error"
_rounds = itertools.count()


def process_identity() -> dict[str, str]:
  """Returns the versions and settings of this process that change what it computes, by name."""
  import jax

  found = {
    "python": ".".join(platform.python_version_tuple()[:2]),
    "gtpo_jax": gtpo_jax.__version__,
  }
  for package in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[package] = importlib.metadata.version(package)
  for name, value in jax.config.values.items():
    if not _OWN.search(name):
      found[name] = str(value)
  for name in FLAGS:
    flags = (flag for flag in os.environ.get(name, "").split() if not _OWN.search(flag))
    found[name] = " ".join(sorted(flags))
  return found


def agree(values: Mapping[str, Any]) -> None:
  """Compares values between processes. All must call it together.

  Args:
    values: by name; they are compared as texts.

  Raises:
    UserError: a process has other values, or has failed; every process raises it.
    RunError: a process has not come here in time.
  """
  state = _state()
  if state is None:
    return
  name = f"gtpo/agreement/{next(_rounds)}"
  own = {key: str(value) for key, value in values.items()}
  _put(state, f"{name}/{state.process_id}", json.dumps(own))
  if state.process_id == 0:
    everyone = [json.loads(_get(state, f"{name}/{i}", i)) for i in range(state.num_processes)]
    _put(state, f"{name}/verdict", json.dumps(difference(everyone)))
  verdict = json.loads(_get(state, f"{name}/verdict", 0))
  _put(state, f"{name}/read/{state.process_id}", "read")
  if not verdict:
    return
  if state.process_id == 0:  # when it ends, JAX aborts the others
    with contextlib.suppress(RunError):
      for i in range(state.num_processes):
        _get(state, f"{name}/read/{i}", i, READ_S)
    time.sleep(END_S)
  raise UserError(verdict)


def announce_failure(error: BaseException) -> None:
  """Tells the other processes, when they next compare something, that this one has failed."""
  state = _state()
  if state is not None:
    with contextlib.suppress(Exception):
      name = f"gtpo/agreement/{next(_rounds)}/{state.process_id}"
      _put(state, name, json.dumps({_FAILED: first_line(error)}))


def difference(everyone: Sequence[Mapping[str, str]]) -> str:
  """Describes in one line how the values of processes differ from the first one's.

  Args:
    everyone: the values of each process by name, or an error that has ended it.

  Returns:
    "" if all are equal.
  """
  for i, values in enumerate(everyone):
    if values.keys() == {_FAILED}:
      return f"process {i} has failed: {values[_FAILED]}"
  first = everyone[0]
  for i, values in enumerate(everyone):
    names = [name for name in {**first, **values} if values.get(name) != first.get(name)]
    if names:
      ours, theirs = (_shown(mapping.get(names[0])) for mapping in (first, values))
      others = ", ".join(names[1 : SHOWN_NAMES + 1])
      more = f"; nor are {others}{', ...' * (len(names) > SHOWN_NAMES + 1)}" if others else ""
      return (
        f"{names[0]} is not the same on all processes: the first process has {ours}, process {i} "
        f"{theirs}{more}; start all of them alike"
      )
  return ""


def _shown(value: str | None) -> str:
  if value is None:
    return "nothing"
  return value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}..."


def _state() -> Any:
  """Returns JAX's state of a connected process; None if this one is alone."""
  state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
  return state if state and state.client and state.num_processes > 1 else None


def _put(state: Any, key: str, value: str) -> None:
  state.client.key_value_set(key, value)


def _get(state: Any, key: str, process: int, timeout_s: float | None = None) -> str:
  """Waits for a value of a process, and returns it."""
  limit_s = timeout_s or join_timeout()
  try:
    return state.client.blocking_key_value_get(key, int(limit_s * 1000))
  except Exception as error:  # of XLA's own type
    raise RunError(
      f"process {process} has not begun the run within {limit_s:g} s ({first_line(error)[:100]}); "
      f"check that all processes run the same command, or raise {TIMEOUT}"
    ) from error
