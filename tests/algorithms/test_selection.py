"""Selections of groups and tokens: contrast, top shares, covariance terms and quantiles."""

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


def test_contrast_ignores_completions_that_are_not_alive():
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
    ([1.0, 5.0, 2.0, 4.0, 3.0, 0.0], 0.2, [5.0, 4.0]),  # 20 % of 6 is 1.2, rounded up to 2
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
  # The next float above x. For 0, a number just above the denormals, which XLA may round to 0.
  more = np.nextafter(np.float32(max(x, 1.2e-38)), np.float32(np.inf))
  selected = top_share(jnp.asarray([x, more, x]), jnp.ones(3, bool), 0.2)
  assert selected.tolist() == [False, True, False]


@pytest.mark.parametrize(
  ("count", "expected"), [(5, 1), (10, 2), (15, 3), (16, 4), (35, 7), (1000, 200), (1001, 201)]
)
def test_rounding_up_20_percent_tolerates_floating_point_errors(count, expected):
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


def test_negative_values_are_ordered_too():
  x = jnp.asarray([-3.0, -1.0, -2.0, 0.5, -1e30, -1e-30])
  assert top_share(x, jnp.ones(6, bool), 0.5).tolist() == [False, True, False, True, False, True]


COVARIANCE = {
  "advantages": jnp.asarray([[[1.0, 1.0, 1.0], [-1.0, -1.0, 9.0]]]),
  "log_probs": jnp.asarray([[[-0.5, -2.5, -1.5], [-0.5, -2.5, 9.0]]]),
  "mask": jnp.asarray([[[True, True, True], [True, True, False]]]),
}


def test_covariance_terms_by_hand():
  """With mean A = 0.2 and mean log pi = -1.5, the first term is (1 - 0.2) * (-0.5 + 1.5)."""
  got = selection.token_covariance(**COVARIANCE)
  np.testing.assert_allclose(got, [[[0.8, -0.8, 0], [-1.2, 1.2, 0]]], atol=1e-6)


@pytest.mark.parametrize(
  ("share", "selected"),
  [
    (0.2, [[[False, False, False], [False, True, False]]]),  # the largest term, 1.2
    (0.39, [[[False, False, False], [False, True, False]]]),  # 39 % of 5 is 1.95, rounded down to 1
    (0.4, [[[True, False, False], [False, True, False]]]),
    (1e-6, [[[False, False, False], [False, True, False]]]),  # at least one
  ],
)
def test_the_highest_covariance_by_hand(share, selected):
  got = selection.highest_covariance(**COVARIANCE, share=share, key=jax.random.key(0))
  assert got.tolist() == selected


def test_ties_of_the_highest_covariance_are_broken_at_random():
  """Many tokens tie because their log-prob is 0, but exactly the requested share is selected."""
  log_probs = jnp.zeros((2, 4, 50)).at[0, 0].set(-5.0)
  advantages = jnp.ones(log_probs.shape).at[1].set(-1.0)
  mask = jnp.ones(log_probs.shape, bool)
  select = lambda key: selection.highest_covariance(advantages, log_probs, mask, 0.05, key)
  first, second = map(select, jax.random.split(jax.random.key(0)))
  assert first.sum() == second.sum() == 20 and (first != second).any()
  assert not first[1].any() and not first[0, 0].any()


def test_no_token_is_selected_if_all_advantages_are_equal():
  log_probs = jnp.linspace(-3.0, 0.0, 6).reshape(1, 2, 3)
  mask = jnp.ones(log_probs.shape, bool)
  key = jax.random.key(0)
  assert not selection.highest_covariance(jnp.ones(mask.shape), log_probs, mask, 0.5, key).any()


def test_the_covariance_band_selects_random_candidates():
  """Two tokens lie between the bounds; each key selects one of them, and not always the same."""
  free = COVARIANCE["mask"]
  select = jax.jit(
    lambda key, share=0.2: selection.covariance_band(
      **COVARIANCE, free=free, band=(0.5, 5.0), share=share, key=key
    )
  )
  counts = sum(np.asarray(select(key), int) for key in jax.random.split(jax.random.key(0), 64))
  assert counts[0, 0, 0] + counts[0, 1, 1] == 64 and min(counts[0, 0, 0], counts[0, 1, 1]) > 16
  assert select(jax.random.key(1), 0.9).sum() == 2  # fewer than requested: all
  assert (select(jax.random.key(1)) == select(jax.random.key(1))).all()


def test_the_covariance_band_excludes_its_bounds_and_clipped_tokens():
  free = COVARIANCE["mask"].at[0, 1, 1].set(False)
  select = lambda *band: selection.covariance_band(
    **COVARIANCE, free=free, band=band, share=1.0, key=jax.random.key(0)
  )
  assert select(0.1, 5.0).tolist() == [[[True, False, False], [False, False, False]]]
  assert not select(1.0, 5.0).any()
  term = float(selection.token_covariance(**COVARIANCE)[0, 0, 0])
  assert not select(term, 5.0).any() and not select(0.1, term).any()


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99, 1.0])
def test_quantiles_equal_those_of_numpy(share):
  rng = np.random.default_rng(3)
  x = rng.normal(size=(3, 4, 5)).astype(np.float32)
  mask = rng.random(x.shape) < 0.7
  got = selection.quantile(jnp.asarray(x), jnp.asarray(mask), share)
  assert float(got) == np.quantile(x[mask], share, method="inverted_cdf")


def test_the_quantile_of_nothing_is_0():
  assert selection.quantile(jnp.full(3, jnp.nan), jnp.zeros(3, bool), 0.5) == 0
