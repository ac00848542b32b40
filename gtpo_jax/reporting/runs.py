"""The runs of a report: read from their workdirs, and put together where nothing but the seed sets them apart."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.checkpoint.workdir import MAY_CHANGE
from gtpo_jax.config import Config, flatten, to_dict
from gtpo_jax.reporting.journal import read_jsonl
from gtpo_jax.runtime.errors import UserError

# What does not make another kind of run: chance, and where and how it is run and written down.
ALIKE = ("seed", *(name for name in MAY_CHANGE if name not in ("steps", "eval")))
KINDS = 8  # as many as can be told apart by their colours


@dataclasses.dataclass(frozen=True)
class Run:
  """A workdir's metrics."""

  workdir: Path
  config: dict[str, Any]  # by dotted name; nothing that it names outside the workdir is looked at
  rows: dict[
    int, dict[str, Any]
  ]  # of metrics.jsonl, by step; step 0 is the evaluation before the first
  evaluations: dict[int, dict[str, Any]]  # by step, with `intervals` where they are known

  @property
  def steps(self) -> int:
    """The last step."""
    return max(self.rows)

  @property
  def algorithm(self) -> Algorithm:
    """What it learned by."""
    fields = {
      key.removeprefix("algorithm."): value
      for key, value in self.config.items()
      if key.startswith("algorithm.")
    }
    return make(
      fields.pop("name"), **{key: value for key, value in fields.items() if value is not None}
    )


