"""The rows of a task of reasoning-gym, made in a process of its own (`library.py`)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.errors import UserError, did_you_mean
from gtpo_jax.runtime.installing import require_package

SCRIPT = Path(__file__).resolve().with_name("library.py")
MODULE = "reasoning_gym"
EXTRA = "reasoning-gym"
NO_ANSWER = "(any that the scorer accepts)"  # of tasks that accept several answers


def require_library(what: str) -> None:
  """Raises MissingPackage, with `what` needs it, unless reasoning-gym is installed."""
  require_package(MODULE, what, EXTRA, "reasoning-gym")


@functools.cache
def task_names() -> tuple[str, ...]:
  """Returns the names of all tasks."""
  with _process("names") as process:
    line = process.stdout.readline()
  if not line:
    raise UserError("reasoning-gym is installed, but cannot be imported; reinstall it")
  return tuple(json.loads(line))


def rows(
  name: str, knobs: Mapping[str, Sequence[str]], size: int, seed: int
) -> Iterator[dict[str, Any] | ValueError]:
  """Yields the problems 0, 1, ..., size - 1 of a task, as rows of a source.

  A row is a function of name, knobs, seed and its index. One that the library fails to make is a
  ValueError.

  Raises:
    UserError: the library or the task does not exist, or it refuses the knobs.
  """
  require_library(f"'rg:{name}'")
  with _process("rows", name, json.dumps(dict(knobs)), str(size), str(seed)) as process:
    try:
      line = process.stdout.readline()
      problem = json.loads(line) if line else "reasoning-gym cannot be imported; reinstall it"
      if problem:
        suggestion = did_you_mean(name, task_names()) if problem.startswith("unknown task") else ""
        raise UserError(f"'rg:{name}': {problem}{suggestion}")
      for index in range(size):
        line = process.stdout.readline()
        if not line:
          raise UserError(f"'rg:{name}': reasoning-gym ended at problem {index} of {size}")
        value = json.loads(line)
        made = _row(name, knobs, index, value[0]) if isinstance(value, list) else None
        yield made or ValueError(f"could not be made: {value}")
    finally:
      process.kill()


def _row(
  name: str, knobs: Mapping[str, Sequence[str]], index: int, entry: dict[str, Any]
) -> dict[str, Any]:
  answer = entry["answer"]
  return {
    "id": f"{name}-{index}",
    "prompt": entry["question"],
    "answer": answer if isinstance(answer, str) and answer.strip() else NO_ANSWER,
    "kind": "reasoning_gym",
    "extra": {"task": name, "knobs": {key: list(knobs[key]) for key in knobs}, "entry": entry},
  }


def _process(*arguments: str) -> subprocess.Popen:
  """Starts the script; sets have the same order in each of its processes."""
  environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
  return subprocess.Popen(
    [sys.executable, "-P", str(SCRIPT), *arguments],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env=environment,
    start_new_session=True,  # a terminal's Ctrl-C reaches this program, which then ends it
  )
