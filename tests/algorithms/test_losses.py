import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_reference import loss, numeric_gradient, random_policies

from gtpo_jax.algorithms import losses, make, ratios

clipped_objective, completion_mean, token_mean = map(jax.jit, (losses.clipped_objective, losses.completion_mean, losses.token_mean))
token_ratio, sequence_ratio = jax.jit(ratios.token_ratio), jax.jit(ratios.sequence_ratio)
geometric_sequence_ratio = jax.jit(ratios.geometric_sequence_ratio)

# Ratios 2, 1/2 and, in a completion of one token, 4.
LOGP = jnp.log(jnp.asarray([[[2.0, 0.5], [4.0, 1.0]]]))
OLD = jnp.zeros((1, 2, 2))
MASK = jnp.asarray([[[True, True], [True, False]]])

OBJECTIVE_AND_SLOPE = jax.jit(jax.value_and_grad(lambda ratio, advantage: clipped_objective(ratio, advantage, 0.2, 0.28)))
RATIOS = {"token": token_ratio, "arithmetic": sequence_ratio, "geometric": geometric_sequence_ratio}
AVERAGES = {"token": token_mean, "completion": completion_mean}


def test_ratios_by_hand():
  np.testing.assert_allclose(token_ratio(LOGP, OLD, MASK), [[[2, 0.5], [4, 1]]], rtol=1e-6)
  np.testing.assert_allclose(sequence_ratio(LOGP, OLD, MASK), [[[1.25, 1.25], [4, 4]]], rtol=1e-6)
  np.testing.assert_allclose(geometric_sequence_ratio(LOGP, OLD, MASK), [[[1, 1], [4, 4]]], rtol=1e-6)


@pytest.mark.parametrize("kind", RATIOS)
def test_log_ratios_stop_at_20(kind):
  logp, mask = jnp.asarray([[[-1.0], [-500.0], [500.0]]]), jnp.ones((1, 3, 1), bool)
  total = lambda logp: RATIOS[kind](logp, jnp.asarray([[[-1.0], [-1.0], [1.0]]]), mask)
  np.testing.assert_allclose(total(logp).ravel(), [1, math.exp(-20), math.exp(20)], rtol=1e-5)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: total(x).sum()))(logp).ravel(), [1, 0, 0])


@pytest.mark.parametrize("kind", RATIOS)
def test_the_same_policy_has_ratio_1(kind):
  logp, _, _ = random_policies(0, np.asarray(MASK))
  assert (RATIOS[kind](jnp.asarray(logp), jnp.asarray(logp), MASK) == 1).all()


def test_averages_by_hand():
  mask = jnp.asarray([[[True, True, True], [True, False, False]], [[True, True, False], [False, False, False]]])
  np.testing.assert_allclose(token_mean(mask), np.asarray(mask) / 6, rtol=1e-6)
  thirds = [[[1 / 9, 1 / 9, 1 / 9], [1 / 3, 0, 0]], [[1 / 6, 1 / 6, 0], [0, 0, 0]]]  # three completions with tokens
  np.testing.assert_allclose(completion_mean(mask), thirds, rtol=1e-6)


@pytest.mark.parametrize("average", AVERAGES.values())
def test_weights_sum_to_1(average):
  rng = np.random.default_rng(4)
  mask = jnp.asarray(np.arange(9) < rng.integers(0, 10, (5, 3))[..., None])
  weights = average(mask)
  np.testing.assert_allclose(np.asarray(weights, np.float64).sum(), 1, rtol=1e-6)
  assert not np.asarray(weights)[~np.asarray(mask)].any()
  assert not average(jnp.zeros((2, 2, 3), bool)).any()


