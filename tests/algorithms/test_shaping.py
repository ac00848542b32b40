import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import shaping
from gtpo_jax.algorithms.relative_entropy import COMPARE
from gtpo_jax.algorithms.shaping import EntropyBonus, Signals

entropy_credit = jax.jit(shaping.entropy_credit, static_argnames="credit")
completion_entropy = jax.jit(shaping.completion_entropy, static_argnums=2)


def credit(
  right=(1.0, 0.3),
  wrong=(1.0, 0.3),
  compare="position",
  scope="group",
  h_floor=0.01,
  clip=(0.0, float("inf")),
):
  return EntropyBonus(right, wrong, COMPARE[compare, scope], h_floor, clip)


def signals(entropy, mask, correct):
  correct = jnp.asarray(correct)[..., None]
  nothing = jnp.zeros(correct.shape)
  return Signals(jnp.asarray(entropy, jnp.float32), jnp.asarray(mask), correct, nothing, nothing)


# Two right completions, two wrong ones, of lengths 2, 1, 2, 1.
HAND = signals(
  [[[1.0, 2.0], [3.0, 7.0], [0.5, 0.25], [0.25, 7.0]]],
  [[[True, True], [True, False], [True, True], [True, False]]],
  [[True, True, False, False]],
)


def test_credit_by_hand():
  shaped = entropy_credit(HAND, credit=credit())
  # Right, step 1: H = 1, 3, mean 2, shares 1/2, 3/2; step 2: alone. Wrong, step 1: 1/H = 2, 4, mean 3, shares 2/3, 4/3; step 2: alone.
  np.testing.assert_allclose(shaped.plus, [[[1.15, 1.3], [1.45, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [-1.2, -1.3], [-1.4, 0]]], rtol=1e-6)


def test_the_floor_bounds_the_penalty_of_a_certain_token():
  x = signals([[[0.0], [1.0]]], [[[True], [True]]], [[False, False]])
  shaped = entropy_credit(x, credit=credit(wrong=(0.0, 1.0), h_floor=0.5))
  np.testing.assert_allclose(shaped.minus, [[[-4 / 3], [-2 / 3]]], rtol=1e-6)  # 1/H = 2, 1
  assert not shaped.plus.any()


def test_what_the_right_earn_is_held_within_the_clip():
  shaped = entropy_credit(HAND, credit=credit(clip=(1.2, 1.4)))  # of 1.15, 1.3, 1.45
  np.testing.assert_allclose(shaped.plus, [[[1.2, 1.3], [1.4, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [-1.2, -1.3], [-1.4, 0]]], rtol=1e-6)


def test_the_length_penalty_comes_on_top_of_the_clip_on_both_sides():
  x = HAND._replace(penalty=jnp.asarray([[[-0.5], [0.0], [0.0], [-0.25]]]))
  shaped = entropy_credit(x, credit=credit(wrong=(0.0, 0.0), clip=(1.2, 1.4)))
  np.testing.assert_allclose(shaped.plus, [[[0.7, 0.8], [1.4, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [0, 0], [-0.25, 0]]], rtol=1e-6)


def test_the_plain_reward_by_hand():
  x = HAND._replace(
    reward=jnp.asarray([[[1.0], [1.0], [-1.0], [-1.0]]]),
    penalty=jnp.asarray([[[-0.5], [0.0], [0.0], [-0.25]]]),
  )
  shaped = jax.jit(shaping.plain_reward)(x)
  np.testing.assert_array_equal(shaped.plus, [[[0.5, 0.5], [1, 0], [0, 0], [0, 0]]])
  np.testing.assert_array_equal(shaped.minus, [[[0, 0], [0, 0], [-1, -1], [-1.25, 0]]])


def test_right_and_wrong_are_never_compared_with_each_other():
  everywhere = credit(compare="matrix", scope="batch")
  before = entropy_credit(HAND, credit=everywhere)
  right = jnp.asarray(HAND.correct)
  other_wrong = entropy_credit(
    HAND._replace(entropy=jnp.where(right, HAND.entropy, HAND.entropy**2 + 1)), credit=everywhere
  )
  np.testing.assert_array_equal(other_wrong.plus, before.plus)
  assert np.abs(other_wrong.minus - before.minus).max() > 0.01


@pytest.mark.parametrize("compare", ["position", "sequence", "matrix"])
@pytest.mark.parametrize("scope", ["group", "batch"])
def test_credit_is_conserved(compare, scope):
  rng = np.random.default_rng(3)
  mask = np.arange(6) < rng.integers(1, 7, (3, 5))[..., None]
  correct = rng.random((3, 5)) < 0.5
  x = signals(rng.gamma(0.5, 1.0, mask.shape), mask, correct)
  shaped = entropy_credit(x, credit=credit((0.9, 0.4), (0.2, 0.7), compare, scope))
  np.testing.assert_allclose(shaped.plus.sum(), 1.3 * (mask & correct[..., None]).sum(), rtol=1e-5)
  np.testing.assert_allclose(
    shaped.minus.sum(), -0.9 * (mask & ~correct[..., None]).sum(), rtol=1e-5
  )


def test_completion_entropy_by_hand():
  entropy = jnp.asarray([[[1.0, 4.0, jnp.nan], [2.0, 2.0, 8.0], [0.0, 1.0, jnp.nan]]])
  mask = jnp.asarray([[[True, True, False], [True, True, True], [True, True, False]]])
  np.testing.assert_allclose(
    completion_entropy(entropy, mask, "arithmetic", 0.01), [[[2.5], [4.0], [0.5]]], rtol=1e-6
  )
  np.testing.assert_allclose(
    completion_entropy(entropy, mask, "geometric", 0.01),
    [[[2.0], [32 ** (1 / 3)], [0.1]]],
    rtol=1e-5,
  )


def test_the_arithmetic_mean_is_at_least_the_geometric():
  rng = np.random.default_rng(0)
  entropy = jnp.asarray(rng.gamma(1.0, 1.0, (4, 4, 6)) + 0.02, jnp.float32)
  mask = jnp.ones((4, 4, 6), bool)
  arithmetic, geometric = (
    completion_entropy(entropy, mask, mean, 0.01) for mean in ("arithmetic", "geometric")
  )
  assert (arithmetic > geometric).all()
