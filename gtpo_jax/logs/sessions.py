"""Records when, where and how a run was executed: WORKDIR/sessions.json.

A session is one process (or one group of processes) that worked on the run. A run that is never
interrupted has one; every resume adds one.
"""

from __future__ import annotations

import calendar
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import gtpo_jax
from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.runtime.paths import write_atomically

FILE = "sessions.json"
PACKAGES = ("jax", "jaxlib", "flax")
KEYS = {"first_step", "last_step", "started", "until", "command", "versions", "machine", "devices"}
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # UTC


class SessionRecord:
  """Keeps the record of the present session up to date. Only the first process writes.

  A session that completes no step of a resumed run is not recorded. A change of the system's clock
  during the session does not change its duration.
  """

  def __init__(self, workdir: Path, first_step: int, began: float):
    """Adds a session to the workdir's record.

    Args:
      workdir: the run's folder.
      first_step: completed steps at the start of the session; 0 for a new run.
      began: when the session began, a value of `time.monotonic`.
    """
    self._file = workdir / FILE
    self._earlier = read_sessions(workdir) if first_step else []
    self._epoch = time.time() - time.monotonic()
    self._session = describe_session(first_step) | {"started": _utc(self._epoch + began)}
    self.update(first_step)

  def update(self, step: int) -> None:
    """Notes that `step` steps are complete by now."""
    progress = step > self._session["first_step"] or not self._earlier
    if progress and is_first_process():
      self._session |= {"last_step": step, "until": _utc(self._epoch + time.monotonic())}
      text = json.dumps([*self._earlier, self._session], indent=2) + "\n"
      write_atomically(self._file, text.encode())


def describe_session(first_step: int) -> dict[str, Any]:
  """Returns the facts about this process: command, versions, machine and devices."""
  devices = jax.devices()
  return {
    "first_step": first_step,
    "command": command_line(sys.argv),
    "versions": {
      "gtpo_jax": gtpo_jax.__version__,
      "python": platform.python_version(),
      **{name: importlib.metadata.version(name) for name in PACKAGES},
    },
    "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
    "devices": (f"{len(devices)} x {devices[0].device_kind} in {jax.process_count()} process(es)"),
  }


def command_line(argv: Sequence[str]) -> str:
  """Returns the `gtpo` command that started this process; "" for any other Python program."""
  program = Path(argv[0])
  started_by_module = program.name == "__main__.py" and program.parent.name == "gtpo_jax"
  return shlex.join(["gtpo", *argv[1:]]) if program.name == "gtpo" or started_by_module else ""


def read_sessions(workdir: Path) -> list[dict[str, Any]]:
  """Returns the recorded sessions, oldest first; [] if the run has no record or a damaged one."""
  file = workdir / FILE
  try:
    rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
  except (ValueError, RecursionError):
    return []
  return [row for row in rows if _is_session(row)] if isinstance(rows, list) else []


def _is_session(row: Any) -> bool:
  """Whether a JSON value is a session that `SessionRecord` wrote."""
  if not isinstance(row, dict) or not row.keys() >= KEYS:
    return False
  texts = all(isinstance(row[key], str) for key in ("command", "machine", "devices"))
  steps = all(type(row[key]) is int for key in ("first_step", "last_step"))
  versions = row["versions"]
  if not (texts and steps and isinstance(versions, dict)):
    return False
  try:
    return all(_seconds(row[key]) >= 0 for key in ("started", "until"))
  except (ValueError, TypeError, OverflowError):  # not a time
    return False


def duration(sessions: Sequence[Mapping[str, Any]]) -> float:
  """Returns the seconds that the sessions took together, up to each one's last record."""
  seconds = (_seconds(row["until"]) - _seconds(row["started"]) for row in sessions)
  return sum(max(value, 0) for value in seconds)


def _utc(seconds: float) -> str:
  return time.strftime(TIME_FORMAT, time.gmtime(round(seconds)))


def _seconds(text: str) -> float:
  return calendar.timegm(time.strptime(text, TIME_FORMAT))
