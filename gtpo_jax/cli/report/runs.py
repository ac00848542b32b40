"""Reads the runs of a report from their workdirs, and groups runs that differ only in seed."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.checkpoint.workdir import MAY_CHANGE, load_config
from gtpo_jax.config import flatten, resolved_dict
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.paths import is_remote

# Fields in which runs of one group may differ: the seed, the day, and how a run executes and logs.
IGNORED = ("seed", "data.date", *(name for name in MAY_CHANGE if name not in ("steps", "eval")))
MAX_GROUPS = 8  # the number of distinguishable colors
OF_ALL = "eval/all/"  # metrics over several sources of problems, each of which has its own too
REQUIRED = {"reward/mean", "entropy/mean", "time/step"}  # metrics that every step must have


@dataclasses.dataclass(frozen=True)
class RunLogs:
  """The config and the metrics of a workdir."""

  workdir: Path
  config: dict[str, Any]  # by dotted name; files that it names are never opened
  rows: dict[int, dict[str, Any]]  # metrics by step; step 0 is the evaluation before training
  evaluations: dict[int, dict[str, Any]]  # by step, with `intervals` if recorded
  left_out: tuple[int, ...] = ()  # steps whose evaluations had other settings than the last one

  @property
  def steps(self) -> int:
    """The last step."""
    return max(self.rows)

  @property
  def algorithm(self) -> Algorithm:
    """The algorithm that trained the run."""
    fields = {
      key.removeprefix("algorithm."): value
      for key, value in self.config.items()
      if key.startswith("algorithm.")
    }
    name = fields.pop("name")
    return make(name, **{key: value for key, value in fields.items() if value is not None})


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """Runs of one config with different seeds. Unrelated to a group of completions."""

  label: str
  runs: tuple[RunLogs, ...]

  def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a metric over the m steps that every run has reached.

    Returns:
      Steps i64[m] and values f64[runs, m], NaN where a run has no number.
    """
    steps = sorted(set.intersection(*({step for step in run.rows if step} for run in self.runs)))
    values = [[number(run.rows[step], metric) for step in steps] for run in self.runs]
    return np.asarray(steps), np.asarray(values)

  def evaluated(self, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a metric of the m evaluations that every run has.

    Returns:
      Steps i64[m], values f64[runs, m] and intervals f64[runs, m, 2].
    """
    steps = sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))
    values = [[number(run.evaluations[step], metric) for step in steps] for run in self.runs]
    ends = [[_interval(run.evaluations[step], metric) for step in steps] for run in self.runs]
    return (
      np.asarray(steps, int),
      np.asarray(values).reshape(len(self.runs), -1),
      np.asarray(ends).reshape(len(self.runs), -1, 2),
    )

  @functools.cached_property
  def eval_keys(self) -> list[str]:
    """The names of the evaluation metrics of all runs, first those over several sources."""
    rows = (row for run in self.runs for row in run.evaluations.values())
    keys = {key for row in rows for key in row if key.startswith("eval/")}
    return sorted(keys, key=lambda key: (not key.startswith(OF_ALL), key))

  @functools.cached_property
  def sources(self) -> list[str]:
    """The labels of the sources of training problems, if a run has several."""
    names = {key for run in self.runs for row in run.rows.values() for key in row}
    parts = [key.split("/") for key in sorted(names)]
    return [part[1] for part in parts if (part[0], part[-1]) == ("source", "accuracy")]


def read_run(workdir: Path) -> RunLogs:
  """Reads a workdir."""
  if not workdir.is_dir():
    raise UserError(f"no folder at {str(workdir)!r}; --workdir is the folder of a `gtpo train`")
  config = _read_config(workdir)
  rows = _by_step(workdir / "metrics.jsonl")
  if not any(rows):
    raise UserError(
      f"no metrics in {str(workdir)!r}: its metrics.jsonl has no step yet; "
      f"try again after the first step"
    )
  if missing := REQUIRED - rows[max(rows)].keys():
    raise UserError(
      f"{str(workdir / 'metrics.jsonl')!r} has no {sorted(missing)[0]!r} at step {max(rows)}: "
      f"another version of gtpo_jax wrote it; make the report with that version"
    )
  evaluations = {
    step: {key: value for key, value in row.items() if key.startswith("eval/")}
    for step, row in rows.items()
  }
  for step, row in _by_step(workdir / "evaluations.jsonl").items():
    evaluations[step] = evaluations.get(step, {}) | row
  evaluations = {step: row for step, row in sorted(evaluations.items()) if row}
  settings = {step: row.get("settings") for step, row in evaluations.items()}
  left_out = tuple(step for step in settings if settings[step] != settings[max(settings)])
  for step in left_out:
    del evaluations[step]
  return RunLogs(workdir, config, rows, evaluations, left_out)


def group_runs(runs: Sequence[RunLogs]) -> list[RunGroup]:
  """Groups runs that differ only in seed, and labels each group by the fields that differ."""
  resolved = (run.workdir if is_remote(run.workdir) else run.workdir.resolve() for run in runs)
  paths = [str(path) for path in resolved]
  for path in paths:
    if paths.count(path) > 1:
      raise UserError(f"workdir {path!r} is listed twice")
  groups: list[list[RunLogs]] = []
  for run in runs:
    group = next((g for g in groups if not _differing(g[0].config, run.config)), None)
    if group:
      group.append(run)
    else:
      groups.append([run])
  if len(groups) > MAX_GROUPS:
    raise UserError(
      f"{len(groups)} different configs are too many for one report; "
      f"pass runs of at most {MAX_GROUPS}"
    )
  first = groups[0][0].config
  differing = list(dict.fromkeys(key for g in groups for key in _differing(first, g[0].config)))
  by_seed = lambda run: run.config["seed"]
  return [
    RunGroup(_label(group[0].config, differing), tuple(sorted(group, key=by_seed)))
    for group in groups
  ]


def run_label(group: RunGroup, run: RunLogs) -> str:
  """Returns the label of a run: its group's, and the seed if the group has several runs."""
  return f"{group.label}, seed {run.config['seed']}" if len(group.runs) > 1 else group.label


def number(row: Mapping[str, Any], metric: str) -> float:
  """Returns a metric of a row; NaN if it is missing or not a number."""
  value = row.get(metric)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan


def smoothed(values: np.ndarray, span: float) -> np.ndarray:
  """Returns the bias-corrected exponential moving average of f64[..., m]; NaN is skipped.

  Args:
    values: f64[..., m].
    span: about how many values are averaged; if at most 1, `values` are returned unchanged.
  """
  decay = 1.0 - 1.0 / max(span, 1.0)
  total = np.zeros(values.shape[:-1])
  weight = np.zeros(values.shape[:-1])
  out = np.full(values.shape, np.nan)
  for i in range(values.shape[-1]):
    present = ~np.isnan(values[..., i])
    total = np.where(present, decay * total + np.nan_to_num(values[..., i]), total)
    weight = np.where(present, decay * weight + 1.0, weight)
    np.divide(total, weight, out=out[..., i], where=present & (weight > 0))
  return out


def _read_config(workdir: Path) -> dict[str, Any]:
  """Returns the config of a run by dotted name, with every setting that its algorithm reads."""
  try:
    return flatten(resolved_dict(load_config(workdir)))
  except UserError as error:
    file = str(workdir / "config.json")
    if file in str(error) or not (workdir / "config.json").is_file():
      raise
    raise UserError(
      f"{file!r} is of another version of gtpo_jax ({error}); make the report with that version"
    ) from error


def _by_step(file: Path) -> dict[int, dict[str, Any]]:
  rows = [row for row in read_jsonl(file) if isinstance(row, dict)]
  return {row["step"]: row for row in rows if isinstance(row.get("step"), int)}


def _interval(row: Mapping[str, Any], metric: str) -> tuple[float, float]:
  intervals = row.get("intervals")
  ends = intervals.get(metric) if isinstance(intervals, dict) else None
  if not isinstance(ends, list) or len(ends) != 2:
    return math.nan, math.nan
  low, high = ({"end": end} for end in ends)
  return number(low, "end"), number(high, "end")


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
  """Returns the fields that place two runs in different groups."""
  ignored = lambda key: any(key == name or key.startswith(f"{name}.") for name in IGNORED)
  return [key for key in a if a[key] != b[key] and not ignored(key)]


def _label(config: Mapping[str, Any], differing: Sequence[str]) -> str:
  """Returns a label: the algorithm, and the differing fields that are not at published values."""
  name = config["algorithm.name"]
  published = {f"algorithm.{key}": value for key, value in make(name).recipe.settings.items()}
  fields = [
    f"{key.removeprefix('algorithm.')}={config[key]}"
    for key in differing
    if key != "algorithm.name" and config[key] not in (None, published.get(key))
  ]
  return ", ".join([name, *fields])
