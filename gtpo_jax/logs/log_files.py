"""The JSON-lines files of a workdir, which a run appends to and reads back.

Whatever bytes a file contains, reading it yields only valid rows and never raises an error of
parsing. `LogFile.repair` makes a file whole when its run resumes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.logs.spool import read_lines
from gtpo_jax.runtime.files import set_aside
from gtpo_jax.runtime.paths import is_remote

Row = dict[str, Any]
MAX_LISTED = 8  # steps that a message lists


def is_row(row: Any) -> bool:
  """Whether a JSON value is a row of any log file: an object with the number of a step."""
  return isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0


def is_metrics(row: Any) -> bool:
  """Whether a JSON value is a row of metrics.jsonl: numbers by name, None for one without value."""
  return is_row(row) and all(value is None or _is_number(value) for value in row.values())


def is_sample(row: Any) -> bool:
  """Whether a JSON value is a row of samples.jsonl."""
  texts = ("prompt", "completion")
  is_text = lambda name: isinstance(row.get(name), str)
  return is_row(row) and all(map(is_text, texts)) and isinstance(row.get("correct"), bool | None)


def is_evaluation(row: Any) -> bool:
  """Whether a JSON value is a row of evaluations.jsonl: metrics, their intervals and settings."""
  is_dict = lambda name: isinstance(row.get(name, {}), dict)
  return is_row(row) and is_dict("intervals") and is_dict("settings")


@dataclasses.dataclass(frozen=True)
class LogFile:
  """One log file."""

  path: Path  # its path; the file need not exist
  # whether a JSON value is a row of the file. Lines with other values are damaged
  is_valid: Callable[[Any], bool] = is_row
  per_step: int = 1  # the number of rows that a step has at most

  def rows(self) -> Iterator[Row]:
    """Yields the valid rows one at a time, so that a long file is never completely in memory."""
    return (row for row in self._lines() if row is not None)

  def append(self, row: Mapping[str, Any]) -> None:
    """Adds a row at the end."""
    with self.path.open("a") as out:
      out.write(json.dumps(row) + "\n")

  def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces all rows. If the program is killed meanwhile, the file is unchanged."""
    temporary = self.path.with_suffix(".tmp")
    with temporary.open("w") as out:
      out.writelines(json.dumps(row) + "\n" for row in rows)
    temporary.replace(self.path)

  def insert(self, row: Mapping[str, Any]) -> None:
    """Adds a row of a step that has none, before the rows of later steps."""
    rows = list(self.rows())
    later = [i for i, other in enumerate(rows) if other["step"] > row["step"]]
    position = later[0] if later else len(rows)
    self.rewrite([*rows[:position], row, *rows[position:]])

  def repair(self, last_step: int) -> Repair:
    """Removes the rows of later steps, damaged lines, and rows that are there twice.

    Afterwards the steps are in order. Of two rows of a step in a file with one row per step, the
    last one is kept.
    """
    in_its_place = self.path.exists() and not self.path.is_file()  # such as a folder
    aside = set_aside(self.path).name if in_its_place else ""
    if aside or not self.path.exists():
      return Repair(self.path.name, [], 0, [], aside)
    damaged = 0
    steps: list[int] = []
    removed = set()
    for row in self._lines():
      if row is None:
        damaged += 1
      elif row["step"] > last_step:
        removed.add(row["step"])
      else:
        steps.append(row["step"])
    counts = Counter(steps)
    ordered = all(a <= b for a, b in itertools.pairwise(steps))
    if not ordered or max(counts.values(), default=0) > self.per_step:
      rows = [row for row in self.rows() if row["step"] <= last_step]
      self.rewrite(_in_order(rows, self.per_step))
    elif damaged or removed or not _ends_with_newline(self.path):
      self.rewrite(row for row in self.rows() if row["step"] <= last_step)
    return Repair(self.path.name, sorted(counts), damaged, sorted(removed))

  def _lines(self) -> Iterator[Row | None]:
    """Yields the row of each line that is not blank; None for a damaged line."""
    if self.path.is_file() or (is_remote(self.path) and self.path.is_dir()):
      for line in filter(bytes.strip, read_lines(self.path)):
        try:
          row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):  # from JSON or UTF-8
          row = None
        yield row if self.is_valid(row) else None


def _ends_with_newline(path: Path) -> bool:
  with path.open("rb") as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    return file.read() in (b"", b"\n")


def _in_order(rows: list[Row], per_step: int) -> Iterator[Row]:
  """Yields the rows by step; of too many rows of a step, the last one, or the distinct ones."""
  by_step: dict[int, list[Row]] = {}
  for row in rows:
    same = by_step.setdefault(row["step"], [])
    if per_step == 1:
      same.clear()
    same.append(row)
  for step in sorted(by_step):
    same = by_step[step]
    for i in reversed(range(len(same))):
      if len(same) > per_step and same[i] in same[:i]:
        del same[i]
    yield from same


@dataclasses.dataclass(frozen=True)
class Repair:
  """The findings of `LogFile.repair`."""

  name: str  # the file's name
  steps: list[int]  # the steps that have a row, in order
  damaged: int  # how many lines were damaged
  removed: list[int]  # the later steps whose rows were removed, in order
  aside: str = ""  # the name that a folder in the file's place got; "" if there was none

  def messages(self, expected: Iterable[int]) -> list[str]:
    """Returns lines for the user on the damage, and on the expected steps that have no row."""
    lines = []
    if self.aside:
      lines.append(f"{self.name} was not a file and was renamed to {self.aside}")
    if self.damaged:
      lines.append(f"{self.name} had {self.damaged} damaged line(s), which were removed")
    if missing := sorted(set(expected).difference(self.steps)):
      lines.append(f"{self.name} lacks {describe_steps(missing)}, which cannot be known again")
    return lines


def describe_steps(steps: list[int]) -> str:
  """Returns steps in ascending order as text, such as "step 3" or "steps 1, 2 and 40 more"."""
  listed = ", ".join(map(str, steps[:MAX_LISTED]))
  more = f" and {len(steps) - MAX_LISTED} more" if len(steps) > MAX_LISTED else ""
  return f"step{'s' if len(steps) > 1 else ''} {listed}{more}"


def read_jsonl(path: Path) -> list[Row]:
  """Returns the rows of a log file.

  Skips damaged lines, such as one that was being written when the process was killed.
  """
  return list(LogFile(path).rows())


def _is_number(value: Any) -> bool:
  """Whether a value is a number that a float can hold."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return is_number and abs(value) <= sys.float_info.max
