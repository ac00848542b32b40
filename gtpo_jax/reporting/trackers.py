"""Experiment trackers besides the run's own JSONL files: TensorBoard and Weights & Biases.

Only the first process creates them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gtpo_jax.config import Config, resolved_dict
from gtpo_jax.runtime.errors import UserError


class Tracker(Protocol):
  """Receives the metrics and samples of a run."""

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs the metrics of a step, except those that are not finite."""

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """Logs one completion."""

  def close(self) -> None:
    """Flushes what is still buffered."""


class TensorBoard:
  """Writes WORKDIR/tensorboard. A resumed run purges the steps after the restored one."""

  def __init__(self, workdir: Path, resumed_step: int):
    from tensorboardX import SummaryWriter

    self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=resumed_step + 1)

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See `Tracker`."""
    for name, value in finite(metrics).items():
      self._writer.add_scalar(name, value, step)

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """See `Tracker`. TensorBoard renders Markdown, so the text is indented to keep it verbatim."""
    text = "\n".join("    " + line for line in f"{prompt}\n\n{completion}".splitlines())
    self._writer.add_text("sample", f"**{'right' if correct else 'wrong'}**\n\n{text}", step)

  def close(self) -> None:
    """See `Tracker`."""
    self._writer.close()


class WeightsAndBiases:
  """Logs to a W&B run, which resumes when the workdir's run resumes.

  The metric `step` is the x axis, so a step that is repeated after a resume keeps its position.
  The samples of an evaluated step are logged as a table. The environment variables of W&B
  (WANDB_MODE, WANDB_API_KEY, ...) apply.
  """

  def __init__(self, workdir: Path, config: Config):
    import wandb

    id_file = workdir / "wandb_id"
    self._table = lambda rows: wandb.Table(
      columns=["step", "prompt", "completion", "right"], data=rows
    )
    self._samples: list[tuple[int, str, str, bool]] = []
    self._run = wandb.init(
      project=config.log.wandb,
      dir=str(workdir),
      name=workdir.name,
      config=resolved_dict(config),
      resume="allow",
      id=id_file.read_text() if id_file.exists() else None,
      settings=wandb.Settings(console="off", quiet=True),
    )
    id_file.write_text(self._run.id)
    self._run.define_metric("*", step_metric="step")

  def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """See `Tracker`."""
    logged: dict[str, Any] = finite(metrics)
    if any(name.startswith("eval/") for name in metrics) and self._samples:
      logged["samples"] = self._table(self._samples)
    self._run.log({"step": step, **logged})

  def log_sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """See `Tracker`. Keeps only the samples of the newest step."""
    same_step = [row for row in self._samples if row[0] == step]
    self._samples = [*same_step, (step, prompt, completion, correct)]

  def close(self) -> None:
    """See `Tracker`."""
    self._run.finish()


def check_trackers(config: Config) -> None:
  """Checks that the library of every requested tracker is installed.

  Raises:
    UserError: `log.wandb` is set and wandb is missing.
  """
  if config.log.wandb and importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"log.wandb = {config.log.wandb!r} needs the wandb library: "
      f"pip install 'gtpo_jax[wandb]', or leave log.wandb empty"
    )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics that are finite numbers."""
  return {name: value for name, value in metrics.items() if math.isfinite(value)}
