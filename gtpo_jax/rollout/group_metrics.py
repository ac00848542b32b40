"""Metrics of sampled groups, in float64 on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gtpo_jax.rollout.groups import Group, stack


def sampled_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Returns metrics over the policy's own completions of all sampled groups.

  `batch_metrics` computes them, by the same names, over the groups that are trained on.
  """
  rewards = stack([group.rewards for group in groups])
  own = np.stack([group.own for group in groups])
  judged = own & rewards.scored
  correct = rewards.correct
  rows = [group.completions for group in groups]
  lengths = np.asarray([[completion.mask.sum() for completion in row] for row in rows])
  finished = np.asarray([[completion.finished for completion in row] for row in rows])

  def entropy_of(side: np.ndarray) -> float:
    of_side = [rows[i][j] for i, j in np.argwhere(side)]
    drawn = [completion.arrays()["entropy"][completion.mask] for completion in of_side]
    entropy = np.concatenate([np.zeros(0, np.float32), *drawn])
    return _mean(entropy, np.ones(len(entropy), bool))

  return {
    "reward/accuracy": _mean(correct, judged),
    "reward/mean": _mean(rewards.reward + rewards.penalty, judged),
    "groups/all_correct": float((correct | ~judged).all(1).mean(where=judged.any(1))),
    "groups/all_wrong": float((~correct | ~judged).all(1).mean(where=judged.any(1))),
    "entropy/mean": entropy_of(own),
    "entropy/correct": entropy_of(judged & correct),
    "entropy/incorrect": entropy_of(judged & ~correct),
    "length/mean": _mean(lengths, own),
    "length/min": float(lengths[own].min()),
    "length/max": float(lengths[own].max()),
    "length/cut_off": _mean(~finished, own),
  }


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Returns accuracy, mean reward and share of the groups of each source, if a run has several."""
  metrics = {}
  for source in sorted({group.problem.source for group in groups} - {""}):
    own = [group for group in groups if group.problem.source == source]
    rewards = stack([group.rewards for group in own])
    judged = rewards.scored & np.stack([group.own for group in own])
    metrics[f"source/{source}/accuracy"] = _mean(rewards.correct, judged)
    metrics[f"source/{source}/reward"] = _mean(rewards.reward + rewards.penalty, judged)
    metrics[f"source/{source}/groups"] = len(own) / len(groups)
  return metrics


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Returns how many updates ago the policy's tokens of a batch were drawn.

  Args:
    groups: the groups to train on.
    version: the number of updates so far.
  """
  own = [x for group in groups for x in group.completions if not x.guided]
  age = version - np.concatenate([x.versions[x.mask] for x in own])
  return {
    "staleness/mean": float(age.mean()) if age.size else 0.0,
    "staleness/max": float(age.max(initial=0)),
    "staleness/tokens": float((age > 0).mean()) if age.size else 0.0,
  }


def _mean(x: np.ndarray, mask: np.ndarray) -> float:
  """Returns the mean of x where `mask` is True, in float64; NaN if it is False everywhere."""
  return float(x[mask].mean(dtype=np.float64)) if mask.any() else float("nan")
