"""Results that are stored one by one, so that a study goes on where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax

from gtpo_jax.runtime.errors import UserError

Result = dict[str, Any]
DIGITS = 6  # significant digits of a stored number


class Cells:
  """The results of a study by name, as JSON files.

  A result is read from `out`, or from `committed`, where results of earlier sessions are. Each
  stores the settings that it was computed with and the machine that computed it. Results of
  different machines differ in their rounding, so they are not compared digit by digit.

  Attributes:
    out: the folder that new results are written to.
    left: the names of cells that `compute` did not start, for lack of time or by the pattern.
  """

  def __init__(
    self,
    out: Path,
    committed: Path,
    patterns: Sequence[str] = ("*",),
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:
    out: the folder for new results, which is made.
    committed: the folder with results of earlier sessions; it may be missing.
    patterns: only cells whose names match one of them are computed.
    budget_s: no cell is started that would end later than this, if it took as long as the
      longest one of its kind so far. The kind is the part of the name before the first hyphen.
    clock: returns the time in seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    self.out = out
    self.left: list[str] = []
    self._committed = committed
    self._patterns = patterns
    self._clock = clock
    self._end = clock() + budget_s
    self._longest: dict[str, float] = {}

  def find(self, name: str, settings: Result) -> Result | None:
    """Returns a stored result, or None if there is none.

    Raises:
      UserError: it was computed with other settings.
    """
    for folder in (self.out, self._committed):
      file = folder / f"{name}.json"
      if not file.exists():
        continue
      result = json.loads(file.read_text())
      if result["settings"] != json.loads(json.dumps(settings)):
        raise UserError(
          f"{str(file)!r} was computed with other settings; remove it, or use another --out and "
          "--results"
        )
      return result
    return None

  def compute(self, name: str, settings: Result, make: Callable[[], Result]) -> Result | None:
    """Returns a stored result, or computes and stores it; None if it may not be started now."""
    found = self.find(name, settings)
    if found is not None:
      return found
    if not self.may_start(name):
      self.left.append(name)
      return None
    began = self._clock()
    with self.timed(name):
      result = make()
    seconds = round(self._clock() - began, 1)
    stored = {"settings": settings, "machine": machine(), "seconds": seconds, **rounded(result)}
    write(self.out / f"{name}.json", json.dumps(stored))
    return json.loads(json.dumps(stored))

  def stored(self) -> dict[str, Result]:
    """Returns all stored results by name, in the order of the names."""
    files = {
      file.stem: file for folder in (self._committed, self.out) for file in folder.glob("*-*.json")
    }
    return {name: json.loads(files[name].read_text()) for name in sorted(files)}

  def may_start(self, name: str) -> bool:
    """Returns whether a cell is among those to compute, and enough time seems to be left."""
    expected = self._longest.get(name.split("-")[0], 0.0)
    return any(fnmatch(name, pattern) for pattern in self._patterns) and (
      self._clock() + expected < self._end
    )

  @contextlib.contextmanager
  def timed(self, name: str) -> Iterator[None]:
    """Prints how long the block takes, and remembers it for `may_start`."""
    began = self._clock()
    yield
    seconds = self._clock() - began
    kind = name.split("-")[0]
    self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
    print(f"{name}: {seconds:.0f} s", flush=True)


def rounded(value: Any) -> Any:
  """Returns plain data with `DIGITS` significant digits of every float."""
  if isinstance(value, dict):
    return {key: rounded(x) for key, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [rounded(x) for x in value]
  return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(file: Path, text: str) -> None:
  """Writes a file under its name only when it is complete."""
  part = file.with_suffix(".part")
  part.write_text(text + "\n")
  part.rename(file)


def machine() -> dict[str, Any]:
  """Returns what the digits of a result depend on: the CPU, the cores used, and the versions."""
  lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
  fields = dict(line.split(":", 1) for line in lines if ":" in line)
  names = {key.strip(): text.strip() for key, text in fields.items()}
  flags = names.get("flags", "").split()
  return {
    "cpu": names.get("model name", platform.processor() or platform.machine()),
    "family": " ".join(names.get(key, "?") for key in ("cpu family", "model", "stepping")),
    "bfloat16_units": "avx512_bf16" in flags or "amx_bf16" in flags,
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
  }
