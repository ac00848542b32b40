"""Writes the log files of a workdir (metrics, evaluations and samples .jsonl) and its trackers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.environments.turns import Episode, save_episode
from gtpo_jax.logs.log_files import LogFile, is_evaluation, is_metrics, is_sample
from gtpo_jax.logs.trackers import TensorBoard, Tracker
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process

EVALUATION = "eval/"  # prefix of the names of an evaluation's metrics


class Journal:
  """Appends to the log files and passes metrics and samples to the trackers.

  On resume it makes the files agree with the checkpoint: it removes the lines after the restored
  step and damaged lines, so that each step appears once, in order, and says what is missing. Only
  the first process writes. All processes must call the methods that return something together.

  Attributes:
    evaluations: the evaluations in the files.
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
    self._metrics = LogFile(workdir / "metrics.jsonl", is_metrics)
    self._samples = LogFile(workdir / "samples.jsonl", is_sample, samples)
    self._trackers: list[Tracker] = []
    file = LogFile(workdir / "evaluations.jsonl", is_evaluation)
    self.evaluations = EvaluationLog(self._metrics, file, resumed_step)
    if not is_first_process():
      return
    trained = range(1, resumed_step + 1)
    lines = self._metrics.repair(resumed_step).messages(trained) + self.evaluations.repair()
    sampled = self._samples.repair(resumed_step)
    for line in lines + sampled.messages(trained if samples else ()):
      say(line)
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
      _amend(self._metrics, step, metrics)
      self._track(step, metrics)

  def write_evaluation(
    self, step: int, summary: Mapping[str, Any], metrics: Mapping[str, float]
  ) -> None:
    """Logs an evaluation of a step that has been logged.

    The summary, an `Evaluation.summary`, has every metric at each k and the intervals; `metrics`
    are added to the step in metrics.jsonl and in the trackers.
    """
    if is_first_process():
      self.evaluations.append(step, summary)
      self.amend(step, metrics)

  def write_sample(
    self,
    step: int,
    prompt: str,
    completion: str,
    correct: bool | None,
    episode: Episode | None = None,
    answer: str = "",
  ) -> None:
    """Appends one completion to samples.jsonl, with the last message of its prompt.

    With an environment, the text has its answers too, and the problem's answer is written with the
    episode: the environment may need it to play again.
    """
    if is_first_process():
      row = {"step": step, "prompt": prompt, "completion": completion, "correct": correct}
      if episode:
        saved = save_episode(episode)
        row |= {name: saved[name] for name in ("turns", "stop", "rewards", "info", "reason")}
        row["answer"] = answer
      self._samples.append(row)
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

  def close(self) -> None:
    """Closes the trackers, which flush their buffers."""
    for tracker in self._trackers:
      tracker.close()

  def _track(self, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in self._trackers:
      tracker.log_metrics(step, metrics)


class EvaluationLog:
  """The evaluations in metrics.jsonl and evaluations.jsonl, each of which a file may have lost.

  All processes must call the methods that return something together, except `repair`.

  Args:
    metrics: metrics.jsonl, whose rows have the most important metrics of an evaluation.
    summaries: evaluations.jsonl.
    resumed_step: the step that the run resumes from.
  """

  def __init__(self, metrics: LogFile, summaries: LogFile, resumed_step: int):
    self._metrics = metrics
    self._summaries = summaries
    self._resumed_step = resumed_step
    self._removed: list[int] = []

  def repair(self) -> list[str]:
    """Repairs evaluations.jsonl, on the first process. Returns lines for the user."""
    found = self._summaries.repair(self._resumed_step)
    self._removed = found.removed
    return found.messages(())

  def removed(self) -> list[int]:
    """Returns the steps after the restored one whose evaluations were removed on resume.

    The run reaches these steps again.
    """
    return broadcast_from_first(lambda: self._removed)

  def has(self, step: int) -> bool:
    """Whether the files have the evaluation of a step.

    A step whose metrics are lost has it only in evaluations.jsonl.
    """
    complete = lambda: step in _evaluated(self._metrics) or step not in _steps(self._metrics)
    return broadcast_from_first(lambda: step in _steps(self._summaries) and complete())

  def lost(self, is_due: Callable[[int], bool]) -> list[int]:
    """Returns the steps before the restored one whose evaluation a damaged file has lost."""

    def find() -> list[int]:
      logged = _steps(self._metrics)
      summarized = _steps(self._summaries)
      never_logged = set(range(self._resumed_step)) - logged - summarized
      has_other = (_evaluated(self._metrics) ^ summarized) & (logged | {0})
      return sorted((has_other | set(filter(is_due, never_logged))) - {self._resumed_step})

    return broadcast_from_first(find)

  def known(self, step: int) -> dict[str, Any]:
    """Returns the metrics, by name, that the files still have of a step's evaluation."""
    return broadcast_from_first(
      lambda: {
        name: value
        for file in (self._metrics, self._summaries)
        for row in file.rows()
        if row["step"] == step
        for name, value in row.items()
        if name.startswith(EVALUATION)
      }
    )

  def settings(self) -> dict[int, dict[str, Any] | None]:
    """Returns the settings of every evaluation by step; None if they are not known."""
    return broadcast_from_first(
      lambda: (
        dict.fromkeys(_evaluated(self._metrics))
        | {row["step"]: row.get("settings") for row in self._summaries.rows()}
      )
    )

  def append(self, step: int, summary: Mapping[str, Any]) -> None:
    """Adds the summary of a step to evaluations.jsonl, on the first process, if it has none."""
    if step not in _steps(self._summaries):
      self._summaries.append({"step": step, **summary})

  def restore(self, step: int, summary: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Adds the evaluation of an earlier step to the files that have lost it.

    The trackers already have it.
    """
    if not is_first_process():
      return
    if step not in _steps(self._summaries):
      self._summaries.insert({"step": step, **summary})
    if step == 0 and 0 not in _steps(self._metrics):  # its row has nothing else
      self._metrics.insert({"step": 0})
    _amend(self._metrics, step, metrics)


def _steps(file: LogFile) -> set[int]:
  """Returns the steps in a file."""
  return {row["step"] for row in file.rows()}


def _evaluated(metrics: LogFile) -> set[int]:
  """Returns the steps in metrics.jsonl that have an evaluation."""
  has_evaluation = lambda row: any(name.startswith(EVALUATION) for name in row)
  return {row["step"] for row in metrics.rows() if has_evaluation(row)}


def _amend(file: LogFile, step: int, metrics: Mapping[str, float]) -> None:
  """Adds metrics to the row of a step."""
  added = _null_if_not_finite(metrics)
  rows = file.rows()
  file.rewrite(row | added if row["step"] == step else row for row in rows)


def _null_if_not_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
  is_finite = lambda value: value is not None and math.isfinite(value)
  return {name: value if is_finite(value) else None for name, value in metrics.items()}
