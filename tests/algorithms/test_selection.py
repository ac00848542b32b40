import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import selection

highest = jax.jit(selection.highest, static_argnums=2)
GROUPS = {
  "mixed": [1, 0, 0, 0],
  "all right": [1, 1, 1, 1],
  "all wrong": [0, 0, 0, 0],
  "right by the guide alone": [0, 0, 0, 1],
  "wrong by the guide alone": [1, 1, 1, 0],
}
CORRECT = np.asarray(list(GROUPS.values()), bool)
EVERYBODY = np.ones_like(CORRECT)
GUIDED = np.zeros_like(CORRECT)
GUIDED[:, 3] = True


def named(flags):
  return {name for name, flag in zip(GROUPS, np.asarray(flags), strict=True) if flag}


@pytest.mark.parametrize("module", [np, jnp])
def test_groups_with_contrast(module):
  informative = lambda *x: named(selection.informative(*map(module.asarray, x)))
  assert informative(CORRECT, EVERYBODY) == {
    "mixed",
    "right by the guide alone",
    "wrong by the guide alone",
  }
  assert informative(CORRECT, EVERYBODY, GUIDED) == {"mixed", "right by the guide alone"}
  assert informative(CORRECT, EVERYBODY, np.zeros_like(GUIDED)) == informative(CORRECT, EVERYBODY)


def test_what_does_not_count_makes_no_contrast():
  alive = EVERYBODY.copy()
  alive[:, 0] = False
  assert named(selection.informative(CORRECT, alive)) == {
    "right by the guide alone",
    "wrong by the guide alone",
  }
  assert named(selection.informative(CORRECT, ~EVERYBODY)) == set()
  alive[:, 3] = False
  assert named(selection.informative(CORRECT, alive, GUIDED)) == set()


@pytest.mark.parametrize("module", [np, jnp])
def test_groups_that_the_policy_failed_throughout(module):
  zero_reward = lambda *x: named(selection.zero_reward(*map(module.asarray, x)))
  assert zero_reward(CORRECT, EVERYBODY, GUIDED) == {"all wrong", "right by the guide alone"}
  alive = EVERYBODY.copy()
  alive[:, 0] = False  # the mixed group's only success
  assert zero_reward(CORRECT, alive, GUIDED) == {"all wrong", "right by the guide alone", "mixed"}


@pytest.mark.parametrize(
  ("x", "share", "kept"),
  [
    ([1.0, 5.0, 2.0, 4.0, 3.0], 0.2, [5.0]),  # 1 of 5
    ([1.0, 5.0, 2.0, 4.0, 3.0, 0.0], 0.2, [5.0, 4.0]),  # 1.2 of 6: 2
    ([1.0, 5.0, 2.0, 4.0, 3.0], 0.6, [5.0, 4.0, 3.0]),
    ([1.0, 5.0, 2.0, 4.0, 3.0], 1.0, [1.0, 5.0, 2.0, 4.0, 3.0]),
    ([4.0, 5.0, 4.0, 4.0, 3.0], 0.4, [4.0, 5.0, 4.0, 4.0]),  # ties at the border are all in
    ([2.0, 2.0, 2.0], 0.2, [2.0, 2.0, 2.0]),
    ([0.0, 0.0, 0.0, 1e-30], 0.5, [0.0, 0.0, 0.0, 1e-30]),  # the second highest is a 0
    ([0.0, -0.0, 1.0], 1.0, [0.0, -0.0, 1.0]),
    ([7.0], 0.2, [7.0]),  # one token
    ([0.0], 0.2, [0.0]),
  ],
)
def test_the_highest_by_hand(x, share, kept):
  got = highest(jnp.asarray([x]), jnp.ones((1, len(x)), bool), share)
  assert [value for value, flag in zip(x, got[0].tolist(), strict=True) if flag] == kept


@pytest.mark.parametrize("x", [0.0, 1e-30, 0.7, 3.0, 1e30])
def test_the_border_is_found_to_the_last_bit(x):
  more = np.nextafter(
    np.float32(max(x, 1.2e-38)), np.float32(np.inf)
  )  # above 0: the least float that is not a denormal
  assert highest(jnp.asarray([x, more, x]), jnp.ones(3, bool), 0.2).tolist() == [False, True, False]


@pytest.mark.parametrize(
  ("count", "expected"), [(5, 1), (10, 2), (15, 3), (16, 4), (35, 7), (1000, 200), (1001, 201)]
)
def test_20_percent_is_rounded_up_and_not_by_rounding_errors(count, expected):
  assert int(highest(jnp.arange(1.0, count + 1), jnp.ones(count, bool), 0.2).sum()) == expected


def test_what_is_masked_is_never_among_the_highest():
  x = jnp.asarray([[9.0, 1.0, jnp.nan, 2.0, jnp.inf]])
  mask = jnp.asarray([[False, True, False, True, False]])
  assert highest(x, mask, 0.5).tolist() == [[False, False, False, True, False]]
  assert not highest(x, jnp.zeros_like(mask), 0.5).any()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_bisection_finds_what_a_sort_finds(share):
  rng = np.random.default_rng(int(share * 100))
  for scale in (1e-30, 1e-6, 1.0, 1e30):
    x = (scale * rng.gamma(0.5, 1.0, (4, 3, 7))).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0.0
    mask = rng.random(x.shape) < 0.8
    border = np.sort(x[mask])[::-1][int(np.ceil(share * mask.sum() - 1e-9)) - 1]
    np.testing.assert_array_equal(
      highest(jnp.asarray(x), jnp.asarray(mask), share), mask & (x >= border)
    )


def test_at_least_one_is_kept_however_small_the_share():
  assert highest(jnp.asarray([1.0, 2.0]), jnp.ones(2, bool), 1e-5).tolist() == [False, True]
