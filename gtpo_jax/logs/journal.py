"""Writes the log files of a workdir (metrics, evaluations and samples .jsonl) and its trackers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.logs.log_files import LogFile, is_evaluation, is_metrics, is_sample
from gtpo_jax.logs.trackers import TensorBoard, Tracker
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process

EVALUATION = "eval/"  # prefix of the names of an evaluation's metrics


class Journal:
  """Appends to the log files and passes metrics and samples to the trackers.

  On resume it makes the files agree with the checkpoint: it removes the lines after the restored
  step and damaged lines, so that each step appears once, in order, and says what is missing. Only
  the first process writes. All processes must call the methods that return something together.
  """

  def __init__(
    self,
    workdir: Path,
    resumed_step: int,
    tensorboard: bool,
    make_trackers: Callable[[], Sequence[Tracker]] = tuple,
    samples: int = 0,
    say: Callable[[str], None] = lambda line: None,
  ):
    """Opens the files of `workdir`.

    Args:
      workdir: the run's folder, or another folder of a file system.
      resumed_step: later steps are removed from the files.
      tensorboard: whether to write TensorBoard files.
      make_trackers: creates further trackers; called on the first process only.
      samples: completions that are written at each step.
      say: shows a message to the user.
    """
    self._resumed_step = resumed_step
    self._metrics = LogFile(workdir / "metrics.jsonl", is_metrics)
    self._evaluations = LogFile(workdir / "evaluations.jsonl", is_evaluation)
    self._samples = LogFile(workdir / "samples.jsonl", is_sample, samples)
    self._trackers: list[Tracker] = []
    self._removed_evaluations: list[int] = []
    if not is_first_process():
      return
    trained = range(1, resumed_step + 1)
    metrics, evaluations, sampled = (
      file.repair(resumed_step) for file in (self._metrics, self._evaluations, self._samples)
    )
    lines = metrics.messages(trained) + evaluations.messages(())
    for line in lines + sampled.messages(trained if samples else ()):
      say(line)
    self._removed_evaluations = evaluations.removed
    if tensorboard:
      self._trackers.append(TensorBoard(workdir, resumed_step))
    self._trackers += make_trackers()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends the metrics of a step as one JSON object. Values that are not finite become null."""
    if is_first_process():
      self._metrics.append({"step": step, **_null_if_not_finite(metrics)})
      self._track(step, metrics)

  def amend(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds metrics to the row of an earlier step. If a damaged file has lost it, does nothing."""
    if is_first_process():
      self._amend(step, _null_if_not_finite(metrics))
      self._track(step, metrics)

  def _amend(self, step: int, metrics: Mapping[str, float | None]) -> None:
    rows = self._metrics.rows()
    self._metrics.rewrite(row | metrics if row["step"] == step else row for row in rows)

  def _track(self, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in self._trackers:
      tracker.log_metrics(step, metrics)

  def write_evaluation(
    self, step: int, summary: Mapping[str, Any], metrics: Mapping[str, float]
  ) -> None:
    """Logs an evaluation of a step that has been logged.

    Args:
      step: the step.
      summary: an `Evaluation.summary`, which has every metric at each k and the intervals.
      metrics: the metrics that are added to the step in metrics.jsonl and in the trackers.
    """
    if is_first_process():
      if step not in self._summarized():
        self._evaluations.append({"step": step, **summary})
      self.amend(step, metrics)

  def write_sample(self, step: int, prompt: str, completion: str, correct: bool | None) -> None:
    """Appends one completion to samples.jsonl; `correct` is None if there is no verdict."""
    if is_first_process():
      self._samples.append(
        {"step": step, "prompt": prompt, "completion": completion, "correct": correct}
      )
    for tracker in self._trackers:
      tracker.log_sample(step, prompt, completion, correct)

  def read(self, prefix: str = "") -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl: the step, and the metrics whose names have `prefix`."""
    return broadcast_from_first(
      lambda: [
        {name: value for name, value in row.items() if name == "step" or name.startswith(prefix)}
        for row in self._metrics.rows()
      ]
    )

  def removed_evaluations(self) -> list[int]:
    """Returns the steps after the restored one whose evaluations were removed on resume.

    The run reaches these steps again.
    """
    return broadcast_from_first(lambda: self._removed_evaluations)

  def has_evaluation(self, step: int) -> bool:
    """Whether the files have the evaluation of a step.

    A step whose metrics are lost has it only in evaluations.jsonl.
    """
    complete = lambda: step in self._evaluated() or step not in self._logged()
    return broadcast_from_first(lambda: step in self._summarized() and complete())

  def lost_evaluations(self, is_due: Callable[[int], bool]) -> list[int]:
    """Returns the steps before the restored one whose evaluation a damaged file has lost.

    Args:
      is_due: whether the run evaluates a step.
    """
    return broadcast_from_first(lambda: self._lost_evaluations(is_due))

  def _lost_evaluations(self, is_due: Callable[[int], bool]) -> list[int]:
    evaluated = self._evaluated()
    summarized = self._summarized()
    never_logged = set(range(self._resumed_step)) - self._logged() - summarized
    has_other = (evaluated ^ summarized) & (self._logged() | {0})
    return sorted((has_other | set(filter(is_due, never_logged))) - {self._resumed_step})

  def restore_evaluation(
    self, step: int, summary: Mapping[str, Any], metrics: Mapping[str, float]
  ) -> None:
    """Adds the evaluation of an earlier step to the files that have lost it.

    The trackers already have it.
    """
    if not is_first_process():
      return
    if step not in self._summarized():
      self._evaluations.insert({"step": step, **summary})
    if step == 0 and 0 not in self._logged():  # its row has nothing else
      self._metrics.insert({"step": 0})
    self._amend(step, _null_if_not_finite(metrics))

  def evaluation(self, step: int) -> dict[str, Any]:
    """Returns what the files still have of the evaluation of a step: metrics by name."""
    return broadcast_from_first(
      lambda: {
        name: value
        for file in (self._metrics, self._evaluations)
        for row in file.rows()
        if row["step"] == step
        for name, value in row.items()
        if name.startswith(EVALUATION)
      }
    )

  def _evaluated(self) -> set[int]:
    """Returns the steps in metrics.jsonl that have an evaluation."""
    has_evaluation = lambda row: any(name.startswith(EVALUATION) for name in row)
    return {row["step"] for row in self._metrics.rows() if has_evaluation(row)}

  def _logged(self) -> set[int]:
    """Returns the steps in metrics.jsonl."""
    return {row["step"] for row in self._metrics.rows()}

  def _summarized(self) -> set[int]:
    """Returns the steps in evaluations.jsonl."""
    return {row["step"] for row in self._evaluations.rows()}

  def close(self) -> None:
    """Closes the trackers, which flushes what they buffer."""
    for tracker in self._trackers:
      tracker.close()


def _null_if_not_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
  is_finite = lambda value: value is not None and math.isfinite(value)
  return {name: value if is_finite(value) else None for name, value in metrics.items()}