@pytest.mark.parametrize(("ratio", "advantage", "objective", "slope"), [
    (1.0, 2.0, 2.0, 2.0),     # inside
    (1.5, 2.0, 2.56, 0.0),    # above, good: held at 1.28
    (1.5, -2.0, -3.0, -2.0),  # above, bad: not held
    (0.5, 2.0, 1.0, 2.0),     # below, good: not held
    (0.5, -2.0, -1.6, 0.0),   # below, bad: held at 0.8
    (1.25, 2.0, 2.5, 2.0),    # the upper bound is eps_high's
    (0.75, -2.0, -1.6, 0.0),  # the lower bound is eps_low's
    (3.0, 0.0, 0.0, 0.0),
])
def test_clipped_objective_by_hand(ratio, advantage, objective, slope):
  value, grad = OBJECTIVE_AND_SLOPE(ratio, advantage)
  np.testing.assert_allclose([value, grad], [objective, slope], rtol=1e-6)


def learned(kind, average, *, mask, eps=(0.2, 0.28)):
  """The loss of the package as a function of (logp, logp_old, advantages)."""
  def value(logp, logp_old, advantages):
    objective = clipped_objective(RATIOS[kind](logp, logp_old, mask), jnp.where(mask, advantages, 0), *eps)
    return -jnp.where(mask, AVERAGES[average](mask) * objective, 0).sum()
  return value


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_against_the_slow_loop_and_finite_differences(kind, average, seed):
  rng = np.random.default_rng(seed + 50)
  mask = np.arange(4) < rng.integers(1, 5, (2, 3))[..., None]
  logp, old, advantages = random_policies(seed, mask, spread=0.3)
  if kind != "token":  # a sequence-level advantage
    advantages = np.broadcast_to(advantages[..., :1], mask.shape)
  slow = lambda x: loss(x, old, advantages, mask, ratio=kind, average=average, eps_low=0.2, eps_high=0.28)
  value, grad = jax.jit(jax.value_and_grad(learned(kind, average, mask=jnp.asarray(mask))))(logp, old, advantages)
  np.testing.assert_allclose(value, slow(logp), rtol=2e-5, atol=1e-6)
  expected = numeric_gradient(slow, logp, list(zip(*np.nonzero(mask), strict=True)))
  np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
  assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize(("ratio", "expected"), [
    # d/dlogp of -A w^ / G with A = 1 and G = 2, for ratios 1.1 and 0.9 in the first completion, 1.2 in the second.
    ("arithmetic", [[-0.5 * 1.1 / 2, -0.5 * 0.9 / 2], [-0.5 * 1.2, 0]]),                        # w_t / |o|
    ("geometric", [[-0.25 * 0.99**0.5, -0.25 * 0.99**0.5], [-0.5 * 1.2, 0]]),                   # w^ / |o|
])
def test_the_gradient_of_the_sequence_ratio_by_hand(ratio, expected):
  logp = jnp.log(jnp.asarray([[[1.1, 0.9], [1.2, 1.0]]]))
  algorithm = make("grpo_s", ratio=ratio)
  value = lambda logp: algorithm.loss(logp=logp, logp_old=OLD, advantages=jnp.ones(MASK.shape), mask=MASK)[0]
  np.testing.assert_allclose(jax.jit(jax.grad(value))(logp), [expected], rtol=1e-5, atol=1e-7)


def test_clip_metrics_by_hand():
  algorithm = make("dapo")
  logp = jnp.log(jnp.asarray([[[0.5, 0.5], [2.0, 1.0]], [[2.0, 9.0], [1.0, 9.0]]]))
  advantages = jnp.asarray([[[-1.0, 1.0], [1.0, 1.0]], [[-1.0, 1.0], [1.0, 1.0]]])
  mask = jnp.asarray([[[True, True], [True, True]], [[True, False], [True, False]]])
  _, metrics = jax.jit(algorithm.loss)(logp=logp, logp_old=jnp.zeros(mask.shape), advantages=advantages, mask=mask)
  np.testing.assert_allclose(metrics["clip/low"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["clip/high"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/mean"], 7 / 6, rtol=1e-6)
