"""`Algorithm.loss` by hand: corrections, metrics, and the inputs it refuses."""

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

  The dual clip is at 3, the mismatch weights are 1.5 and 2 (capped from 2.5), the KL as in
  `test_k3_by_hand`.
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


def test_a_correction_that_is_off_reads_nothing():
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


def test_logp_and_logp_old_are_aliases():
  algorithm = make("dapo")
  expected = algorithm.loss(log_probs=NEW, log_probs_old=OLD, **INPUTS)
  assert algorithm.loss(logp=NEW, logp_old=OLD, **INPUTS) == expected
  assert algorithm.loss(log_probs=NEW, logp_old=OLD, **INPUTS) == expected


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"log_probs_old": OLD}, r"takes log_probs \(or its alias logp\), got neither"),
    ({"log_probs": NEW}, r"takes log_probs_old \(or its alias logp_old\), got neither"),
    ({"log_probs": NEW, "logp": NEW, "logp_old": OLD}, r"alias logp\), got both"),
    ({"log_probs": NEW, "log_probs_old": OLD, "logp_old": OLD}, r"alias logp_old\), got both"),
  ],
)
def test_log_probs_under_two_names_or_none_are_refused(given, message):
  with pytest.raises(UserError, match=message):
    make("dapo").loss(**given, **INPUTS)


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
