"""The bounds of ratios and divergences; test_recipes_by_hand.py and test_loss.py have values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import ratios

RATIOS = {
  "token": jax.jit(ratios.token_ratio),
  "arithmetic": jax.jit(ratios.sequence_ratio),
  "geometric": jax.jit(ratios.geometric_sequence_ratio),
}


@pytest.mark.parametrize("kind", RATIOS)
def test_log_ratios_are_clamped_at_20(kind):
  new = jnp.asarray([[[-1.0], [-500.0], [500.0]]])
  old = jnp.asarray([[[-1.0], [-1.0], [1.0]]])
  mask = jnp.ones((1, 3, 1), bool)
  ratio = lambda new: RATIOS[kind](new, old, mask)
  np.testing.assert_allclose(ratio(new).ravel(), [1, math.exp(-20), math.exp(20)], rtol=1e-5)
  grad = jax.jit(jax.grad(lambda x: ratio(x).sum()))(new)
  np.testing.assert_array_equal(grad.ravel(), [1, 0, 0])


def test_k3_is_never_negative_and_keeps_small_differences():
  gap = jnp.asarray([[[1e-3, -1e-3, 1e-4, -3.0, 3.0, 1e4, -1e4]]])
  got = jax.jit(ratios.k3)(jnp.zeros(gap.shape), gap, jnp.ones(gap.shape, bool))
  got = np.asarray(got, np.float64).ravel()
  assert (got >= 0).all() and np.isfinite(got).all()
  # Half the square of the gap, to within the float32 spacing at 1e-3.
  np.testing.assert_allclose(got[:2], [5e-7, 5e-7], rtol=0.01, atol=1.3e-10)
  np.testing.assert_allclose(got[5:], [math.exp(20) - 21, 19], rtol=1e-5)
