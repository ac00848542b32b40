"""The statistics and the gradients of benchmarks/credit.py."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.arrays import Prompts, Rollouts, Signals
from gtpo_jax.models import ModelConfig, Transformer, init_params
from gtpo_jax.runtime.mesh import make_mesh, shard_batch
from gtpo_jax.training.log_probs import score

pytestmark = pytest.mark.slow
N, G, T, VOCAB = 4, 4, 6, 128


@pytest.fixture(scope="module", autouse=True)
def benchmarks_folder():
  folder = str(Path(__file__).parents[1] / "benchmarks")
  sys.path.insert(0, folder)
  yield
  sys.path.remove(folder)


def test_holms_procedure_by_hand():
  from credit_tables import holm

  assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
  assert holm({"a": 0.4, "b": 0.9}) == pytest.approx({"a": 0.8, "b": 0.9})


def test_a_difference_is_paired_over_problems_and_seeds():
  from credit_tables import compare

  run = lambda *correct: {"samples": 4, "correct": list(correct)}
  better = {0: run(3, 1, 2, 4), 1: run(3, 3, 4, 4), 2: run(0, 0, 0, 0)}
  worse = {0: run(2, 0, 1, 3), 1: run(2, 2, 3, 3)}
  difference, low, high, p_value = compare(better, worse)  # seed 2 has no pair
  assert (difference, low, high) == pytest.approx((0.25, 0.25, 0.25))
  assert p_value < 1e-3
  assert compare(worse, worse)[:3] == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def case():
  """Returns a small model, its parameters and a batch with known truth."""
  from credit_arms import ArmBatch

  config = ModelConfig(VOCAB, 32, 1, heads=2, kv_heads=1, head_dim=16, mlp=32)
  model = Transformer(config, make_mesh(devices=jax.devices()[:1]))
  params = init_params(model, jax.random.key(0))
  rng = np.random.default_rng(0)
  mask = np.arange(T) < rng.integers(2, T + 1, (N, G, 1))
  rollouts = Rollouts(
    prompts=Prompts(rng.integers(1, VOCAB, (N, 5), np.int32), np.full(N, 5, np.int32)),
    tokens=np.where(mask, rng.integers(1, VOCAB, (N, G, T), np.int32), 0),
    present=mask,
    mask=mask,
    log_probs=np.zeros((N, G, T), np.float32),
    entropy=np.where(mask, rng.gamma(1.0, 1.0, (N, G, T)), 0).astype(np.float32),
    finished=np.ones((N, G), bool),
  )
  log_probs, _ = score(model, params, rollouts.prompts, rollouts.tokens, 1.0, 0)
  rollouts = shard_batch(rollouts.replace(log_probs=log_probs), model.mesh)
  correct = rng.random((N, G)) < 0.5
  correct[:, :2] = [True, False]
  signals = Signals(
    entropy=np.asarray(rollouts.entropy),
    mask=mask,
    correct=correct,
    reward=correct.astype(np.float32),
    penalty=np.zeros((N, G), np.float32),
  )
  codes = np.where(mask, rng.choice(np.uint8([1, 2, 3, 4, 11, 12]), mask.shape), 0)
  hidden = rng.normal(size=(N, G, T, 3))
  return model, params, ArmBatch(rollouts, signals, codes, 0, lambda: hidden)


@pytest.mark.slow
def test_gradients_of_arms_are_those_of_their_losses(case):
  from credit_arms import ARMS, BASELINE
  from credit_probe import cotangent, make_gradients

  model, params, batch = case
  arms = [ARMS[BASELINE], ARMS["grpo_s, beta2 = 1"]]
  cotangents = np.stack([cotangent(arm, batch, arm.advantages(batch)) for arm in arms])
  gradients = make_gradients(model)(params, batch.rollouts, cotangents)
  arm = arms[1]

  def loss(params):
    rollouts = batch.rollouts
    log_probs, _ = score(model, params, rollouts.prompts, rollouts.tokens, 1.0, 0)
    return arm.algorithm.loss(
      log_probs=log_probs,
      log_probs_old=rollouts.log_probs,
      advantages=arm.advantages(batch),
      mask=arm.loss_mask(batch),
    )[0]

  leaves = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
  expected = jnp.concatenate([leaf.ravel() for leaf in leaves])
  np.testing.assert_allclose(gradients[1], expected, atol=2e-6)
  assert not np.allclose(gradients[0], gradients[1], atol=1e-4)


def test_the_oracle_pays_deciding_tokens_and_one_sided_arms_leave_the_other_side_uniform(case):
  from credit_arms import ARMS, BASELINE

  *_, batch = case
  uniform = np.asarray(ARMS[BASELINE].advantages(batch))
  oracle = np.asarray(ARMS["oracle mask"].advantages(batch))
  decides = batch.codes % 8 >= 3
  np.testing.assert_array_equal(oracle[decides], uniform[decides])
  assert not oracle[~decides].any() and oracle[decides].any()

  correct = batch.signals.correct
  mask = batch.signals.mask
  spread = lambda x, i, j: np.ptp(x[i, j][mask[i, j]])
  advantages = np.asarray(ARMS["ours: 1/H in wrong ones, by completion"].advantages(batch))
  for i, j in np.ndindex(correct.shape):
    assert (spread(advantages, i, j) < 1e-5) == bool(correct[i, j])
  hesitant = np.asarray(ARMS["ours: hesitation, by completion"].advantages(batch))
  entropy = batch.signals.entropy
  for i, j in zip(*np.where(~correct), strict=True):
    tokens = mask[i, j]
    order = np.argsort(entropy[i, j][tokens])
    assert (np.diff(hesitant[i, j][tokens][order]) < 0).all()


def test_shuffled_completions_exchange_the_credit_of_grpo_s_within_a_verdict(case):
  from credit_arms import ARMS

  *_, batch = case
  correct = batch.signals.correct
  own, shuffled = (
    np.asarray(ARMS[name].advantages(batch)).max(2, where=batch.signals.mask, initial=-np.inf)
    for name in ("grpo_s, beta2 = 1", "grpo_s, entropies shuffled")
  )
  for i in range(len(correct)):
    for verdict in (False, True):
      of = correct[i] == verdict
      np.testing.assert_allclose(np.sort(shuffled[i, of]), np.sort(own[i, of]), atol=1e-5)
  assert not np.allclose(shuffled, own, atol=1e-2)


def test_noise_is_the_variance_over_the_squared_mean():
  from credit_probe import Moments

  rng = np.random.default_rng(0)
  moments = Moments()
  for _ in range(4000):
    moments.add(np.array([3.0, 4.0, 0.0]) + rng.normal(size=3))
  np.testing.assert_allclose(moments.mean, [3, 4, 0], atol=0.1)
  assert moments.noise() == pytest.approx(3 / 25, rel=0.05)


def test_generalised_advantages_by_hand():
  from credit_values import generalized_advantages

  value = np.array([[[0.5, 0.75, 0.25], [0.5, 0.25, 9.0]]])
  mask = np.array([[[True, True, True], [True, True, False]]])
  correct = np.array([[True, False]])
  change = [[[0.25, -0.5, 0.75], [-0.25, -0.25, 0]]]
  np.testing.assert_array_equal(generalized_advantages(value, mask, correct, 0.0), change)
  half = [[[0.1875, -0.125, 0.75], [-0.375, -0.25, 0]]]
  np.testing.assert_array_equal(generalized_advantages(value, mask, correct, 0.5), half)
  verdict_minus_value = [[[0.5, 0.25, 0.75], [-0.5, -0.25, 0]]]
  np.testing.assert_array_equal(
    generalized_advantages(value, mask, correct, 1.0), verdict_minus_value
  )


def test_learned_values_find_the_token_that_decides():
  """The second token decides, so the value changes there, also for prompts that were not seen."""
  from credit_values import generalized_advantages, values

  rng = np.random.default_rng(0)
  correct = rng.random((16, 8)) < 0.5
  mask = np.ones((16, 8, 4), bool)
  hidden = rng.normal(size=(16, 8, 4, 5))
  hidden[:, :, 2:, 0] = np.where(correct, 1.0, -1.0)[..., None]  # known after the second token
  hidden[:, :, :2, 0] = 0.0
  value = values(hidden, mask, correct)
  change = np.abs(generalized_advantages(value, mask, correct, 0.0)).mean((0, 1))
  assert change.argmax() == 1 and change[1] > 4 * max(change[0], change[2], change[3])
  flipped = correct.copy()
  flipped[0] = ~flipped[0]
  np.testing.assert_array_equal(values(hidden, mask, flipped)[0], value[0])


def test_a_baseline_by_position_sums_to_zero_over_a_group(case):
  from credit_arms import ARMS

  *_, batch = case
  advantages = np.asarray(ARMS["ours: baseline by position"].advantages(batch))
  np.testing.assert_allclose(advantages.sum(1), 0, atol=1e-5)
  for name in ("ours: learned value, lambda = 0.9", "ours: advantage times change of value"):
    advantages = np.asarray(ARMS[name].advantages(batch))
    assert np.isfinite(advantages).all() and not advantages[~batch.signals.mask].any()
