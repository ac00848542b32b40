"""Where a run's numbers and texts are shown besides its JSONL files: TensorBoard, Weights & Biases. The first process alone has them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gtpo_jax.config import Config, to_dict
from gtpo_jax.runtime.errors import UserError


class Board(Protocol):
  """What shows a run."""

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Numbers of a step; those that are not finite are left out."""

  def sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """A completion."""

  def close(self) -> None:
    """Writes out what is waiting."""


class TensorBoard:
  """Event files in WORKDIR/tensorboard; after a resume, steps behind the restored one are purged."""

  def __init__(self, workdir: Path, resumed_step: int):
    from tensorboardX import SummaryWriter

    self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=resumed_step + 1)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """See `Board`."""
    for name, value in finite(values).items():
      self._writer.add_scalar(name, value, step)

  def sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """See `Board`. TensorBoard reads Markdown, in which indented text stands as it is."""
    text = "\n".join("    " + line for line in f"{prompt}\n\n{completion}".splitlines())
    self._writer.add_text("sample", f"**{'right' if correct else 'wrong'}**\n\n{text}", step)

  def close(self) -> None:
    """See `Board`."""
    self._writer.close()


class WeightsAndBiases:
  """A run of W&B, taken up again with the workdir; its axis is the metric `step`, so that a repeated step stands where it belongs.

  The samples of a step are shown as a table where it was evaluated. WANDB_MODE, WANDB_API_KEY and the like are W&B's own.
  """

  def __init__(self, workdir: Path, config: Config):
    import wandb

    known = workdir / "wandb_id"
    self._table = lambda rows: wandb.Table(
      columns=["step", "prompt", "completion", "right"], data=rows
    )
    self._samples: list[tuple[int, str, str, bool]] = []
    self._run = wandb.init(
      project=config.log.wandb,
      dir=str(workdir),
      name=workdir.name,
      config=to_dict(config),
      resume="allow",
      id=known.read_text() if known.exists() else None,
      settings=wandb.Settings(console="off", quiet=True),
    )
    known.write_text(self._run.id)
    self._run.define_metric("*", step_metric="step")

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """See `Board`."""
    shown: dict[str, Any] = finite(values)
    if any(name.startswith("eval/") for name in values) and self._samples:
      shown["samples"] = self._table(self._samples)
    self._run.log({"step": step, **shown})

  def sample(self, step: int, prompt: str, completion: str, correct: bool) -> None:
    """See `Board`."""
    self._samples = [row for row in self._samples if row[0] == step] + [
      (step, prompt, completion, correct)
    ]

  def close(self) -> None:
    """See `Board`."""
    self._run.finish()


def check_boards(config: Config) -> None:
  """Raises UserError where a board is asked for that cannot be had."""
  if config.log.wandb and importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"log.wandb = {config.log.wandb!r} needs the wandb library: pip install 'gtpo_jax[wandb]', or leave log.wandb empty"
    )


def finite(values: Mapping[str, float]) -> dict[str, float]:
  """Those values that are finite numbers."""
  return {name: value for name, value in values.items() if math.isfinite(value)}
