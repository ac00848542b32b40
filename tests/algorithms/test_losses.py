import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import random_policies

from gtpo_jax.algorithms import losses, make, ratios
from gtpo_jax.runtime.errors import UserError

AVERAGES = {name: jax.jit(average) for name, average in losses.AVERAGES.items()}
token_ratio = jax.jit(ratios.token_ratio)
sequence_ratio = jax.jit(ratios.sequence_ratio)
geometric_sequence_ratio = jax.jit(ratios.geometric_sequence_ratio)

# Ratios 2, 1/2 and, in a completion of one token, 4.
LOGP = jnp.log(jnp.asarray([[[2.0, 0.5], [4.0, 1.0]]]))
OLD = jnp.zeros((1, 2, 2))
MASK = jnp.asarray([[[True, True], [True, False]]])

OBJECTIVE_AND_SLOPE = jax.jit(
  jax.value_and_grad(lambda ratio, advantage: losses.clipped_objective(ratio, advantage, 0.2, 0.28))
)
RATIOS = {"token": token_ratio, "arithmetic": sequence_ratio, "geometric": geometric_sequence_ratio}


def test_ratios_by_hand():
  np.testing.assert_allclose(token_ratio(LOGP, OLD, MASK), [[[2, 0.5], [4, 1]]], rtol=1e-6)
  np.testing.assert_allclose(sequence_ratio(LOGP, OLD, MASK), [[[1.25, 1.25], [4, 4]]], rtol=1e-6)
  np.testing.assert_allclose(
    geometric_sequence_ratio(LOGP, OLD, MASK), [[[1, 1], [4, 4]]], rtol=1e-6
  )


@pytest.mark.parametrize("kind", RATIOS)
def test_log_ratios_stop_at_20(kind):
  logp = jnp.asarray([[[-1.0], [-500.0], [500.0]]])
  mask = jnp.ones((1, 3, 1), bool)
  total = lambda logp: RATIOS[kind](logp, jnp.asarray([[[-1.0], [-1.0], [1.0]]]), mask)
  np.testing.assert_allclose(total(logp).ravel(), [1, math.exp(-20), math.exp(20)], rtol=1e-5)
  np.testing.assert_array_equal(
    jax.jit(jax.grad(lambda x: total(x).sum()))(logp).ravel(), [1, 0, 0]
  )


@pytest.mark.parametrize("kind", RATIOS)
def test_the_same_policy_has_ratio_1(kind):
  logp = random_policies(0, np.asarray(MASK))["logp"]
  assert (RATIOS[kind](jnp.asarray(logp), jnp.asarray(logp), MASK) == 1).all()


RAGGED = jnp.asarray([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], bool)


@pytest.mark.parametrize(
  ("average", "expected"),
  [
    ("token", [[[1 / 6] * 3, [1 / 6, 0, 0]], [[1 / 6, 1 / 6, 0], [0, 0, 0]]]),  # six tokens
    (
      "completion",
      [[[1 / 9] * 3, [1 / 3, 0, 0]], [[1 / 6, 1 / 6, 0], [0, 0, 0]]],
    ),  # three completions with tokens
    (
      "group",
      [[[1 / 8] * 3, [1 / 8, 0, 0]], [[1 / 4, 1 / 4, 0], [0, 0, 0]]],
    ),  # two groups with tokens, of 4 and 2
    (
      "constant",
      [[[1 / 18] * 3, [1 / 18, 0, 0]], [[1 / 18, 1 / 18, 0], [0, 0, 0]]],
    ),  # six completions of at most 3
  ],
)
def test_averages_by_hand(average, expected):
  np.testing.assert_allclose(AVERAGES[average](RAGGED), [*expected, [[0] * 3] * 2], rtol=1e-6)


