"""What studies of several arms and seeds share: options, stored results, statistics, tables."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gtpo_jax.cli.probing.statistics import holm
from gtpo_jax.loop.evaluation.estimators import pass_at_k
from gtpo_jax.runtime.errors import UserError

Result = dict[str, Any]
Seeds = Mapping[int, Mapping[str, Any]]  # the runs of an arm, or their last evaluations
DIGITS = 6  # significant digits of a stored number
DRAWS = 10_000  # of the bootstrap
COLORS = (
  "#333333",
  "#1a6faf",
  "#cf5a08",
  "#2a8a4a",
  "#8a4a9a",
  "#999999",
  "#b09000",
  "#c03060",
  "#00a0b0",
  "#e08aa8",
)
HEADS = ("arm", "seeds", "pass@1", "difference, 95 % interval", "p, Holm")
HEADS = (*HEADS, "95 % interval over seeds", "pass@8")


# --- the command line ---


def names_of(valid: Iterable[str], separator: str = ",") -> Callable[[str], list[str]]:
  """Returns a function that reads names of things that exist from the text of an option."""

  def read(text: str) -> list[str]:
    names = text.split(separator)
    if unknown := set(names) - set(valid):
      wrong = sorted(unknown)[0]
      raise argparse.ArgumentTypeError(f"{wrong!r} is not one of {', '.join(valid)}")
    return names

  return read


def study_parser(
  doc: str, stages: Iterable[str], results: Path | None = None
) -> argparse.ArgumentParser:
  """Returns a parser of the options that studies share.

  Args:
    doc: the docstring of the script.
    stages: what it can do.
    results: where results of earlier sessions are. If it is given, there are options for the parts
      to compute and for the time.
  """
  parser = argparse.ArgumentParser(description=doc.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--stages", type=names_of(stages), default=list(stages))
  if results:
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--cells", default="*", help="patterns of the names to compute")
    parser.add_argument("--budget_minutes", type=float, default=float("inf"))
  return parser


def run_stages(
  args: argparse.Namespace, cells: Cells, stages: Mapping[str, Callable[[Cells], None]]
) -> None:
  """Runs the stages that were asked for, in their order, and says what is left to compute.

  If one ends with a `UserError`, the program ends with its message.
  """
  try:
    for name, run in stages.items():
      if name in args.stages:
        run(cells)
  except UserError as error:
    sys.exit(f"error: {error}")
  if cells.left:
    print(f"{len(cells.left)} parts are left, the first is {cells.left[0]}", flush=True)


# --- stored results ---


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
    committed: Path | None = None,
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
    self._folders = [folder for folder in (out, committed) if folder]
    self._patterns = patterns
    self._clock = clock
    self._end = clock() + budget_s
    self._longest: dict[str, float] = {}

  @classmethod
  def of(cls, args: argparse.Namespace) -> Cells:
    """Returns the results that the options of `study_parser` with `results` name."""
    return cls(args.out, args.results, args.cells.split(","), 60 * args.budget_minutes)

  def find(self, name: str, settings: Result) -> Result | None:
    """Returns a stored result, or None if there is none.

    Raises:
      UserError: it was computed with other settings.
    """
    for folder in self._folders:
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
    part = self.out / f"{name}.part"
    part.write_text(json.dumps(stored) + "\n")
    part.rename(self.out / f"{name}.json")  # under its name only when it is complete
    return json.loads(json.dumps(stored))

  def stored(self, kind: str = "") -> dict[str, Result]:
    """Returns all stored results of a kind by name, in the order of the names."""
    pattern = f"{kind or '*'}-*.json"
    files = {file.stem: file for folder in reversed(self._folders) for file in folder.glob(pattern)}
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


def slug(name: str) -> str:
  """Returns a name as part of a file name, without hyphens."""
  return "_".join("".join(char if char.isalnum() or char == "." else " " for char in name).split())


# --- statistics ---


def paired_difference(values: Sequence[float], others: Sequence[float]) -> str:
  """Returns the mean of the paired differences in percentage points, with its 95 % interval.

  The interval is that of a t-test. The text is empty if there is only one pair.
  """
  if len(values) < 2:
    return ""
  if values == others:
    return "+0.0"
  import scipy.stats

  test = scipy.stats.ttest_rel(values, others)
  return interval((np.mean(values) - np.mean(others), *test.confidence_interval(0.95)))


def compare(runs: Seeds, baseline: Seeds) -> tuple[float, float, float, float]:
  """Returns the difference in pass@1, the ends of its 95 % interval, and its p-value.

  It is between the means over the seeds that both have, with a bootstrap over held-out problems.

  Args:
    runs: the runs of an arm, by seed.
    baseline: those of uniform credit, or of the arm's control.
  """
  seeds = sorted(set(runs) & set(baseline))
  mean = lambda of: np.mean([pass_by_problem(of[seed], 1) for seed in seeds], axis=0)
  differences = mean(runs) - mean(baseline)  # f64[problems]
  rng = np.random.default_rng(0)
  p = len(differences)
  draws = rng.multinomial(p, np.full(p, 1 / p), size=DRAWS) @ differences / p
  low, high = np.percentile(draws, (2.5, 97.5))
  one_sided = min((draws <= 0).mean(), (draws >= 0).mean())
  return float(differences.mean()), float(low), float(high), max(2 * one_sided, 1 / DRAWS)


def over_seeds(runs: Seeds, baseline: Seeds) -> str:
  """Returns the difference in pass@1, paired by seed."""
  shared = sorted(set(runs) & set(baseline))
  mean = lambda of: [pass_by_problem(of[seed], 1).mean() for seed in shared]
  return paired_difference(mean(runs), mean(baseline))


def pass_by_problem(run: Mapping[str, Any], k: int) -> np.ndarray:
  """Returns pass@k of each held-out problem."""
  return np.asarray([pass_at_k(run["samples"], count, k) for count in run["correct"]])


# --- tables ---


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  """Returns a table in Markdown, after an empty line."""
  lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
  return ["", lines[0], "|---" * len(heads) + "|", *lines[1:]]


def number(value: float) -> str:
  """Returns a number with two digits, or a hyphen if it is not finite."""
  return f"{value:.2f}" if np.isfinite(value) else "-"


def interval(compared: Sequence[float]) -> str:
  """Returns a difference and the ends of its interval in percentage points."""
  mean, low, high = compared[:3]
  return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def mean_and_deviation(values: Iterable[float], digits: int) -> str:
  """Returns the mean of values and their standard deviation, 0 for a single one."""
  values = np.asarray(values)
  deviation = values.std(ddof=1) if len(values) > 1 else 0.0
  return f"{values.mean():.{digits}f} +- {deviation:.{digits}f}"


def training_table(
  by_arm: Mapping[str, Seeds],
  baseline: str,
  controls: Mapping[str, Sequence[str]],
  more: Mapping[str, Callable[[str], str]],
) -> list[str]:
  """Returns the table of trained arms, then a line for each arm and control.

  Args:
    by_arm: the last evaluation of each seed, by arm: "samples", and "correct" by problem.
    baseline: the arm that all others are compared with.
    controls: the arms that an arm is compared with besides.
    more: further columns: the cell of an arm.
  """
  both = lambda arm, other: bool(set(by_arm.get(arm, ())) & set(by_arm.get(other, ())))
  others = [arm for arm in by_arm if arm != baseline and both(arm, baseline)]
  compared = {arm: compare(by_arm[arm], by_arm[baseline]) for arm in others}
  p_values = holm({arm: p for arm, (*_, p) in compared.items()})
  rows = []
  for arm, seeds in by_arm.items():
    of_seeds = lambda k, seeds=seeds: [
      100 * pass_by_problem(run, k).mean() for run in seeds.values()
    ]
    cells = [arm, str(len(seeds)), mean_and_deviation(of_seeds(1), 1), "", "", ""]
    if arm in compared:
      cells[3:] = [interval(compared[arm]), f"{p_values[arm]:.2g}"]
      cells.append(over_seeds(seeds, by_arm[baseline]))
    cells.append(mean_and_deviation(of_seeds(8), 1))
    rows.append([*cells, *(cell(arm) for cell in more.values())])
  lines = table([*HEADS, *more], rows)
  for arm, control in ((arm, other) for arm, of in controls.items() for other in of):
    if both(arm, control):
      result = compare(by_arm[arm], by_arm[control])
      text = f"{arm} minus {control}: {interval(result)}, p = {result[3]:.2g}"
      paired = over_seeds(by_arm[arm], by_arm[control])
      lines += ["", f"{text}; over seeds {paired}" if paired else text]
  return lines


def draw_curves(
  rows: Mapping[str, Mapping[str, Seeds]],
  panels: Mapping[str, str],
  arms: Iterable[str],
  file: Path,
) -> None:
  """Draws numbers of the runs over the steps: the mean of the seeds, and their range.

  Args:
    rows: the runs by arm and seed, for each row of the figure.
    panels: the title of each column, by its key in the points of a curve. A panel is left out where
      a task has no such number.
    arms: their order, which decides the colours.
    file: where the figure is written.
  """
  import matplotlib
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

  drawn = [arm for arm in arms if any(arm in by_arm for by_arm in rows.values())]
  colors = dict(zip(drawn, itertools.cycle(COLORS)))
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(11, 0.7 + 2.2 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(panels), squeeze=False)
    for line, (name, by_arm) in zip(grid, rows.items(), strict=True):
      line[0].set_ylabel(name)
      for axes, (key, title) in zip(line, panels.items(), strict=True):
        curves = {arm: [run["curve"] for run in seeds.values()] for arm, seeds in by_arm.items()}
        axes.set_visible(np.isfinite(next(iter(curves.values()))[0][0][key]))
        for arm, of_seeds in curves.items():
          steps = [point["step"] for point in of_seeds[0]]
          values = np.asarray([[point[key] for point in curve] for curve in of_seeds])
          axes.plot(steps, values.mean(0), color=colors[arm], linewidth=1.2)
          axes.fill_between(steps, values.min(0), values.max(0), color=colors[arm], alpha=0.12)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
      axes.set_xlabel("step")
    handles = [Line2D([], [], color=colors[arm], label=arm) for arm in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=130)
