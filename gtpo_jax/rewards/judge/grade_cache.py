"""The grades that a judge has given, on disk, so that no request is made twice."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

FILE_NAME = "judge.jsonl"


def digest_of(*parts: str) -> str:
  """Returns a name for some texts: grades with equal names are the same."""
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class GradeCache:
  """Rewards by the digest of what they depend on.

  Until `open` is called, they are only in memory. Each entry is a line that is written at once, so
  a program that is killed loses none, and two programs may append to the same file.
  """

  def __init__(self):
    self._rewards: dict[str, float] = {}
    self._file: int | None = None
    self._lock = threading.Lock()

  def open(self, file: Path) -> None:
    """Reads the entries of a file, except damaged ones, and appends further ones to it.

    If the file cannot be written, grades are only in memory, and a message says so.
    """
    try:
      if file.exists():
        with file.open("rb") as lines:
          for line in lines:
            self._read(line)
      self._file = _open_to_append(file)
    except OSError as error:
      _warn(error)

  def _read(self, line: bytes) -> None:
    try:
      row = json.loads(line)
      if 0 <= row["reward"] <= 1:
        self._rewards[row["key"]] = float(row["reward"])
    except (ValueError, TypeError, KeyError, RecursionError):
      pass

  def get(self, key: str) -> float | None:
    """Returns the reward under a key, or None."""
    return self._rewards.get(key)

  def put(self, key: str, reward: float, **details: Any) -> None:
    """Keeps a reward, and writes it with `details` for people who read the file."""
    self._rewards[key] = reward
    row = {"key": key, "reward": reward, **details}
    line = json.dumps(row).encode() + b"\n"
    with self._lock:
      if self._file is None:
        return
      try:
        if os.write(self._file, line) < len(line):
          raise OSError("the disk is full")
      except OSError as error:
        self._close()
        _warn(error)

  def close(self) -> None:
    """Closes the file."""
    with self._lock:
      self._close()

  def _close(self) -> None:
    if self._file is not None:
      os.close(self._file)
      self._file = None


def _open_to_append(file: Path) -> int:
  """Opens a file at its end; a line that a full disk has torn is ended first."""
  opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
  size = os.fstat(opened).st_size
  if size and os.pread(opened, 1, size - 1) != b"\n":
    os.write(opened, b"\n")
  return opened


def _warn(error: OSError) -> None:
  print(
    f"gtpo: grades cannot be written to {FILE_NAME} ({error}); a resumed run will ask the judge "
    "for them again",
    file=sys.stderr,
    flush=True,
  )
