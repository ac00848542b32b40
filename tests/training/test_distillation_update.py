"""The update with a teacher's log-probs: the same on any mesh, packed or not, in any parts."""

import functools

import jax
import numpy as np
import pytest
from update_cases import (
  SGD_WITHOUT_DECAY,
  assert_same,
  batch,
  largest_difference,
  params_on,
  run,
  single_device_model,
)

from gtpo_jax.algorithms import Distillation

TAUGHT = {"distillation": Distillation(0.5, "entropy")}


@functools.cache
def taught_batch():
  """`batch`, cut to at most 4 of 9 tokens, with the log-probs of a teacher near the policy."""
  rollouts, rewards = batch()
  mask = rollouts.mask & (np.arange(9) < 4)
  rollouts = rollouts.replace(mask=mask, present=mask)
  noise = np.random.default_rng(5).normal(0, 0.5, rollouts.tokens.shape)
  teacher = np.where(rollouts.mask, rollouts.log_probs + noise, 0).astype(np.float32)
  return rollouts.replace(teacher=teacher, gaps=False), rewards


@functools.cache
def taught():
  return run("opd", data=taught_batch(), **TAUGHT)


@pytest.mark.slow
def test_micro_batches_equal_the_full_batch():
  assert taught()[1]["grad_norm"] > 1e-3
  assert_same(taught(), run("opd", data=taught_batch(), micro_batches=4, head_chunk=7, **TAUGHT))


def test_metrics_by_hand():
  rollouts, rewards = taught_batch()
  metrics = taught()[1]
  gap = rollouts.log_probs.astype(np.float64) - rollouts.teacher
  right = rewards.correct[..., None] & rollouts.mask
  wrong = ~rewards.correct[..., None] & rollouts.mask
  assert metrics["distill/divergence"] == pytest.approx(gap[rollouts.mask].mean(), abs=1e-5)
  assert metrics["distill/correct"] == pytest.approx(gap[right].mean(), abs=1e-5)
  assert metrics["distill/incorrect"] == pytest.approx(gap[wrong].mean(), abs=1e-5)
  accepted = np.minimum(1, np.exp(-gap[rollouts.mask])).mean()
  assert metrics["distill/agreement"] == pytest.approx(accepted, abs=1e-5)


def test_nothing_is_learned_from_a_teacher_that_agrees():
  rollouts, rewards = taught_batch()
  agreeing = rollouts.replace(teacher=rollouts.log_probs)
  state, metrics = run("opd", data=(agreeing, rewards), optimizer=SGD_WITHOUT_DECAY)
  start = jax.device_get(params_on(single_device_model()))
  assert metrics["update/empty"] == 1 and metrics["distill/agreement"] == 1
  assert largest_difference(state.params, start) == 0


@pytest.mark.slow
def test_a_teacher_adds_to_the_advantages_of_another_algorithm():
  alone, _ = run("gtpo", data=batch())
  both, metrics = run("gtpo", data=taught_batch(), **TAUGHT)
  assert "distill/divergence" in metrics
  assert largest_difference(alone.params, both.params) > 1e-4
