"""Corrections in the update: importance weights of completions, masks, and drawn log-probs."""

import numpy as np
import pytest
from update_cases import G, N, batch, run


def rescored_batch(shift=0.1):
  """A batch whose completions of index 0 have become `exp(shift)` times as likely per token."""
  rollouts, rewards = batch()
  moved = np.zeros_like(rollouts.log_probs)
  moved[:, 0] = shift
  rescored = np.where(rollouts.mask, rollouts.log_probs + moved, 0).astype(np.float32)
  return rollouts.replace(rescored=rescored), rewards


def test_weights_of_completions_and_their_diagnostics():
  rollouts, rewards = rescored_batch()
  lengths = rollouts.mask.sum(-1)
  _, metrics = run("gtpo", data=(rollouts, rewards), tis_cap=1.2, tis_level="sequence")
  weights = np.ones((N, G))
  weights[:, 0] = np.minimum(np.exp(0.1 * lengths[:, 0]), 1.2)
  expected = weights.sum() ** 2 / (weights.size * np.square(weights).sum())
  assert metrics["correction/ess"] == pytest.approx(expected, rel=1e-5)
  assert metrics["correction/capped"] == pytest.approx((lengths[:, 0] > 1).sum() / weights.size)
  assert metrics["mismatch/weight"] > 1


@pytest.mark.slow
def test_completions_out_of_bounds_leave_the_loss_but_not_the_statistics():
  rollouts, rewards = rescored_batch()
  _, all_in = run("gtpo", data=(rollouts, rewards), mask_high=2.0)
  _, masked = run("gtpo", data=(rollouts, rewards), mask_high=1.05)
  assert all_in["correction/masked"] == 0
  assert masked["correction/masked"] == pytest.approx(1 / G)
  contrast = rewards.correct.any(1) & ~rewards.correct.all(1)
  tokens = rollouts.mask[contrast].sum((0, 2))
  assert all_in["tokens/trained"] == tokens.sum()
  assert masked["tokens/trained"] == tokens[1:].sum()
  assert masked["reward/accuracy"] == all_in["reward/accuracy"]
  # Without importance weights, the ratio stays relative to the recorded log-probs.
  _, plain = run("gtpo", data=(rollouts.replace(rescored=None), rewards))
  assert all_in["ratio/mean"] == plain["ratio/mean"] and all_in["loss"] == plain["loss"]


@pytest.mark.slow
def test_drawn_log_probs_are_the_behaviours():
  """If a filter doubled each token's probability, each weight is one half."""
  rollouts, rewards = rescored_batch(0.0)
  drawn = np.where(rollouts.mask, rollouts.log_probs + np.log(2), 0).astype(np.float32)
  data = (rollouts.replace(drawn_log_probs=drawn), rewards)
  _, metrics = run("gtpo", data=data, tis_cap=2.0, behaviour="drawn")
  assert metrics["mismatch/weight"] == pytest.approx(0.5, rel=1e-5)
  assert metrics["correction/ess"] == pytest.approx(1)
