"""Estimators against a direct count over every subset, by hand, and by laws."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.evaluation.estimators import best_of_k, bootstrap, majority_at, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_against_every_draw(n):
  for right, k in itertools.product(range(n + 1), range(1, n + 1)):
    completions = [True] * right + [False] * (n - right)
    draws = [any(draw) for draw in itertools.combinations(completions, k)]
    assert pass_at_k(n, right, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_by_hand():
  assert pass_at_k(4, 0, 4) == 0
  assert pass_at_k(4, 1, 4) == 1
  assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
  assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)


def test_pass_at_k_of_many_samples_stays_exact():
  assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-12)
  assert 0 < pass_at_k(5000, 1, 1) < pass_at_k(5000, 2, 1) < 1


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 5), (4, -1), (0, 1)])
def test_a_k_out_of_bounds_is_refused(n, k):
  with pytest.raises(ValueError, match=f"got k = {k} and n = {n}"):
    pass_at_k(n, 0, k)
  with pytest.raises(ValueError, match=f"got k = {k} and n = {n}"):
    best_of_k(np.zeros(n), k)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_best_of_k_against_every_draw(rewards):
  for k in range(1, len(rewards) + 1):
    direct = np.mean([max(draw) for draw in itertools.combinations(rewards, k)])
    assert best_of_k(np.array(rewards), k) == pytest.approx(direct, abs=1e-9)


def test_best_of_k_by_hand_and_of_rewards_0_and_1_pass_at_k():
  assert best_of_k(np.array([3.0, -1.0, 1.0]), 2) == pytest.approx((3 + 3 + 1) / 3)
  for n, right, k in ((7, 2, 3), (32, 5, 8), (3000, 7, 1500)):
    assert best_of_k(np.arange(n) < right, k) == pytest.approx(pass_at_k(n, right, k), abs=1e-12)


def majority_by_counting(votes, right, k):
  """Every subset counted by hand."""
  values = []
  for subset in itertools.combinations(range(len(votes)), k):
    cast = [votes[i] for i in subset if votes[i] is not None]
    most = max(map(cast.count, cast), default=0)
    winners = {vote for vote in cast if cast.count(vote) == most}
    values.append(
      np.mean(
        [np.mean([right[i] for i in range(len(votes)) if votes[i] == vote]) for vote in winners]
      )
      if winners
      else 0.0
    )
  return np.mean(values)


@settings(deadline=None)
@given(
  st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=9
  ),
  st.booleans(),
)
def test_the_majority_against_every_draw(completions, consistent):
  """Where an answer is always judged alike, and where it is not."""
  votes = [vote for vote, _ in completions]
  right = np.array([vote == "a" if consistent else verdict for vote, verdict in completions])
  found = majority_at(votes, right)
  assert found.shape == (len(votes),)
  for k in range(1, len(votes) + 1):
    assert found[k - 1] == pytest.approx(majority_by_counting(votes, right, k), abs=1e-12)


def test_the_majority_by_hand():
  right = np.array([True, True, False, False])
  np.testing.assert_allclose(
    majority_at(["1", "1", "2", "3"], right), [1 / 2, (1 + 4 / 2) / 6, (2 + 2 / 3) / 4, 1]
  )
  np.testing.assert_allclose(majority_at([None, None], np.array([False, False])), [0, 0])
  np.testing.assert_allclose(
    majority_at(["1", None], np.array([True, False])), [1 / 2, 1]
  )  # an abstention is no vote against


def test_the_majority_of_many_samples():
  """600 : 400 of 1000; k = 1 is the share, and the whole vote is won. Halves tie at every k."""
  found = majority_at([0] * 600 + [1] * 400, np.arange(1000) < 600)
  assert (
    found[0] == pytest.approx(0.6)
    and found[-1] == 1
    and (np.diff(found[::2]) > -1e-9).all()
    and not np.isnan(found).any()
  )
  np.testing.assert_allclose(majority_at([0] * 40 + [1] * 40, np.arange(80) < 40), 0.5)


def test_the_bootstrap_against_draws_one_by_one():
  """The same draws as counts: multinomial counts of problems, and percentiles of the means."""
  rng = np.random.default_rng(5)
  columns = rng.random((13, 3))
  columns[2, 1] = columns[7, 1] = np.nan
  times = np.random.default_rng(0).multinomial(13, [1 / 13] * 13, size=1000)
  slow = [[np.nanmean(np.repeat(columns[:, c], row)) for c in range(3)] for row in times]
  np.testing.assert_allclose(
    bootstrap(columns), np.percentile(slow, [2.5, 97.5], axis=0), rtol=1e-12
  )


def test_the_bootstrap_covers():
  """Of 200 samples of 60 coin tosses at 0.3, about 95 % of the intervals hold 0.3 (percentile intervals are a little narrow)."""
  rng = np.random.default_rng(1)
  lower, upper = bootstrap((rng.random((60, 200)) < 0.3).astype(float))
  held = ((lower <= 0.3) & (upper >= 0.3)).mean()
  assert 0.87 <= held <= 0.99
  assert (upper - lower).mean() == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 60), rel=0.1)


def test_the_bootstrap_of_little():
  np.testing.assert_array_equal(
    bootstrap(np.array([[0.25, np.nan]])), [[0.25, np.nan], [0.25, np.nan]]
  )
  np.testing.assert_array_equal(bootstrap(np.ones((9, 1))), [[1], [1]])
  assert np.isfinite(bootstrap(np.array([[1.0], [np.nan], [np.nan]]))).all()
