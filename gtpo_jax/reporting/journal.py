"""What a run leaves behind in its workdir: metrics.jsonl, evaluations.jsonl, samples.jsonl; and what it shows on boards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.reporting.boards import Board, TensorBoard
from gtpo_jax.reporting.credit import cut_credit_back
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process


class Journal:
  """Appends one line a step; on resume, lines after the restored step are cut, so that no step stands twice.

  The first process writes; all of them may read, together.
  """

  def __init__(
    self,
    workdir: Path,
    resumed_step: int,
    tensorboard: bool,
    more: Callable[[], Sequence[Board]] = tuple,
  ):
    """Opens the files of `workdir`; `more` makes further boards than TensorBoard, on the first process."""
    self.metrics_file = workdir / "metrics.jsonl"
    self._samples_file = workdir / "samples.jsonl"
    self._evaluations_file = workdir / "evaluations.jsonl"
    self._boards: list[Board] = []
    if not is_first_process():
      return
    for file in (self.metrics_file, self._evaluations_file, self._samples_file):
      _cut_back(file, resumed_step)
    cut_credit_back(workdir, resumed_step)
    self._boards = [*([TensorBoard(workdir, resumed_step)] if tensorboard else []), *more()]

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """One object for the step: plain numbers, null for one that is not finite."""
    if is_first_process():
      _append(self.metrics_file, {"step": step, **_finite(metrics)})
      self._show(step, metrics)

  def amend(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds numbers to the object of a step that is already written."""
    if is_first_process():
      _rewrite(
        self.metrics_file,
        (
          row | _finite(metrics) if row["step"] == step else row for row in _each(self.metrics_file)
        ),
      )
      self._show(step, metrics)

  def _show(self, step: int, metrics: Mapping[str, float]) -> None:
    for board in self._boards:
      board.scalars(step, metrics)

  def write_evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
    """What `Evaluation.summary` gives: every metric at each k, with its interval."""
    if is_first_process():
      _append(self._evaluations_file, {"step": step, **summary})

  def write_sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """One completion, to see what the policy writes."""
    if is_first_process():
      _append(
        self._samples_file,
        {"step": step, "prompt": prompt, "completion": completion, "correct": correct},
      )
    for board in self._boards:
      board.sample(step, prompt, completion, correct)

  def read(self, only: str = "") -> list[dict[str, Any]]:
    """Every line of metrics.jsonl: of its numbers those whose names begin with `only`, and the step."""
    return broadcast_from_first(
      lambda: [
        {name: value for name, value in row.items() if name == "step" or name.startswith(only)}
        for row in _each(self.metrics_file)
      ]
    )

  def close(self) -> None:
    """Writes out what the boards hold back."""
    for board in self._boards:
      board.close()


def read_jsonl(file: Path) -> list[dict[str, Any]]:
  """The objects of a JSON-lines file; a line that a kill left half written is passed over."""
  return list(_each(file))


def _each(file: Path) -> Iterator[dict[str, Any]]:
  """The same one by one, so that a long run's file is never in memory as a whole."""
  if not file.exists():
    return
  with file.open() as lines:
    for line in lines:
      try:
        yield json.loads(line)
      except json.JSONDecodeError:
        continue


def _append(file: Path, row: Mapping[str, Any]) -> None:
  if "://" in str(file):  # the objects of a store are written whole
    file.write_text((file.read_text() if file.exists() else "") + json.dumps(row) + "\n")
    return
  with file.open("a") as out:
    out.write(json.dumps(row) + "\n")


def _cut_back(file: Path, step: int) -> None:
  if file.exists():
    _rewrite(file, (row for row in _each(file) if row["step"] <= step))


def _rewrite(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
  fresh = file.with_suffix(".tmp")
  with fresh.open("w") as out:
    out.writelines(json.dumps(row) + "\n" for row in rows)
  fresh.replace(file)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
  return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
