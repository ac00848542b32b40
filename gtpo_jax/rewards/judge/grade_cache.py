"""The grades that a judge has given, on disk, so that no request is made twice."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

FILE_NAME = "judge.jsonl"


class GradeCache:
  """Rewards by the digest of what they depend on.

  Until `open` is called, they are only in memory. Each entry is a line that is written at once, so
  a program that is killed loses none, and two programs may append to the same file.
  """

  def __init__(self):
    self._rewards: dict[str, float] = {}
    self._file: io.FileIO | None = None

  def open(self, path: Path) -> None:
    """Reads the entries of a file, except damaged ones, and appends further ones to it.

    If the file cannot be written, grades are only in memory, and a message says so.
    """
    line = b"\n"
    try:
      if path.exists():
        with path.open("rb") as lines:
          for line in lines:
            self._read(line)
      self._file = path.open("ab", buffering=0)
      if not line.endswith(b"\n"):  # torn by a full disk
        self._file.write(b"\n")
    except OSError as error:
      self._give_up(error)

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
    if self._file:
      line = json.dumps({"key": key, "reward": reward, **details}).encode() + b"\n"
      try:
        if self._file.write(line) < len(line):
          raise OSError("the disk is full")
      except OSError as error:
        self._give_up(error)

  def close(self) -> None:
    """Closes the file."""
    if self._file:
      self._file.close()
    self._file = None

  def _give_up(self, error: OSError) -> None:
    self.close()
    print(
      f"gtpo: grades cannot be written to {FILE_NAME} ({error}); a resumed run will ask the judge "
      "for them again",
      file=sys.stderr,
      flush=True,
    )
