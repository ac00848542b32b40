import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import selection

top_share = jax.jit(selection.top_share, static_argnums=2)
GROUPS = {
  "mixed": [1, 0, 0, 0],
  "all correct": [1, 1, 1, 1],
  "all incorrect": [0, 0, 0, 0],
  "only the guide is correct": [0, 0, 0, 1],
  "only the guide is incorrect": [1, 1, 1, 0],
}
CORRECT = np.asarray(list(GROUPS.values()), bool)
ALL_ALIVE = np.ones_like(CORRECT)
GUIDED = np.zeros_like(CORRECT)
GUIDED[:, 3] = True


def names_of(flags):
  return {name for name, flag in zip(GROUPS, np.asarray(flags), strict=True) if flag}


@pytest.mark.parametrize("module", [np, jnp])
def test_groups_with_contrast(module):
  contrast = lambda *x: names_of(selection.has_contrast(*map(module.asarray, x)))
  without_guide = {"mixed", "only the guide is correct", "only the guide is incorrect"}
  assert contrast(CORRECT, ALL_ALIVE) == without_guide
  assert contrast(CORRECT, ALL_ALIVE, np.zeros_like(GUIDED)) == without_guide
  assert contrast(CORRECT, ALL_ALIVE, GUIDED) == {"mixed", "only the guide is correct"}


def test_completions_that_do_not_count_make_no_contrast():
  contrast = lambda *x: names_of(selection.has_contrast(*x))
  alive = ALL_ALIVE.copy()
  alive[:, 0] = False
  assert contrast(CORRECT, alive) == {"only the guide is correct", "only the guide is incorrect"}
  assert contrast(CORRECT, ~ALL_ALIVE) == set()
  alive[:, 3] = False
  assert contrast(CORRECT, alive, GUIDED) == set()


@pytest.mark.parametrize("module", [np, jnp])
def test_groups_that_the_policy_never_solves(module):
  all_wrong = lambda *x: names_of(selection.all_wrong(*map(module.asarray, x)))
  never_solved = {"all incorrect", "only the guide is correct"}
  assert all_wrong(CORRECT, ALL_ALIVE, GUIDED) == never_solved
  alive = ALL_ALIVE.copy()
  alive[:, 0] = False  # the mixed group's only success
  assert all_wrong(CORRECT, alive, GUIDED) == never_solved | {"mixed"}


@pytest.mark.parametrize(
  ("x", "share", "selected"),
  [
    ([1.0, 5.0, 2.0, 4.0, 3.0], 0.2, [5.0]),  # 1 of 5
    ([1.0, 5.0, 2.0, 4.0, 3.0, 0.0], 0.2, [5.0, 4.0]),  # 1.2 of 6: 2
    ([1.0, 5.0, 2.0, 4.0, 3.0], 0.6, [5.0, 4.0, 3.0]),
    ([1.0, 5.0, 2.0, 4.0, 3.0], 1.0, [1.0, 5.0, 2.0, 4.0, 3.0]),
    ([4.0, 5.0, 4.0, 4.0, 3.0], 0.4, [4.0, 5.0, 4.0, 4.0]),  # all ties at the threshold
    ([2.0, 2.0, 2.0], 0.2, [2.0, 2.0, 2.0]),
    ([0.0, 0.0, 0.0, 1e-30], 0.5, [0.0, 0.0, 0.0, 1e-30]),  # the second highest is a 0
    ([0.0, -0.0, 1.0], 1.0, [0.0, -0.0, 1.0]),
    ([7.0], 0.2, [7.0]),  # one token
    ([0.0], 0.2, [0.0]),
  ],
)
def test_the_top_share_by_hand(x, share, selected):
  got = top_share(jnp.asarray([x]), jnp.ones((1, len(x)), bool), share)
  assert [value for value, flag in zip(x, got[0].tolist(), strict=True) if flag] == selected


@pytest.mark.parametrize("x", [0.0, 1e-30, 0.7, 3.0, 1e30])
def test_the_threshold_is_exact_to_the_last_bit(x):
  # Above 0 this is the smallest float that is not a denormal.
  more = np.nextafter(np.float32(max(x, 1.2e-38)), np.float32(np.inf))
  selected = top_share(jnp.asarray([x, more, x]), jnp.ones(3, bool), 0.2)
  assert selected.tolist() == [False, True, False]


@pytest.mark.parametrize(
  ("count", "expected"), [(5, 1), (10, 2), (15, 3), (16, 4), (35, 7), (1000, 200), (1001, 201)]
)
def test_20_percent_is_rounded_up_but_not_by_rounding_errors(count, expected):
  assert int(top_share(jnp.arange(1.0, count + 1), jnp.ones(count, bool), 0.2).sum()) == expected


def test_masked_entries_are_never_selected():
  x = jnp.asarray([[9.0, 1.0, jnp.nan, 2.0, jnp.inf]])
  mask = jnp.asarray([[False, True, False, True, False]])
  assert top_share(x, mask, 0.5).tolist() == [[False, False, False, True, False]]
  assert not top_share(x, jnp.zeros_like(mask), 0.5).any()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_bisection_selects_what_a_sort_selects(share):
  rng = np.random.default_rng(int(share * 100))
  for scale in (1e-30, 1e-6, 1.0, 1e30):
    x = (scale * rng.gamma(0.5, 1.0, (4, 3, 7))).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0.0
    mask = rng.random(x.shape) < 0.8
    threshold = np.sort(x[mask])[::-1][int(np.ceil(share * mask.sum() - 1e-9)) - 1]
    selected = top_share(jnp.asarray(x), jnp.asarray(mask), share)
    np.testing.assert_array_equal(selected, mask & (x >= threshold))


def test_at_least_one_is_selected_however_small_the_share():
  assert top_share(jnp.asarray([1.0, 2.0]), jnp.ones(2, bool), 1e-5).tolist() == [False, True]
