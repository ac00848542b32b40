"""The metrics of an update against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import (
  EVERY_LOSS_TERM,
  SGD_WITHOUT_DECAY,
  batch,
  full_batch,
  jitted_score,
  params_on,
  plain,
  run,
  single_device_model,
)

from gtpo_jax.algorithms.loss import surprise_metrics
from gtpo_jax.training.update_metrics import batch_metrics


def test_batch_metrics():
  rollouts, rewards = batch()
  _, metrics = plain("gtpo")
  mask = rollouts.mask
  correct = rewards.correct
  lengths = mask.sum(-1)
  assert metrics["length/mean"] == pytest.approx(lengths.mean())
  assert metrics["length/max"] == lengths.max()
  assert metrics["length/cut_off"] == pytest.approx(1 - rollouts.finished.mean())
  assert metrics["reward/accuracy"] == pytest.approx(correct.mean())
  reward = rewards.reward + rewards.penalty
  assert metrics["reward/mean"] == pytest.approx(reward.mean(), abs=1e-6)
  entropy = rollouts.entropy[mask & correct[..., None]].mean()
  assert metrics["entropy/correct"] == pytest.approx(entropy, abs=1e-5)
  assert metrics["tokens/completion"] == mask.sum()
  assert metrics["tokens/trained"] == mask[2:].sum()
  assert metrics["credit/conservation_residual"] < 1e-5


def test_metrics_of_optional_fields():
  rollouts, rewards = full_batch()
  _, metrics = run("dapo_mixed", data=full_batch(), guide_completions=1, **EVERY_LOSS_TERM)
  mask = rollouts.mask
  own = ~rollouts.guided
  own_correct = rewards.correct[:, :3]
  guide_correct = rewards.correct[:, 3]
  rescued = (~own_correct).all(1) & guide_correct
  assert metrics["guide/accuracy"] == pytest.approx(guide_correct.mean())
  assert metrics["guide/rescued"] == pytest.approx(rescued.mean())
  assert metrics["groups/stale"] == 1 / 8
  assert metrics["completions/not_counted"] == pytest.approx(1 / 32)
  assert metrics["reward/accuracy"] == pytest.approx(own_correct.mean())
  assert metrics["length/mean"] == pytest.approx(mask.sum(-1)[own].mean())
  entropy = rollouts.entropy[mask & own[..., None]].mean()
  assert metrics["entropy/mean"] == pytest.approx(entropy, abs=1e-5)
  fresh = mask & own[..., None] & ~rollouts.stale[..., None]
  gap = np.abs(rollouts.rescored - rollouts.log_probs)[fresh].max()
  assert metrics["mismatch/max_abs_logp"] == pytest.approx(gap, abs=1e-5)
  assert metrics["kl/reference"] > 0
  assert 0 < metrics["mismatch/weight"] <= 1.05


def test_completions_without_a_verdict_are_neither_correct_nor_incorrect():
  rollouts, rewards = batch()
  scored = np.ones_like(rewards.correct)
  scored[0] = False  # a whole group
  scored[2, 1] = False
  rewards = rewards.replace(correct=rewards.correct & scored, scored=scored)
  advantages = jnp.zeros(rollouts.mask.shape)
  metrics = jax.jit(batch_metrics)(rollouts, rewards, advantages, rollouts.mask)
  wrong = scored & ~rewards.correct
  entropy = rollouts.entropy[rollouts.mask & wrong[..., None]].mean()
  assert metrics["reward/accuracy"] == pytest.approx(rewards.correct[scored].mean())
  assert metrics["entropy/incorrect"] == pytest.approx(entropy, abs=1e-5)
  assert metrics["groups/all_wrong"] == pytest.approx(1 / 7)
  assert metrics["groups/all_correct"] == 0
  nothing = rewards.replace(scored=np.zeros_like(scored))
  metrics = jax.jit(batch_metrics)(rollouts, nothing, advantages, rollouts.mask)
  assert np.isnan(metrics["reward/accuracy"]) and np.isnan(metrics["groups/all_wrong"])


def test_entropy_by_surprise():
  """Eight tokens with surprises 1 to 8; the fourth quarter has those of 7 and 8."""
  log_probs = -jnp.arange(1.0, 10.0).reshape(1, 3, 3)
  mask = log_probs > -8.5
  entropy = jnp.arange(10.0, 19.0).reshape(1, 3, 3)
  metrics = surprise_metrics(entropy, log_probs, mask)
  means = [float(metrics[f"entropy/surprise_q{i}"]) for i in (1, 2, 3, 4)]
  assert means == [10.5, 12.5, 14.5, 16.5]
  one = surprise_metrics(entropy, log_probs, log_probs == -1)
  assert float(one["entropy/surprise_q1"]) == 10 and np.isnan(one["entropy/surprise_q4"])


@pytest.mark.slow
def test_the_mismatch_is_measured_before_the_first_gradient_update():
  """Only the even rows, the first minibatch, are compared, whatever updates follow."""
  _, metrics = run("gtpo", minibatches=2, epochs=3, optimizer=SGD_WITHOUT_DECAY)
  rollouts, _ = batch()
  model = single_device_model()
  learner, _ = jitted_score(model, params_on(model), rollouts.prompts, rollouts.tokens, 1.0, 64)
  gap = np.where(rollouts.mask, learner - rollouts.log_probs, 0)[::2]
  assert metrics["mismatch/max_abs_logp"] == pytest.approx(np.abs(gap).max(), abs=1e-5)
