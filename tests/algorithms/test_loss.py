"""`Algorithm.loss` by hand: corrections, metrics, and the inputs it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import make
from gtpo_jax.runtime.errors import UserError

NEW = jnp.log(jnp.asarray([[[2.0, 0.5], [4.0, 1.0]]]))
OLD = jnp.zeros((1, 2, 2))
MASK = jnp.asarray([[[True, True], [True, False]]])
INPUTS = {"advantages": 1 + OLD, "mask": MASK}
METRICS = {
  "clip/low",
  "clip/high",
  "ratio/mean",
  "ratio/ess",
  "ratio/p01",
  "ratio/p50",
  "ratio/p99",
  "covariance/mean",
}


def test_the_corrections_by_hand():
  """One completion of two tokens with A = 1, -1 and ratios 1.1, 5.

  The dual clip is at 3, and the mismatch weights are 1.5 and 2 (capped from 2.5). The KL terms are
  r - 1 - log r with r = 2, 1/2.
  """
  new = jnp.log(jnp.asarray([[[1.1, 5.0]]]))
  mask = jnp.ones((1, 1, 2), bool)
  inputs = {
    "log_probs": new,
    "log_probs_old": jnp.zeros(mask.shape),
    "log_probs_sampler": -jnp.log(jnp.asarray([[[1.5, 2.5]]])),
    "log_probs_reference": new + jnp.log(jnp.asarray([[[2.0, 0.5]]])),
    "advantages": jnp.asarray([[[1.0, -1.0]]]),
    "mask": mask,
  }
  algorithm = make("dapo", dual_clip=3.0, tis_cap=2.0, kl_weight=0.1)
  value, metrics = jax.jit(algorithm.loss)(**inputs)
  divergence = (1 - math.log(2) + math.log(2) - 0.5) / 2
  np.testing.assert_allclose(value, -(1.5 * 1.1 - 2 * 3) / 2 + 0.1 * divergence, rtol=1e-6)
  np.testing.assert_allclose(metrics["kl/reference"], divergence, rtol=1e-5)
  np.testing.assert_allclose(metrics["mismatch/weight"], 1.75, rtol=1e-5)


def test_a_correction_that_is_off_has_no_effect():
  value = lambda **more: make("dapo").loss(log_probs=NEW, log_probs_old=OLD, **INPUTS, **more)
  loss, metrics = value(log_probs_sampler=OLD - 1, log_probs_reference=OLD - 1)
  expected_loss, expected_metrics = value()
  assert float(loss) == float(expected_loss)
  assert metrics.keys() == expected_metrics.keys() == METRICS


def test_clip_metrics_by_hand():
  new = jnp.log(jnp.asarray([[[0.5, 0.5], [2.0, 1.0]], [[2.0, 9.0], [1.0, 9.0]]]))
  advantages = jnp.asarray([[[-1.0, 1.0], [1.0, 1.0]], [[-1.0, 1.0], [1.0, 1.0]]])
  mask = jnp.asarray([[[True, True], [True, True]], [[True, False], [True, False]]])
  inputs = {"log_probs_old": jnp.zeros(mask.shape), "advantages": advantages, "mask": mask}
  _, metrics = jax.jit(make("dapo").loss)(log_probs=new, **inputs)
  np.testing.assert_allclose(metrics["clip/low"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["clip/high"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/mean"], 7 / 6, rtol=1e-6)


@pytest.mark.parametrize(
  ("setting", "missing"), [("kl_weight", "log_probs_reference"), ("tis_cap", "log_probs_sampler")]
)
def test_a_correction_without_its_log_probs_is_refused(setting, missing):
  message = f"algorithm.{setting} = 0.5 needs {missing}; pass it, or set {setting} = 0"
  with pytest.raises(UserError, match=message):
    make("dapo", **{setting: 0.5}).loss(log_probs=NEW, log_probs_old=OLD, **INPUTS)


def test_a_guide_in_a_recipe_without_one_is_refused():
  mask = jnp.ones((1, 2, 3), bool)
  flags = jnp.asarray([[True, False]])
  gtpo = make("gtpo")
  for call in (
    lambda: gtpo.token_weights(mask, flags, flags),
    lambda: gtpo.loss_mask(entropy=jnp.ones((1, 2, 3)), mask=mask, correct=flags, guided=flags),
  ):
    with pytest.raises(UserError, match="'gtpo' has no guide; omit `guided`, or use 'dapo_mixed'"):
      call()


def test_the_entropy_bonus_by_hand():
  """The bonus lowers the loss by the coefficient times 0.5, the mean entropy of three tokens."""
  entropy = jnp.asarray([[[0.2, 0.4], [0.9, 7.0]]])
  inputs = {"log_probs": NEW, "log_probs_old": OLD, **INPUTS}
  plain, _ = make("dapo").loss(**inputs)
  algorithm = make("dapo", entropy_coef=0.1)
  value = lambda entropy: algorithm.loss(**inputs, entropy=entropy)[0]
  loss, slope = jax.value_and_grad(value)(entropy)
  np.testing.assert_allclose(loss, plain - 0.1 * 0.5, rtol=1e-6)
  np.testing.assert_allclose(slope, -0.1 / 3 * MASK, rtol=1e-6)
  with pytest.raises(UserError, match="needs entropy; pass it"):
    algorithm.loss(**inputs)


@pytest.mark.parametrize(
  ("coef", "entropy", "used", "following"),
  [
    (0.02, 0.25, 0.02, 0.03),  # below the target: the bonus applies and grows
    (0.02, 0.3, 0.02, 0.03),  # at the target
    (0.02, 0.35, 0.0, 0.01),  # above: no bonus, and it shrinks
    (0.0, 0.35, 0.0, 0.0),  # never negative
    (0.5, 0.1, 0.5, 0.5),  # at most entropy_coef_max
  ],
)
def test_the_entropy_coefficient_moves_towards_the_target(coef, entropy, used, following):
  adapted = {"entropy_target": 0.3, "entropy_coef_delta": 0.01, "entropy_coef_max": 0.5}
  bonus = make("dapo", **adapted).recipe.entropy_bonus
  entropies = jnp.where(MASK, entropy, 99.0)
  got = bonus.next_coef(jnp.float32(coef), entropies, MASK)
  np.testing.assert_allclose(got, [used, following], rtol=1e-6)
  assert bonus.initial_coef == 0.0
  assert make("dapo").recipe.entropy_bonus.initial_coef is None


def test_a_selection_without_its_inputs_is_refused():
  inputs = {"log_probs": NEW, "log_probs_old": OLD, **INPUTS}
  with pytest.raises(UserError, match=r"'kl_cov' \(objective 'kl_cov'\) needs selected; pass it"):
    make("kl_cov").loss(**inputs)
  with pytest.raises(UserError, match="needs key; pass it"):
    make("clip_cov").select(**inputs)
  with pytest.raises(UserError, match="needs entropy; pass it"):
    make("stare").select(**inputs)


def test_ratio_metrics_by_hand():
  """Ratios 2, 0.5 and 4: mean 6.5 / 3, effective sample size 6.5^2 / (3 * 20.25)."""
  _, metrics = jax.jit(make("dapo").loss)(log_probs=NEW, log_probs_old=OLD, **INPUTS)
  np.testing.assert_allclose(metrics["ratio/mean"], 6.5 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/ess"], 6.5**2 / (3 * 20.25), rtol=1e-6)
  quantiles = [metrics[f"ratio/{name}"] for name in ("p01", "p50", "p99")]
  np.testing.assert_allclose(quantiles, [0.5, 2.0, 4.0], rtol=1e-6)
  assert abs(metrics["covariance/mean"]) < 1e-6  # all advantages are equal


def test_which_divergence_each_estimator_has_the_gradient_of():
  """Each id of a vocabulary is a token, weighted by the probability that it was sampled with.

  The old policy is another one than the trained one only for "k3_ratio".
  """
  logits = jnp.asarray([0.3, -0.5, 1.1, 0.0])
  reference = jax.nn.log_softmax(jnp.asarray([1.0, 0.2, -0.4, 0.1]))
  earlier = jax.nn.log_softmax(jnp.asarray([-0.2, 0.4, 0.5, 0.9]))
  kl = lambda p, q: (jnp.exp(p) * (p - q)).sum()
  to_reference = jax.grad(lambda x: kl(jax.nn.log_softmax(x), reference))(logits)
  from_reference = jax.grad(lambda x: kl(reference, jax.nn.log_softmax(x)))(logits)
  of_token = lambda x: x.reshape(1, 4, 1)

  def gradient(estimator, old):
    algorithm = make("grpo", kl_weight=0.5, kl_estimator=estimator)

    def expected(x):
      return algorithm.loss(
        log_probs=of_token(jax.nn.log_softmax(x)),
        log_probs_old=of_token(old),
        log_probs_reference=of_token(reference),
        advantages=jnp.zeros((1, 4, 1)),
        mask=jnp.ones((1, 4, 1), bool),
        weights=of_token(jnp.exp(old)),
      )[0]

    return jax.jit(jax.grad(expected))(logits)

  on_policy = jax.nn.log_softmax(logits)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  close(gradient("k3", on_policy), 0.5 * from_reference)
  close(gradient("k2", on_policy), 0.5 * to_reference)
  close(gradient("k3_ratio", on_policy), 0.5 * to_reference)
  close(gradient("k3_ratio", earlier), 0.5 * to_reference)
  assert np.abs(from_reference - to_reference).max() > 0.05


def test_the_kl_estimators_by_hand():
  """log pi - log ref is -0.5 and the importance ratio 2."""
  at = lambda x: jnp.full((1, 1, 1), x)
  values = {}
  for estimator in ("k3", "k2", "k3_ratio"):
    _, metrics = make("grpo", kl_weight=0.1, kl_estimator=estimator).loss(
      log_probs=at(-1.0),
      log_probs_old=at(-1.0 - math.log(2.0)),
      log_probs_reference=at(-0.5),
      advantages=at(0.0),
      mask=at(True),
    )
    values[estimator] = float(metrics["kl/reference"])
  k3 = math.exp(0.5) - 1.5
  assert values == pytest.approx({"k3": k3, "k2": 0.125, "k3_ratio": 2 * k3}, rel=1e-5)