@dataclasses.dataclass(frozen=True)
class Kind:
  """Runs of one config, each with a seed of its own."""

  label: str
  runs: tuple[Run, ...]

  def series(self, of: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric over the steps that all seeds have reached: i64[m], and f64[runs, m], NaN where there is no number."""
    steps = sorted(set.intersection(*({step for step in run.rows if step} for run in self.runs)))
    return np.asarray(steps), np.asarray(
      [[number(run.rows[step], of) for step in steps] for run in self.runs]
    )

  def evaluated(self, of: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A metric of the evaluations that all seeds have had: steps i64[m], f64[runs, m], and its intervals f64[runs, m, 2]."""
    steps = sorted(set.intersection(*(set(run.evaluations) for run in self.runs)))
    values = [[number(run.evaluations[step], of) for step in steps] for run in self.runs]
    ends = [[_interval(run.evaluations[step], of) for step in steps] for run in self.runs]
    return (
      np.asarray(steps, int),
      np.asarray(values).reshape(len(self.runs), -1),
      np.asarray(ends).reshape(len(self.runs), -1, 2),
    )

  @functools.cached_property
  def eval_keys(self) -> list[str]:
    """The metrics of the evaluations of all its runs."""
    return sorted(
      {
        key
        for run in self.runs
        for row in run.evaluations.values()
        for key in row
        if key.startswith("eval/")
      }
    )


def read_run(workdir: Path) -> Run:
  """Reads a workdir.

  Raises:
    UserError: it holds no run, one without a step so far, or one that another version of this package wrote.
  """
  if not workdir.is_dir():
    raise UserError(f"no folder at {str(workdir)!r}; --workdir is the folder of a `gtpo train`")
  config = _config(workdir / "config.json")
  rows = _by_step(workdir / "metrics.jsonl")
  if not any(rows):
    raise UserError(
      f"no metrics in {str(workdir)!r}: its metrics.jsonl holds no step yet; try again when the first step is done"
    )
  if missing := {"reward/mean", "entropy/mean", "time/step"} - rows[max(rows)].keys():
    raise UserError(
      f"{str(workdir / 'metrics.jsonl')!r} has no {sorted(missing)[0]!r} at step {max(rows)}: another version of gtpo_jax "
      f"wrote it; make the report with that one"
    )
  evaluations = {
    step: {key: value for key, value in row.items() if key.startswith("eval/")}
    for step, row in rows.items()
  }
  for step, row in _by_step(workdir / "evaluations.jsonl").items():
    evaluations[step] = evaluations.get(step, {}) | row
  return Run(workdir, config, rows, {step: row for step, row in sorted(evaluations.items()) if row})


def kinds_of(runs: Sequence[Run]) -> list[Kind]:
  """The runs by kind, labelled by what sets the kinds apart.

  Raises:
    UserError: one of them twice, or too many kinds.
  """
  places = [str(run.workdir.resolve()) for run in runs]
  for place in places:
    if places.count(place) > 1:
      raise UserError(f"workdir {place!r} is named twice")
  groups: list[list[Run]] = []
  for run in runs:
    group = next((group for group in groups if not _distinct(group[0].config, run.config)), None)
    if group:
      group.append(run)
    else:
      groups.append([run])
  if len(groups) > KINDS:
    raise UserError(
      f"{len(groups)} kinds of run side by side cannot be told apart; name those of {KINDS} at most"
    )
  apart = list(
    dict.fromkeys(
      key for group in groups for key in _distinct(groups[0][0].config, group[0].config)
    )
  )
  return [
    Kind(_label(group[0].config, apart), tuple(sorted(group, key=lambda run: run.config["seed"])))
    for group in groups
  ]


def run_label(kind: Kind, run: Run) -> str:
  """A run among those of the report."""
  return f"{kind.label}, seed {run.config['seed']}" if len(kind.runs) > 1 else kind.label


def number(row: Mapping[str, Any], of: str) -> float:
  """A metric of a row; NaN where it is missing or no number."""
  value = row.get(of)
  return (
    float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
  )


def smoothed(values: np.ndarray, span: float) -> np.ndarray:
  """The exponential moving average of f64[..., m] over about `span` values, without the bias of its start; NaN is passed over."""
  keep = 1.0 - 1.0 / max(span, 1.0)
  total = np.zeros(values.shape[:-1])
  weight = np.zeros(values.shape[:-1])
  out = np.full(values.shape, np.nan)
  for i in range(values.shape[-1]):
    there = ~np.isnan(values[..., i])
    total = np.where(there, keep * total + np.nan_to_num(values[..., i]), total)
    weight = np.where(there, keep * weight + 1.0, weight)
    np.divide(total, weight, out=out[..., i], where=there & (weight > 0))
  return out


def _config(file: Path) -> dict[str, Any]:
  if not file.is_file():
    raise UserError(
      f"no run in {str(file.parent)!r}: it has no config.json; name the workdir of a `gtpo train`"
    )
  try:
    values = json.loads(file.read_text())
  except ValueError as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {error}") from error
  if not isinstance(values, dict):
    raise UserError(
      f"{str(file)!r} is not a config: it holds {type(values).__name__}, not an object"
    )
  known = flatten(to_dict(Config()))
  found = flatten(values)
  if strange := sorted(found.keys() - known.keys()):
    raise UserError(
      f"{str(file)!r} is of another version of gtpo_jax, with {strange[0]!r}; make the report with that one"
    )
  return known | found


def _by_step(file: Path) -> dict[int, dict[str, Any]]:
  rows = [row for row in read_jsonl(file) if isinstance(row, dict)]
  return {row["step"]: row for row in rows if isinstance(row.get("step"), int)}


def _interval(row: Mapping[str, Any], of: str) -> tuple[float, float]:
  ends = (row.get("intervals") or {}).get(of) or (None, None)
  return tuple(math.nan if end is None else float(end) for end in ends)


def _distinct(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
  return [
    key
    for key in a
    if a[key] != b[key] and not any(key == name or key.startswith(f"{name}.") for name in ALIKE)
  ]


def _label(config: Mapping[str, Any], apart: Sequence[str]) -> str:
  others = [
    f"{key.removeprefix('algorithm.')}={config[key]}"
    for key in apart
    if key != "algorithm.name" and config[key] is not None
  ]
  return ", ".join([config["algorithm.name"], *others[:3]])
