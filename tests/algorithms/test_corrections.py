"""Corrections for stale and filtered tokens, by hand and against float64 loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.corrections import Corrections
from gtpo_jax.algorithms.loss import effective_sample_size
from gtpo_jax.runtime.errors import UserError

MASK = jnp.asarray([[[True, True], [True, False]]])
SAMPLER = jnp.zeros((1, 2, 2))


def random_batch(seed, n=3, g=4, t=9, scale=0.3):
  """Returns log-probs of trainer and sampler, and a mask with completions of 0 to t tokens."""
  rng = np.random.default_rng(seed)
  trainer = -rng.exponential(1.0, (n, g, t))
  sampler = trainer + scale * rng.normal(size=trainer.shape)
  mask = np.arange(t) < rng.integers(0, t + 1, (n, g, 1))
  return trainer.astype(np.float32), sampler.astype(np.float32), mask


def test_weights_by_hand():
  trainer = jnp.log(jnp.asarray([[[1.5, 0.5], [4.0, jnp.nan]]]))  # the sampler's log-probs are 0
  weight = lambda trainer: Corrections(2.0).weights(trainer, SAMPLER, MASK)
  np.testing.assert_allclose(jax.jit(weight)(trainer), [[[1.5, 0.5], [2.0, 1.0]]], rtol=1e-6)
  assert not jax.jit(jax.grad(lambda x: weight(x).sum()))(trainer).any()


def test_sequence_weights_by_hand():
  trainer = jnp.log(jnp.asarray([[[3.0, 0.5], [4.0, jnp.nan]]]))
  weights = Corrections(2.0, "sequence").weights(trainer, SAMPLER, MASK)
  np.testing.assert_allclose(weights, [[[1.5, 1.5], [2.0, 2.0]]], rtol=1e-6)


def test_masks_by_hand():
  # The geometric means are 2 and 0.5.
  trainer = jnp.log(jnp.asarray([[[4.0, 1.0], [0.5, jnp.nan]]]))
  of = lambda low, high: Corrections(mask_low=low, mask_high=high)
  kept = lambda low, high: of(low, high).kept(trainer, SAMPLER, MASK).tolist()
  assert kept(0.6, 1.9) == [[False, False]]
  assert kept(0.4, 2.1) == [[True, True]]
  assert kept(0.6, 0.0) == [[True, False]]
  assert kept(0.0, 1.9) == [[False, True]]


def test_the_effective_sample_size_by_hand():
  size = lambda *weights: float(
    effective_sample_size(jnp.asarray(weights), jnp.ones(len(weights), bool))
  )
  assert size(0.3, 0.3, 0.3) == pytest.approx(1)
  assert size(1, 0, 0, 0) == pytest.approx(0.25)
  assert size(1, 2) == pytest.approx(9 / 10)
  assert float(effective_sample_size(jnp.ones(3), jnp.zeros(3, bool))) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
def test_against_float64_loops(seed, scale):
  trainer, sampler, mask = random_batch(seed, scale=scale)
  cap, low, high = 1.3, 0.9, 1.1
  by_token = np.asarray(Corrections(cap).weights(trainer, sampler, mask))
  by_sequence = np.asarray(Corrections(cap, "sequence").weights(trainer, sampler, mask))
  kept = np.asarray(Corrections(mask_low=low, mask_high=high).kept(trainer, sampler, mask))
  weights = []
  for i, j in np.ndindex(mask.shape[:2]):
    gaps = [float(trainer[i, j, k]) - float(sampler[i, j, k]) for k in np.flatnonzero(mask[i, j])]
    for k, gap in enumerate(gaps):
      weights.append(min(math.exp(gap), cap))
      assert by_token[i, j, k] == pytest.approx(weights[-1], rel=1e-5)
    expected = min(math.exp(min(max(sum(gaps), -20), 20)), cap)
    assert by_sequence[i, j] == pytest.approx([expected] * mask.shape[2], rel=1e-4)
    geometric = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
    if min(abs(geometric - low), abs(geometric - high)) > 1e-5:
      assert kept[i, j] == (low <= geometric <= high)
  total = math.fsum(weights)
  squares = math.fsum(w * w for w in weights)
  expected = total**2 / (len(weights) * squares)
  assert float(effective_sample_size(by_token, mask)) == pytest.approx(expected, rel=1e-5)


def test_without_a_difference_nothing_is_corrected():
  trainer, _, mask = random_batch(0)
  for level in ("token", "sequence"):
    np.testing.assert_allclose(Corrections(2.0, level).weights(trainer, trainer, mask), 1.0)
  assert np.asarray(Corrections(mask_low=0.999, mask_high=1.001).kept(trainer, trainer, mask)).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_takes_weights_or_computes_them(level):
  trainer, sampler, mask = random_batch(1)
  algorithm = make("gtpo", tis_cap=1.5, tis_level=level)
  new = trainer + 0.05
  inputs = {
    "log_probs": new,
    "log_probs_old": trainer,
    "advantages": np.ones_like(trainer),
    "mask": mask,
  }
  weights = algorithm.recipe.corrections.weights(trainer, sampler, mask)
  given, metrics = algorithm.loss(**inputs, importance=weights)
  computed, _ = algorithm.loss(**inputs, log_probs_sampler=sampler)
  assert float(given) == pytest.approx(float(computed), rel=1e-6)
  assert float(metrics["mismatch/weight"]) == pytest.approx(float(weights[mask].mean()), rel=1e-5)
  off = make("gtpo").recipe.corrections
  assert off.weights(trainer, sampler, mask) is None
  assert off.kept(trainer, sampler, mask) is None


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"tis_level": "sequence"}, "tis_level = 'sequence' needs importance weights; set tis_cap"),
    ({"behaviour": "drawn"}, "behaviour = 'drawn' needs a correction; set tis_cap"),
    ({"mask_low": 1.2, "mask_high": 1.1}, "mask_low must be at most mask_high = 1.1, got 1.2"),
    ({"tis_level": "word"}, "tis_level must be one of token, sequence, got 'word'"),
    ({"behaviour": "x"}, "behaviour must be one of policy, drawn, got 'x'"),
    ({"mask_high": -1.0}, "mask_high must be at least 0 and finite, got -1.0"),
  ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    make("gtpo", **settings)
