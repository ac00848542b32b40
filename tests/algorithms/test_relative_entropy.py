import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import relative_entropy as plain_relative_entropy
from gtpo_jax.algorithms.relative_entropy import (
  COMPARE,
  completion_entropy,
  effective_participants,
  inverse_entropy,
)

relative_entropy = jax.jit(plain_relative_entropy, static_argnums=2)
AXES = sorted({sets for sets in COMPARE.values() if isinstance(sets, tuple)})

# One prompt, three completions of lengths 3, 2, 2.
ENTROPY = np.array([[[1.0, 4.0, 2.0], [3.0, 0.0, 9.0], [2.0, 2.0, 9.0]]], np.float32)
MASK = np.array([[[1, 1, 1], [1, 1, 0], [1, 1, 0]]], bool)


def random_case(seed, n=3, g=4, t=6):
  rng = np.random.default_rng(seed)
  x = rng.gamma(0.5, 1.0, (n, g, t)).astype(np.float32)
  x[rng.random((n, g, t)) < 0.1] = 0
  mask = (np.arange(t) < rng.integers(0, t + 1, (n, g))[..., None]) & (rng.random((n, g, 1)) < 0.8)
  return x, mask


@pytest.mark.parametrize(
  ("compare", "expected"),
  [
    ("position", [[0.5, 2.0, 1.0], [1.5, 0.0, 0.0], [1.0, 1.0, 0.0]]),  # means 2, 2, 2
    ("sequence", [[3 / 7, 12 / 7, 6 / 7], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),  # means 7/3, 3/2, 2
    ("matrix", [[0.5, 2.0, 1.0], [1.5, 0.0, 0.0], [1.0, 1.0, 0.0]]),  # mean 14/7
  ],
)
def test_shares_by_hand(compare, expected):
  share = relative_entropy(jnp.asarray(ENTROPY), jnp.asarray(MASK), COMPARE[compare, "group"])
  np.testing.assert_allclose(share, [expected], rtol=1e-6)


def test_the_batch_scope_compares_across_prompts_by_hand():
  x = jnp.asarray([[[1.0, 2.0]], [[3.0, 8.0]]])
  mask = jnp.asarray([[[True, True]], [[True, False]]])
  share = lambda compare, scope: relative_entropy(x, mask, COMPARE[compare, scope]).tolist()
  assert share("position", "group") == [[[1.0, 1.0]], [[1.0, 0.0]]]
  assert share("position", "batch") == [[[0.5, 1.0]], [[1.5, 0.0]]]
  assert share("matrix", "batch") == [[[0.5, 1.0]], [[1.5, 0.0]]]
  expected = [[[2 / 3, 4 / 3]], [[1.0, 0.0]]]
  np.testing.assert_allclose(share("sequence", "batch"), expected, rtol=1e-6)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("seed", range(3))
def test_the_shares_of_every_set_sum_to_its_size(axes, seed):
  x, mask = random_case(seed)
  share = np.asarray(relative_entropy(jnp.asarray(x), jnp.asarray(mask), axes), np.float64)
  np.testing.assert_allclose(share.sum(axes), mask.sum(axes), atol=1e-5)


def test_a_set_without_any_entropy_shares_equally():
  mask = jnp.asarray([[[True, True], [True, False], [True, False]]])
  share = relative_entropy(jnp.zeros((1, 3, 2)), mask, (1,))
  assert share.tolist() == [[[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]]


def test_an_empty_set_is_all_zero():
  share = relative_entropy(jnp.full((2, 2, 3), jnp.nan), jnp.zeros((2, 2, 3), bool), (1, 2))
  assert share.tolist() == np.zeros((2, 2, 3)).tolist()


@pytest.mark.parametrize("axes", AXES)
def test_masked_entries_have_no_effect(axes):
  x, mask = random_case(5)
  clean = np.where(mask, x, 0)
  broken = np.where(mask, x, np.nan)
  share = lambda x: np.asarray(relative_entropy(jnp.asarray(x), jnp.asarray(mask), axes))
  np.testing.assert_array_equal(share(broken), share(clean))


def test_inverse_entropy_stops_at_the_floor():
  inverse = inverse_entropy(jnp.asarray([0.0, 0.005, 0.01, 0.5, 4.0]), 0.01)
  np.testing.assert_allclose(inverse, [100.0, 100.0, 100.0, 2.0, 0.25], rtol=1e-6)


def test_effective_participants_by_hand():
  column = lambda *values: jnp.asarray(values).reshape(1, 4, 1)
  everyone = column(True, True, True, True)
  participants = lambda share, mask: float(effective_participants(share, mask, (1,)))
  assert participants(column(1.0, 1.0, 1.0, 1.0), everyone) == 1.0
  assert participants(column(4.0, 0.0, 0.0, 0.0), everyone) == 0.25
  uneven = participants(column(3.0, 1.0, 0.0, 0.0), everyone)
  np.testing.assert_allclose(uneven, 16 / 10 / 4, rtol=1e-6)
  two = participants(column(3.0, 1.0, 9.0, np.nan), column(True, True, False, False))
  np.testing.assert_allclose(two, 16 / 10 / 2, rtol=1e-6)


def test_completion_entropy_by_hand():
  entropy = jnp.asarray([[[1.0, 4.0, jnp.nan], [2.0, 2.0, 8.0], [0.0, 1.0, jnp.nan]]])
  mask = jnp.asarray([[[True, True, False], [True, True, True], [True, True, False]]])
  arithmetic = completion_entropy(entropy, mask, "arithmetic", 0.01)
  geometric = completion_entropy(entropy, mask, "geometric", 0.01)
  np.testing.assert_allclose(arithmetic, [[[2.5], [4.0], [0.5]]], rtol=1e-6)
  np.testing.assert_allclose(geometric, [[[2.0], [32 ** (1 / 3)], [0.1]]], rtol=1e-5)
