"""Estimators against counts over every subset, cases by hand, and laws."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_jax.loop.evaluation.estimators import (
  best_of_k,
  bootstrap,
  majority_at_each_k,
  mixed_share,
  pass_at_k,
)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_against_every_subset(n):
  for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
    completions = [True] * correct + [False] * (n - correct)
    subsets = [any(subset) for subset in itertools.combinations(completions, k)]
    assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand():
  assert pass_at_k(4, 0, 4) == 0
  assert pass_at_k(4, 1, 4) == 1
  assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
  assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)


def test_pass_at_k_of_many_samples_is_exact():
  assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-12)
  assert 0 < pass_at_k(5000, 1, 1) < pass_at_k(5000, 2, 1) < 1


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 5), (4, -1), (0, 1)])
def test_a_k_out_of_bounds_is_rejected(n, k):
  with pytest.raises(ValueError, match=f"got k = {k} and n = {n}"):
    pass_at_k(n, 0, k)
  with pytest.raises(ValueError, match=f"got k = {k} and n = {n}"):
    best_of_k(np.zeros(n), k)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_best_of_k_against_every_subset(rewards):
  for k in range(1, len(rewards) + 1):
    expected = np.mean([max(subset) for subset in itertools.combinations(rewards, k)])
    assert best_of_k(np.array(rewards), k) == pytest.approx(expected, abs=1e-9)


def test_best_of_k_by_hand():
  assert best_of_k(np.array([3.0, -1.0, 1.0]), 2) == pytest.approx((3 + 3 + 1) / 3)


@pytest.mark.parametrize(("n", "correct", "k"), [(7, 2, 3), (32, 5, 8), (3000, 7, 1500)])
def test_best_of_k_of_rewards_0_and_1_is_pass_at_k(n, correct, k):
  expected = pass_at_k(n, correct, k)
  assert best_of_k(np.arange(n) < correct, k) == pytest.approx(expected, abs=1e-12)


def majority_by_counting(votes, correct, k):
  """maj@k from every subset of k."""

  def value(vote):
    return np.mean([correct[i] for i in range(len(votes)) if votes[i] == vote])

  values = []
  for subset in itertools.combinations(votes, k):
    cast = [vote for vote in subset if vote is not None]
    most_votes = max(map(cast.count, cast), default=0)
    winners = {vote for vote in cast if cast.count(vote) == most_votes}
    values.append(np.mean([value(vote) for vote in winners]) if winners else 0.0)
  return np.mean(values)


VOTES = st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans())


@settings(deadline=None)
@given(st.lists(VOTES, min_size=1, max_size=9), st.booleans())
def test_the_majority_against_every_subset(completions, consistent):
  """Equal answers may have equal verdicts or different ones."""
  votes = [vote for vote, _ in completions]
  correct = np.array([vote == "a" if consistent else verdict for vote, verdict in completions])
  majority = majority_at_each_k(votes, correct)
  assert majority.shape == (len(votes),)
  for k in range(1, len(votes) + 1):
    expected = majority_by_counting(votes, correct, k)
    assert majority[k - 1] == pytest.approx(expected, abs=1e-12)


def test_the_majority_by_hand():
  correct = np.array([True, True, False, False])
  majority = majority_at_each_k(["1", "1", "2", "3"], correct)
  np.testing.assert_allclose(majority, [1 / 2, (1 + 4 / 2) / 6, (2 + 2 / 3) / 4, 1])
  majority = majority_at_each_k([None, None], np.array([False, False]))
  np.testing.assert_allclose(majority, [0, 0])
  # An abstention is not a vote against.
  majority = majority_at_each_k(["1", None], np.array([True, False]))
  np.testing.assert_allclose(majority, [1 / 2, 1])


def test_the_majority_of_many_samples():
  """With 180 votes of 300, maj@k grows from 0.6 to 1. With an even split it is always 0.5."""
  majority = majority_at_each_k([0] * 180 + [1] * 120, np.arange(300) < 180)
  assert not np.isnan(majority).any()
  assert majority[0] == pytest.approx(0.6)
  assert majority[-1] == 1
  assert (np.diff(majority[::2]) > -1e-9).all()
  majority = majority_at_each_k([0] * 40 + [1] * 40, np.arange(80) < 40)
  np.testing.assert_allclose(majority, 0.5)


def test_the_bootstrap_against_draws_one_by_one():
  """The slow version repeats the values as often as the same multinomial draws say."""
  rng = np.random.default_rng(5)
  columns = rng.random((13, 3))
  columns[2, 1] = columns[7, 1] = np.nan
  draws = np.random.default_rng(0).multinomial(13, [1 / 13] * 13, size=1000)
  means = [[np.nanmean(np.repeat(columns[:, c], counts)) for c in range(3)] for counts in draws]
  expected = np.percentile(means, [2.5, 97.5], axis=0)
  np.testing.assert_allclose(bootstrap(columns), expected, rtol=1e-12)


def test_the_coverage_of_the_bootstrap():
  """About 95 % of 200 intervals, each from 60 draws with probability 0.3, contain 0.3.

  Percentile intervals are slightly too narrow.
  """
  rng = np.random.default_rng(1)
  lower, upper = bootstrap((rng.random((60, 200)) < 0.3).astype(float))
  coverage = ((lower <= 0.3) & (upper >= 0.3)).mean()
  assert 0.87 <= coverage <= 0.99
  normal_width = 2 * 1.96 * np.sqrt(0.3 * 0.7 / 60)
  assert (upper - lower).mean() == pytest.approx(normal_width, rel=0.1)


def test_the_bootstrap_of_few_numbers():
  one_problem = bootstrap(np.array([[0.25, np.nan]]))
  np.testing.assert_array_equal(one_problem, [[0.25, np.nan], [0.25, np.nan]])
  np.testing.assert_array_equal(bootstrap(np.ones((9, 1))), [[1], [1]])
  assert np.isfinite(bootstrap(np.array([[1.0], [np.nan], [np.nan]]))).all()


# --- the share of mixed groups ---


def share(correct, samples, group):
  return mixed_share(np.array(correct), np.array(samples), group)


def test_mixed_groups_against_every_subset():
  """With enough samples, problems do not influence each other."""
  for n, group in itertools.product(range(2, 8), range(2, 8)):
    if n < group:
      continue
    shares = []
    for k in range(n + 1):
      completions = [True] * k + [False] * (n - k)
      subsets = [0 < sum(x) < group for x in itertools.combinations(completions, group)]
      shares.append(sum(subsets) / len(subsets))
      assert share([k], [n], group) == pytest.approx(shares[-1], abs=1e-12)
    assert share(range(n + 1), [n] * (n + 1), group) == pytest.approx(np.mean(shares), abs=1e-12)


def test_mixed_groups_by_hand():
  assert share([1, 0, 2], [2, 2, 2], 2) == pytest.approx(1 / 3)
  assert share([1, 0], [2, 0], 2) == 1  # a problem without a verdict is left out
  # The mean of p is 1/2, the estimate of its variance 1/24: Beta(5/2, 5/2). After no correct sample
  # of two it is Beta(5/2, 9/2), after one Beta(7/2, 7/2).
  of_none = 1 - (2.5 * 3.5 * 4.5 + 4.5 * 5.5 * 6.5) / (7 * 8 * 9)
  of_one = 1 - 2 * (3.5 * 4.5 * 5.5) / (7 * 8 * 9)
  assert share([0, 1, 1, 2], [2] * 4, 3) == pytest.approx((of_none + of_one) / 2, abs=1e-12)
  assert share([0, 1, 1, 2], [2] * 4, 3) == pytest.approx(0.6294643, abs=1e-7)
  # All problems are the same, as far as the samples say.
  assert share([1, 1, 1, 1], [2] * 4, 4) == pytest.approx(1 - 2 * 0.5**4, abs=1e-6)
  # No problem is solved sometimes.
  assert share([0, 2, 0, 2], [2] * 4, 8) == 0
  assert share([0, 0, 0], [2] * 3, 8) == share([2, 2, 2], [2] * 3, 8) == 0


def test_mixed_groups_that_cannot_be_estimated():
  for correct, samples in (
    ([], []),
    ([0], [0]),
    ([1], [2]),
    ([1, 0, 1], [1] * 3),
    ([1, 1], [2, 1]),
  ):
    assert np.isnan(share(correct, samples, 4)), (correct, samples)
  assert 0 < share([1, 0, 1], [1, 2, 2], 4) < 1  # a single sample counts if others are repeated


@given(st.integers(2, 9), st.integers(2, 9), st.floats(0, 1))
def test_mixed_groups_are_estimated_without_bias_from_enough_samples(group, more, p):
  n = group + more - 2
  k = np.arange(n + 1)
  probabilities = [math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in k]
  estimates = [share([i], [n], group) for i in k]
  assert np.dot(probabilities, estimates) == pytest.approx(
    1 - p**group - (1 - p) ** group, abs=1e-9
  )


@pytest.mark.parametrize(("a", "b"), [(0.3, 1.0), (0.2, 0.2), (2.0, 20.0), (5.0, 1.0)])
def test_mixed_groups_of_problems_with_a_beta_distribution(a, b):
  """The estimate is right where the observed fractions give much too little."""
  rng = np.random.default_rng(0)
  n = 4
  group = 16
  problems = 20_000  # the standard error of the estimate is then about 0.005
  p = rng.beta(a, b, problems)
  expected = np.mean(1 - p**group - (1 - p) ** group)
  correct = rng.binomial(n, p)
  fractions = correct / n
  assert share(correct, [n] * problems, group) == pytest.approx(expected, abs=0.02)
  assert np.mean(1 - fractions**group - (1 - fractions) ** group) < 0.75 * expected


@given(
  st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
  st.integers(2, 20),
)
def test_mixed_groups_are_a_share_and_symmetric(problems, group):
  right = [k for k, _ in problems]
  wrong = [k for _, k in problems]
  samples = [k + m for k, m in problems]
  estimate = share(right, samples, group)
  assert np.isnan(estimate) or -1e-12 <= estimate <= 1 + 1e-12
  np.testing.assert_allclose(share(wrong, samples, group), estimate, atol=1e-7)