@pytest.mark.parametrize("average", AVERAGES)
def test_weights_sum_to_1(average):
  rng = np.random.default_rng(4)
  mask = jnp.asarray(np.arange(9) < rng.integers(0, 10, (5, 3))[..., None])
  weights = AVERAGES[average](mask)
  np.testing.assert_allclose(
    np.asarray(weights, np.float64).sum(), 1 if average != "constant" else mask.mean(), rtol=1e-6
  )
  assert not np.asarray(weights)[~np.asarray(mask)].any()
  assert not AVERAGES[average](jnp.zeros((2, 2, 3), bool)).any()


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope"),
  [
    (1.0, 2.0, 2.0, 2.0),  # inside
    (1.5, 2.0, 2.56, 0.0),  # above, good: held at 1.28
    (1.5, -2.0, -3.0, -2.0),  # above, bad: not held
    (0.5, 2.0, 1.0, 2.0),  # below, good: not held
    (0.5, -2.0, -1.6, 0.0),  # below, bad: held at 0.8
    (1.25, 2.0, 2.5, 2.0),  # the upper bound is eps_high's
    (0.75, -2.0, -1.6, 0.0),  # the lower bound is eps_low's
    (3.0, 0.0, 0.0, 0.0),
  ],
)
def test_clipped_objective_by_hand(ratio, advantage, objective, slope):
  value, grad = OBJECTIVE_AND_SLOPE(ratio, advantage)
  np.testing.assert_allclose([value, grad], [objective, slope], rtol=1e-6)


@pytest.mark.parametrize(
  ("ratio", "expected"),
  [
    # d/dlogp of -A w^ / G with A = 1 and G = 2, for ratios 1.1 and 0.9 in the first completion, 1.2 in the second.
    ("arithmetic", [[-0.5 * 1.1 / 2, -0.5 * 0.9 / 2], [-0.5 * 1.2, 0]]),  # w_t / |o|
    ("geometric", [[-0.25 * 0.99**0.5, -0.25 * 0.99**0.5], [-0.5 * 1.2, 0]]),  # w^ / |o|
  ],
)
def test_the_gradient_of_the_sequence_ratio_by_hand(ratio, expected):
  logp = jnp.log(jnp.asarray([[[1.1, 0.9], [1.2, 1.0]]]))
  algorithm = make("grpo_s", ratio=ratio)
  value = lambda logp: algorithm.loss(
    logp=logp, logp_old=OLD, advantages=jnp.ones(MASK.shape), mask=MASK
  )[0]
  np.testing.assert_allclose(jax.jit(jax.grad(value))(logp), [expected], rtol=1e-5, atol=1e-7)


DUAL = jax.jit(
  jax.value_and_grad(
    lambda ratio, advantage: losses.clipped_objective(ratio, advantage, 0.2, 0.28, 3.0)
  )
)


@pytest.mark.parametrize(
  ("ratio", "advantage", "objective", "slope"),
  [
    (5.0, -2.0, -6.0, 0.0),  # held at 3 A
    (2.5, -2.0, -5.0, -2.0),  # not that far
    (0.5, -2.0, -1.6, 0.0),
    (5.0, 2.0, 2.56, 0.0),  # the right side is as ever
    (0.5, 2.0, 1.0, 2.0),
    (5.0, 0.0, 0.0, 0.0),
  ],
)
def test_dual_clip_by_hand(ratio, advantage, objective, slope):
  value, grad = DUAL(ratio, advantage)
  np.testing.assert_allclose([value, grad], [objective, slope], rtol=1e-6)


def test_k3_by_hand():
  # r = reference / pi = 2, 1/2; r - 1 - log r = 1 - log 2, log 2 - 1/2; outside the mask 0.
  reference = OLD + jnp.log(jnp.asarray([[[2.0, 0.5], [1.0, 7.0]]]))
  got = jax.jit(ratios.k3)(OLD, reference, MASK)
  np.testing.assert_allclose(got, [[[1 - math.log(2), math.log(2) - 0.5], [0, 0]]], rtol=1e-5)


