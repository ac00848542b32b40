import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import advantages
from gtpo_jax.algorithms.modulation import AdvantageBonus, ModulationInputs
from gtpo_jax.algorithms.relative_entropy import ShapedRewards, Units

zscore = jax.jit(advantages.zscore, static_argnums=2)
GROUP = advantages.NORM_SCOPE["group"]
BATCH = advantages.NORM_SCOPE["batch"]


def of_units(advantage):
  """Returns the advantage over groups as a function of shaped rewards, correct and mask."""

  def compute(shaped, correct, mask, tokens=None):
    tokens = mask.astype(jnp.float32) if tokens is None else tokens
    nothing = jnp.zeros(mask.shape)
    units = Units(nothing, mask, correct, nothing, nothing, tokens)
    return advantage(shaped, units, advantages.Normalisation(norm_scope="group"))

  return jax.jit(compute)


leave_one_out = of_units(advantages.leave_one_out)
mean_normalised = of_units(advantages.mean_normalised)
whitened = of_units(advantages.whitened)


def column(*values):
  """Returns one group of completions with one unit each, [1, g, 1]."""
  return jnp.asarray(values)[None, :, None]


def test_zscore_by_hand():
  x = jnp.asarray([[[1.0, 3.0], [5.0, 99.0]]])
  mask = jnp.asarray([[[True, True], [True, False]]])
  # 1, 3, 5: mean 3, population variance 8/3.
  std = (8 / 3) ** 0.5
  expected = [[[-2 / std, 0], [2 / std, 0]]]
  np.testing.assert_allclose(zscore(x, mask, BATCH), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("spread", "no_signal"), [(0.0, True), (5e-7, True), (5e-6, False)])
def test_a_std_below_1e_6_gives_0(spread, no_signal):
  x = jnp.asarray([[[-spread], [spread]]])  # the std is the spread
  z = zscore(x, jnp.ones((1, 2, 1), bool), GROUP).ravel().tolist()
  assert z == ([0.0, 0.0] if no_signal else [-1.0, 1.0])


@pytest.mark.parametrize("value", [0.1, 1.1, -3.3, 1e4])
def test_equal_values_have_no_advantage(value):
  mask = jnp.ones((7, 11, 13), bool)
  assert not zscore(jnp.full(mask.shape, value), mask, BATCH).any()


def test_an_empty_mask_gives_0():
  assert not zscore(jnp.full((1, 2, 3), jnp.nan), jnp.zeros((1, 2, 3), bool), GROUP).any()


MASK = jnp.ones((1, 4, 1), bool)
ONE_OF_FOUR = ShapedRewards(column(1.0, 0.0, 0.0, 0.0), column(0.0, 0.0, 0.0, 0.0))
ONE_CORRECT = column(True, False, False, False)


def test_leave_one_out_by_hand():
  """The mean of the three others is 0 for the correct completion and 1/3 for the incorrect ones."""
  got = leave_one_out(ONE_OF_FOUR, ONE_CORRECT, MASK).ravel()
  np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_leave_one_out_without_others_is_0():
  alone = MASK & column(True, False, False, False)
  assert not leave_one_out(ONE_OF_FOUR, ONE_CORRECT, alone).any()


def test_mean_normalised_by_hand():
  """The mean is 1/4: the correct completion has (1 - 1/4) / (1/4) = 3, the others -1."""
  got = mean_normalised(ONE_OF_FOUR, ONE_CORRECT, MASK).ravel()
  np.testing.assert_allclose(got, [3, -1, -1, -1], rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, -0.5])
def test_mean_normalised_is_0_if_the_mean_is_not_positive(reward):
  shaped = ShapedRewards(column(reward, 0.0, 0.0, 0.0), column(0.0, 0.0, 0.0, 0.0))
  assert not mean_normalised(shaped, ONE_CORRECT, MASK).any()


def test_whitened_by_hand():
  """Two groups, centred to 1/2, -1/2 and 0, 0; the tokens are 1, 3, 2 and 2.

  Over the 8 tokens the mean is (1/2 - 3/2) / 8 = -1/8 and the mean square 4 / 4 / 8 = 1/8.
  """
  x = jnp.asarray([[[1.0], [0.0]], [[5.0], [5.0]]])
  mask = jnp.ones(x.shape, bool)
  tokens = jnp.asarray([[[1.0], [3.0]], [[2.0], [2.0]]])
  got = whitened(ShapedRewards(x, 0 * x), x > 0, mask, tokens=tokens).ravel()
  std = (1 / 8 - 1 / 64) ** 0.5
  np.testing.assert_allclose(got, np.asarray([5, -3, 1, 1]) / 8 / std, rtol=1e-5)


def test_whitened_equal_rewards_have_no_advantage():
  x = jnp.ones((2, 3, 1))
  assert not whitened(ShapedRewards(x, 0 * x), x > 0, x > 0).any()


def test_the_entropy_bonus_by_hand():
  """min(0.4 H, |A| / 2): the first is bounded by |A| / 2, the second is 0.4 H."""
  a = jnp.asarray([1.0, -1.0, -1.0, 0.0])
  entropy = jnp.asarray([2.0, 0.5, 9.0, 2.0])
  got = AdvantageBonus(0.4, 2.0)(a, ModulationInputs(a < 2, entropy)) - a
  np.testing.assert_allclose(got, [0.5, 0.2, 0.5, 0.0], rtol=1e-6)
  assert ((a + got) * a >= 0).all()  # no sign changes
