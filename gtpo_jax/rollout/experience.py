"""The batch of a step, with everything that the update, the metrics and the logs need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.data.records import Problem
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.spans import Span


@dataclasses.dataclass(frozen=True)
class Experience:
  """A step's batch.

  Attributes:
    rollouts: [n, g, ...], on the mesh.
    rewards: [n, g], on the mesh.
    problems: n problems.
    texts: [n][g], decoded completions.
    correct: bool[n, g], on the host.
    scored: bool[n, g], on the host; False if there is no verdict.
    truth: u8[n, g, t], on the host: the tokens' truth codes (`rollout.token_truth`); None if no
      problem of the batch knows them.
    metrics: statistics of all sampled completions, dropped ones included, and the time spent.
    spans: when the step's prompts were prefilled, its tokens decoded and its rewards awaited, in
      seconds since the beginning of the step.
  """

  rollouts: Rollouts
  rewards: Rewards
  problems: list[Problem]
  texts: list[list[str]]
  correct: np.ndarray
  scored: np.ndarray
  truth: np.ndarray | None
  metrics: dict[str, float]
  spans: list[Span]

  def first_completion(self, i: int) -> tuple[str, str, bool | None]:
    """Returns problem i, its first completion, and whether it is correct (None: no verdict)."""
    prompt = self.problems[i].messages[-1]["content"]
    verdict = bool(self.correct[i, 0]) if self.scored[i, 0] else None
    return prompt, self.texts[i][0], verdict

  def add_metrics(self, update: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the update together with `metrics`.

    With dynamic sampling, some names occur in both. Metrics of all sampled groups keep the name;
    those of the groups that the update trained on become `kept/NAME`.
    """
    renamed = {f"kept/{name}" if name in self.metrics else name: update[name] for name in update}
    return {**renamed, **self.metrics}

  def to_arrays(self) -> dict[str, np.ndarray]:
    """Returns the problems' ids and everything the update reads, as host arrays by dotted name.

    Every process must call it.
    """
    batch = fetch({"rollouts": self.rollouts, "rewards": self.rewards})
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {"problems": np.asarray([problem.id for problem in self.problems]), **arrays}
