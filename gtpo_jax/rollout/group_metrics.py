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
  rollouts = stack([group.rollouts for group in groups])
  own = np.ones(rewards.correct.shape, bool) if rollouts.guided is None else ~rollouts.guided
  judged = own & rewards.scored
  correct = rewards.correct
  lengths = rollouts.mask.sum(-1)
  own_tokens = rollouts.mask & own[..., None]
  entropy_of = lambda side: _mean(rollouts.entropy, own_tokens & side[..., None])
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
    "length/cut_off": _mean(~rollouts.finished, own),
  }


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Returns accuracy, mean reward and share of the groups of each source, if a run has several."""
  metrics = {}
  for source in sorted({group.problem.source for group in groups} - {""}):
    own = [group for group in groups if group.problem.source == source]
    rewards = stack([group.rewards for group in own])
    judged = rewards.scored
    if own[0].rollouts.guided is not None:
      judged = judged & ~np.stack([group.rollouts.guided for group in own])
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
  ages = []
  for group in groups:
    rollouts = group.rollouts
    own = rollouts.mask
    if rollouts.guided is not None:
      own = own & ~rollouts.guided[:, None]
    ages.append(version - rollouts.versions[own])
  age = np.concatenate(ages)
  return {
    "staleness/mean": float(age.mean()) if age.size else 0.0,
    "staleness/max": float(age.max(initial=0)),
    "staleness/tokens": float((age > 0).mean()) if age.size else 0.0,
  }


def _mean(x: np.ndarray, mask: np.ndarray) -> float:
  """Returns the mean of x where `mask` is True, in float64; NaN if it is False everywhere."""
  return float(x[mask].mean(dtype=np.float64)) if mask.any() else float("nan")
