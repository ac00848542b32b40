import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import make, shaping
from gtpo_jax.algorithms.relative_entropy import COMPARE, EntropyWeights, Units, completion_entropy

shape_by_entropy = jax.jit(shaping.shape_by_entropy, static_argnames="weights")


def weights(
  plus=(1.0, 0.3),
  minus=(1.0, 0.3),
  compare="position",
  scope="group",
  h_floor=0.01,
  clip=(0.0, float("inf")),
):
  return EntropyWeights(plus, minus, COMPARE[compare, scope], h_floor, clip)


def make_units(entropy, mask, correct):
  correct = jnp.asarray(correct)[..., None]
  zeros = jnp.zeros(correct.shape)
  mask = jnp.asarray(mask)
  return Units(jnp.asarray(entropy, jnp.float32), mask, correct, zeros, zeros, mask + 0.0)


# Two correct completions, two incorrect ones, of lengths 2, 1, 2, 1.
HAND = make_units(
  [[[1.0, 2.0], [3.0, 7.0], [0.5, 0.25], [0.25, 7.0]]],
  [[[True, True], [True, False], [True, True], [True, False]]],
  [[True, True, False, False]],
)


def test_shaped_rewards_by_hand():
  """At step 1 the shares are H / 2 = 1/2, 3/2 on O+ and (1/H) / 3 = 2/3, 4/3 on O-.

  At step 2 each side has one token, with a share of 1.
  """
  shaped = shape_by_entropy(HAND, weights=weights())
  np.testing.assert_allclose(shaped.plus, [[[1.15, 1.3], [1.45, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [-1.2, -1.3], [-1.4, 0]]], rtol=1e-6)


def test_the_floor_bounds_the_penalty_of_a_certain_token():
  x = make_units([[[0.0], [1.0]]], [[[True], [True]]], [[False, False]])
  shaped = shape_by_entropy(x, weights=weights(minus=(0.0, 1.0), h_floor=0.5))
  np.testing.assert_allclose(shaped.minus, [[[-4 / 3], [-2 / 3]]], rtol=1e-6)  # 1/H = 2, 1
  assert not shaped.plus.any()


def test_the_clip_bounds_only_the_reward_of_correct_units():
  shaped = shape_by_entropy(HAND, weights=weights(clip=(1.2, 1.4)))  # of 1.15, 1.3, 1.45
  np.testing.assert_allclose(shaped.plus, [[[1.2, 1.3], [1.4, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [-1.2, -1.3], [-1.4, 0]]], rtol=1e-6)


def test_the_length_penalty_is_added_after_the_clip_on_both_sides():
  x = HAND._replace(penalty=jnp.asarray([[[-0.5], [0.0], [0.0], [-0.25]]]))
  shaped = shape_by_entropy(x, weights=weights(minus=(0.0, 0.0), clip=(1.2, 1.4)))
  np.testing.assert_allclose(shaped.plus, [[[0.7, 0.8], [1.4, 0], [0, 0], [0, 0]]], rtol=1e-6)
  np.testing.assert_allclose(shaped.minus, [[[0, 0], [0, 0], [0, 0], [-0.25, 0]]], rtol=1e-6)


def test_the_plain_reward_by_hand():
  x = HAND._replace(
    reward=jnp.asarray([[[1.0], [1.0], [-1.0], [-1.0]]]),
    penalty=jnp.asarray([[[-0.5], [0.0], [0.0], [-0.25]]]),
  )
  shaped, metrics = make("grpo").recipe.shaping(x)
  np.testing.assert_array_equal(shaped.plus, [[[0.5, 0.5], [1, 0], [0, 0], [0, 0]]])
  np.testing.assert_array_equal(shaped.minus, [[[0, 0], [0, 0], [-1, -1], [-1.25, 0]]])
  assert metrics == {}


def test_correct_and_incorrect_are_never_compared():
  everywhere = weights(compare="matrix", scope="batch")
  before = shape_by_entropy(HAND, weights=everywhere)
  changed = jnp.where(HAND.correct, HAND.entropy, HAND.entropy**2 + 1)
  after = shape_by_entropy(HAND._replace(entropy=changed), weights=everywhere)
  np.testing.assert_array_equal(after.plus, before.plus)
  assert np.abs(after.minus - before.minus).max() > 0.01


def test_completion_entropy_by_hand():
  entropy = jnp.asarray([[[1.0, 4.0, jnp.nan], [2.0, 2.0, 8.0], [0.0, 1.0, jnp.nan]]])
  mask = jnp.asarray([[[True, True, False], [True, True, True], [True, True, False]]])
  arithmetic = completion_entropy(entropy, mask, "arithmetic", 0.01)
  geometric = completion_entropy(entropy, mask, "geometric", 0.01)
  np.testing.assert_allclose(arithmetic, [[[2.5], [4.0], [0.5]]], rtol=1e-6)
  np.testing.assert_allclose(geometric, [[[2.0], [32 ** (1 / 3)], [0.1]]], rtol=1e-5)
