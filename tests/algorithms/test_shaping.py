import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import shaping
from gtpo_jax.algorithms.shaping import Signals

entropy_credit = jax.jit(shaping.entropy_credit, static_argnames=("compare", "scope"))
completion_entropy = jax.jit(shaping.completion_entropy, static_argnums=2)


def signals(entropy, mask, correct):
  correct = jnp.asarray(correct)[..., None]
  nothing = jnp.zeros(correct.shape)
  return Signals(jnp.asarray(entropy, jnp.float32), jnp.asarray(mask), correct, nothing, nothing)


# Two right completions, two wrong ones, of lengths 2, 1, 2, 1.
HAND = signals([[[1.0, 2.0], [3.0, 7.0], [0.5, 0.25], [0.25, 7.0]]], [[[True, True], [True, False], [True, True], [True, False]]],
               [[True, True, False, False]])


def test_credit_by_hand():
  shaped = entropy_credit(HAND, base=1.0, bonus=0.3, compare="position", scope="group", h_floor=0.01)
  # Right, step 1: H = 1, 3, mean 2, shares 1/2, 3/2; step 2: alone. Wrong, step 1: 1/H = 2, 4, mean 3, shares 2/3, 4/3; step 2: alone.
  np.testing.assert_allclose(shaped.plus, [[[1.15, 1.3], [1.45, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [-1.2, -1.3], [-1.4, 0]]], rtol=1e-6)


def test_the_floor_bounds_the_penalty_of_a_certain_token():
  x = signals([[[0.0], [1.0]]], [[[True], [True]]], [[False, False]])
  shaped = entropy_credit(x, base=0.0, bonus=1.0, compare="position", scope="group", h_floor=0.5)
  np.testing.assert_allclose(shaped.minus, [[[-4 / 3], [-2 / 3]]], rtol=1e-6)  # 1/H = 2, 1
  assert not shaped.plus.any()


def test_right_and_wrong_are_never_compared_with_each_other():
  shape = {"base": 1.0, "bonus": 1.0, "compare": "matrix", "scope": "batch", "h_floor": 0.01}
  before = entropy_credit(HAND, **shape)
  right = jnp.asarray(HAND.correct)
  other_wrong = entropy_credit(HAND._replace(entropy=jnp.where(right, HAND.entropy, 5 * HAND.entropy + 1)), **shape)
  np.testing.assert_array_equal(other_wrong.plus, before.plus)
  assert np.abs(other_wrong.minus - before.minus).max() > 0.01


@pytest.mark.parametrize("compare", ["position", "sequence", "matrix"])
@pytest.mark.parametrize("scope", ["group", "batch"])
def test_credit_is_conserved(compare, scope):
  rng = np.random.default_rng(3)
  mask = np.arange(6) < rng.integers(1, 7, (3, 5))[..., None]
  correct = rng.random((3, 5)) < 0.5
  x = signals(rng.gamma(0.5, 1.0, mask.shape), mask, correct)
  shaped = entropy_credit(x, base=0.9, bonus=0.4, compare=compare, scope=scope, h_floor=0.01)
  np.testing.assert_allclose(shaped.plus.sum(), 1.3 * (mask & correct[..., None]).sum(), rtol=1e-5)
  np.testing.assert_allclose(shaped.minus.sum(), -1.3 * (mask & ~correct[..., None]).sum(), rtol=1e-5)


def test_completion_entropy_by_hand():
  entropy = jnp.asarray([[[1.0, 4.0, jnp.nan], [2.0, 2.0, 8.0], [0.0, 1.0, jnp.nan]]])
  mask = jnp.asarray([[[True, True, False], [True, True, True], [True, True, False]]])
  np.testing.assert_allclose(completion_entropy(entropy, mask, "arithmetic", 0.01), [[[2.5], [4.0], [0.5]]], rtol=1e-6)
  np.testing.assert_allclose(completion_entropy(entropy, mask, "geometric", 0.01), [[[2.0], [32 ** (1 / 3)], [0.1]]], rtol=1e-5)


def test_the_arithmetic_mean_is_at_least_the_geometric():
  rng = np.random.default_rng(0)
  entropy, mask = jnp.asarray(rng.gamma(1.0, 1.0, (4, 4, 6)) + 0.02, jnp.float32), jnp.ones((4, 4, 6), bool)
  arithmetic, geometric = (completion_entropy(entropy, mask, mean, 0.01) for mean in ("arithmetic", "geometric"))
  assert (arithmetic > geometric).all()