def test_k3_is_never_negative_and_keeps_small_differences():
  gap = jnp.asarray([[[1e-3, -1e-3, 1e-4, -3.0, 3.0, 1e4, -1e4]]])
  got = np.asarray(
    jax.jit(ratios.k3)(jnp.zeros(gap.shape), gap, jnp.ones(gap.shape, bool)), np.float64
  ).ravel()
  assert (got >= 0).all() and np.isfinite(got).all()
  np.testing.assert_allclose(
    got[:2], [5e-7, 5e-7], rtol=0.01, atol=1.3e-10
  )  # half the square, which float32 holds to an ulp of 1e-3
  np.testing.assert_allclose(got[5:], [math.exp(20) - 21, 19], rtol=1e-5)


def test_mismatch_weights_by_hand():
  trainer = jnp.log(jnp.asarray([[[1.5, 0.5], [4.0, jnp.nan]]]))  # against a sampler that says 1
  got = jax.jit(ratios.mismatch_weight)(trainer, OLD, MASK, 2.0)
  np.testing.assert_allclose(got, [[[1.5, 0.5], [2.0, 1.0]]], rtol=1e-6)
  assert not jax.jit(jax.grad(lambda x: ratios.mismatch_weight(x, OLD, MASK, 2.0).sum()))(
    trainer
  ).any()


def test_the_corrections_by_hand():
  """One completion of two tokens, A = 1, -1, ratios 1.1, 5; the dual clip at 3, weights 1.5 and 2 (of 2.5), KL as above."""
  logp = jnp.log(jnp.asarray([[[1.1, 5.0]]]))
  mask = jnp.ones((1, 1, 2), bool)
  policies = {
    "logp": logp,
    "logp_old": jnp.zeros(mask.shape),
    "logp_sampler": -jnp.log(jnp.asarray([[[1.5, 2.5]]])),
    "logp_reference": logp + jnp.log(jnp.asarray([[[2.0, 0.5]]])),
  }
  algorithm = make("dapo", dual_clip=3.0, tis_cap=2.0, kl_weight=0.1)
  value, metrics = jax.jit(algorithm.loss)(
    **policies, advantages=jnp.asarray([[[1.0, -1.0]]]), mask=mask
  )
  divergence = (1 - math.log(2) + math.log(2) - 0.5) / 2
  np.testing.assert_allclose(value, -(1.5 * 1.1 - 2 * 3) / 2 + 0.1 * divergence, rtol=1e-6)
  np.testing.assert_allclose(
    [metrics["kl/reference"], metrics["mismatch/weight"]], [divergence, 1.75], rtol=1e-5
  )


@pytest.mark.parametrize(
  ("setting", "missing"), [("kl_weight", "logp_reference"), ("tis_cap", "logp_sampler")]
)
def test_a_correction_without_its_log_probs_is_refused(setting, missing):
  with pytest.raises(
    UserError, match=f"algorithm.{setting} = 0.5 needs {missing}; give it, or set {setting} = 0"
  ):
    make("dapo", **{setting: 0.5}).loss(logp=LOGP, logp_old=OLD, advantages=OLD, mask=MASK)


def test_a_correction_that_is_off_reads_nothing():
  value = lambda **more: make("dapo").loss(
    logp=LOGP, logp_old=OLD, advantages=1 + OLD, mask=MASK, **more
  )
  loss, metrics = value(logp_sampler=OLD - 1, logp_reference=OLD - 1)
  assert (
    (float(loss), metrics.keys())
    == (float(value()[0]), value()[1].keys())
    == (float(loss), {"clip/low", "clip/high", "ratio/mean"})
  )


def test_clip_metrics_by_hand():
  algorithm = make("dapo")
  logp = jnp.log(jnp.asarray([[[0.5, 0.5], [2.0, 1.0]], [[2.0, 9.0], [1.0, 9.0]]]))
  advantages = jnp.asarray([[[-1.0, 1.0], [1.0, 1.0]], [[-1.0, 1.0], [1.0, 1.0]]])
  mask = jnp.asarray([[[True, True], [True, True]], [[True, False], [True, False]]])
  _, metrics = jax.jit(algorithm.loss)(
    logp=logp, logp_old=jnp.zeros(mask.shape), advantages=advantages, mask=mask
  )
  np.testing.assert_allclose(metrics["clip/low"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["clip/high"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/mean"], 7 / 6, rtol=1e-6)
