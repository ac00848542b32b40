"""What a run returns to a Python program: each step, and the result."""

from __future__ import annotations

import dataclasses
from typing import Any

from gtpo_jax.loop.policy import TrainedPolicy
from gtpo_jax.rollout.batch import Batch


@dataclasses.dataclass(frozen=True)
class Step:
  """The result of one step.

  Attributes:
    step: number of completed steps, including this one.
    metrics: the step's metrics by name, as in metrics.jsonl, including its evaluation's if
      there was one; NaN for a missing value.
    batch: the batch that the step trained on, with `problems` (n), `texts` (n lists of g strings),
      `correct` bool[n, g], and the arrays in `rollouts` and `rewards`.
    policy: the policy after the step. Valid until the next step is requested, which reuses its
      memory.
  """

  step: int
  metrics: dict[str, float]
  batch: Batch = dataclasses.field(repr=False)
  policy: TrainedPolicy


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a run.

  Attributes:
    step: number of completed steps.
    finished: whether all `config.steps` steps are complete.
    summary: one line for the user.
    history: the rows of metrics.jsonl, the first for the base model (step 0); empty if the run was
      stopped during the warm start.
    policy: the trained policy; None if the run was stopped during the warm start.
    saved_at: when the last state was on disk, as `time.monotonic()`; None if it was not saved.
  """

  step: int
  finished: bool
  summary: str
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)
  policy: TrainedPolicy | None = None
  saved_at: float | None = dataclasses.field(default=None, repr=False)
