"""Writes the log files of a workdir (metrics, evaluations and samples .jsonl) and its trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.reporting.credit import cut_credit_back
from gtpo_jax.reporting.trackers import TensorBoard, Tracker
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process


class Journal:
  """Appends to the log files and passes metrics and samples to the trackers.

  On resume it removes the lines after the restored step, so no step appears twice. Only the first
  process writes. All processes must call `read` together.
  """

  def __init__(
    self,
    workdir: Path,
    resumed_step: int,
    tensorboard: bool,
    make_trackers: Callable[[], Sequence[Tracker]] = tuple,
  ):
    """Opens the files of `workdir`.

    Args:
      workdir: the run's folder.
      resumed_step: later steps are removed from the files.
      tensorboard: whether to write TensorBoard files.
      make_trackers: creates further trackers; called on the first process only.
    """
    self.metrics_file = workdir / "metrics.jsonl"
    self._samples_file = workdir / "samples.jsonl"
    self._evaluations_file = workdir / "evaluations.jsonl"
    self._trackers: list[Tracker] = []
    if not is_first_process():
      return
    for file in (self.metrics_file, self._evaluations_file, self._samples_file):
      _cut_back(file, resumed_step)
    cut_credit_back(workdir, resumed_step)
    if tensorboard:
      self._trackers.append(TensorBoard(workdir, resumed_step))
    self._trackers += make_trackers()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends the metrics of a step as one JSON object. Values that are not finite become null."""
    if is_first_process():
      _append(self.metrics_file, {"step": step, **_null_if_not_finite(metrics)})
      self._track(step, metrics)

  def amend(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds metrics to a step that is already in the file."""
    if is_first_process():
      added = _null_if_not_finite(metrics)
      rows = _each(self.metrics_file)
      _rewrite(self.metrics_file, (row | added if row["step"] == step else row for row in rows))
      self._track(step, metrics)

  def _track(self, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in self._trackers:
      tracker.log_metrics(step, metrics)

  def write_evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
    """Appends an `Evaluation.summary`, which has every metric at each k and the intervals."""
    if is_first_process():
      _append(self._evaluations_file, {"step": step, **summary})

  def write_sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """Appends one completion to samples.jsonl."""
    if is_first_process():
      _append(
        self._samples_file,
        {"step": step, "prompt": prompt, "completion": completion, "correct": correct},
      )
    for tracker in self._trackers:
      tracker.log_sample(step, prompt, completion, correct)

  def read(self, prefix: str = "") -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl: the step, and the metrics whose names have `prefix`."""
    return broadcast_from_first(
      lambda: [
        {name: value for name, value in row.items() if name == "step" or name.startswith(prefix)}
        for row in _each(self.metrics_file)
      ]
    )

  def close(self) -> None:
    """Closes the trackers, which flushes what they buffer."""
    for tracker in self._trackers:
      tracker.close()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
  """Returns the objects of a JSON-lines file.

  Skips invalid lines, such as one that was being written when the process was killed.
  """
  return list(_each(file))


def _each(file: Path) -> Iterator[dict[str, Any]]:
  """Yields the objects one at a time, so that a long file is never completely in memory."""
  if not file.exists():
    return
  with file.open() as lines:
    for line in lines:
      try:
        yield json.loads(line)
      except json.JSONDecodeError:
        continue


def _append(file: Path, row: Mapping[str, Any]) -> None:
  if "://" in str(file):  # object stores cannot append
    file.write_text((file.read_text() if file.exists() else "") + json.dumps(row) + "\n")
    return
  with file.open("a") as out:
    out.write(json.dumps(row) + "\n")


def _cut_back(file: Path, step: int) -> None:
  """Removes the rows of later steps."""
  if file.exists():
    _rewrite(file, (row for row in _each(file) if row["step"] <= step))


def _rewrite(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
  temporary = file.with_suffix(".tmp")
  with temporary.open("w") as out:
    out.writelines(json.dumps(row) + "\n" for row in rows)
  temporary.replace(file)


def _null_if_not_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
  return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
