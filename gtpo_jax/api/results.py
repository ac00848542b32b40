"""What a run returns to a Python program: each step, and the result."""

from __future__ import annotations

import dataclasses
from typing import Any

from gtpo_jax.api.policy import TrainedPolicy
from gtpo_jax.rollout.experience import Experience


@dataclasses.dataclass(frozen=True)
class Step:
  """The result of one step.

  Attributes:
    step: completed steps, this one included.
    metrics: its line of metrics.jsonl, by name, with its evaluation if there was one; NaN for a
      missing number.
    batch: what it trained on: its `problems` (n), `texts` (n lists of g), `correct` bool[n, g], and
      as arrays `rollouts` and `rewards`.
    policy: the policy after the step. Valid until the next step is requested, which reuses its
      memory.
  """

  step: int
  metrics: dict[str, float]
  batch: Experience = dataclasses.field(repr=False)
  policy: TrainedPolicy


@dataclasses.dataclass(frozen=True)
class Result:
  """The end of a run.

  Attributes:
    step: completed steps.
    finished: False if the run was asked to stop.
    summary: one line for the user.
    history: every line of metrics.jsonl, starting with the base model's (step 0).
    policy: the trained policy; None if the run was stopped before the first step.
    saved_at: when the last state was on disk, as `time.monotonic()`; None if it was not saved.
  """

  step: int
  finished: bool
  summary: str
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)
  policy: TrainedPolicy | None = None
  saved_at: float | None = dataclasses.field(default=None, repr=False)
