"""Length penalties."""

from fractions import Fraction

import numpy as np
import pytest

from gtpo_jax.rewards.length import group_relative, soft_overlong


def test_the_penalty_by_hand():
  lengths = np.array([[0, 1, 12], [16, 17, 18], [19, 20, 21]])
  penalty = soft_overlong(lengths, max_length=20, buffer=4)
  np.testing.assert_array_equal(
    penalty, np.array([[0, 0, 0], [0, -0.25, -0.5], [-0.75, -1, -1]], np.float32)
  )
  assert penalty.dtype == np.float32 and penalty.shape == (3, 3)


def test_no_buffer_is_no_penalty():
  penalty = soft_overlong(np.array([1, 20, 10**6]), max_length=20, buffer=0)
  np.testing.assert_array_equal(penalty, np.zeros(3, np.float32))
  assert penalty.dtype == np.float32


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(("max_length", "buffer"), [(20480, 4096), (40, 39), (7, 3), (2, 1)])
def test_against_the_three_cases_of_the_definition(max_length, buffer, kind):
  def slow(length):
    if length <= max_length - buffer:
      return 0.0
    return ((max_length - buffer) - length) / buffer if length <= max_length else -1.0

  lengths = np.arange(0, max_length + 5, max(max_length // 100, 1))
  penalty = soft_overlong(lengths.astype(kind), max_length, buffer)
  np.testing.assert_allclose(penalty, list(map(slow, lengths.tolist())), rtol=1e-6)


# --- relative to the group ---


def slow_group_relative(lengths, correct, valid, gamma):
  """Computes appendix D completion by completion, in exact fractions."""
  gamma = Fraction(str(gamma))
  out = np.zeros(lengths.shape)
  for i in range(len(lengths)):
    members = [j for j in range(lengths.shape[1]) if valid[i, j]]
    right = [j for j in members if correct[i, j]]
    wrong = [j for j in members if not correct[i, j]]
    if not right or Fraction(len(right), len(members)) <= 1 - gamma:
      continue
    easy = Fraction(len(right), len(members)) >= gamma
    compared = [int(lengths[i, j]) for j in (right if easy else members)]
    middle = Fraction(min(compared) + max(compared), 2)
    threshold = max(middle, Fraction(sum(compared), len(compared)))
    for j in right if easy or len(right) > len(wrong) else wrong:
      if lengths[i, j] >= 2 * threshold:
        out[i, j] = -0.5
      elif lengths[i, j] >= threshold:
        out[i, j] = -Fraction(1, 2) * (int(lengths[i, j]) - threshold) / threshold
  return out


def relative(lengths, correct, valid=None, gamma=0.75):
  lengths = np.asarray([lengths])
  correct = np.asarray([correct], bool)
  valid = np.ones_like(correct) if valid is None else np.asarray([valid], bool)
  return group_relative(lengths, correct, valid, gamma)[0]


@pytest.mark.parametrize(
  ("lengths", "correct", "expected"),
  [
    # Easy, 3 of 4: L of the correct is max((10 + 30) / 2, 20) = 20; the wrong one has no penalty.
    ([10, 20, 30, 100], [1, 1, 1, 0], [0, 0, -0.25, 0]),
    # All correct: L = max((2 + 12) / 2, 4) = 7.
    ([2, 2, 2, 2, 12], [1, 1, 1, 1, 1], [0, 0, 0, 0, -5 / 14]),
    # All correct: the mean is larger, L = max((1 + 9) / 2, 7) = 7.
    ([1, 9, 9, 9], [1, 1, 1, 1], [0, -1 / 7, -1 / 7, -1 / 7]),
    # Hard, 1 of 4 and 0 of 4: no penalty.
    ([10, 20, 30, 100], [1, 0, 0, 0], [0, 0, 0, 0]),
    ([10, 20, 30, 100], [0, 0, 0, 0], [0, 0, 0, 0]),
    # Between: 3 correct, 2 wrong. The correct are penalised. L of all is max((10 + 50) / 2, 30).
    ([10, 50, 40, 30, 20], [1, 1, 1, 0, 0], [0, -1 / 3, -1 / 6, 0, 0]),
    ([10, 20, 30, 40, 50], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]),
    # Between: 2 correct, 3 wrong. The wrong are penalised.
    ([10, 50, 40, 30, 20], [0, 0, 0, 1, 1], [0, -1 / 3, -1 / 6, 0, 0]),
    ([10, 20, 30, 40, 50], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
    # A tie: the wrong are penalised. L = max((10 + 40) / 2, 25) = 25.
    ([10, 40, 30, 20], [1, 1, 0, 0], [0, 0, -0.1, 0]),
    ([10, 40, 30, 20], [0, 0, 1, 1], [0, -0.3, 0, 0]),
    # Equal lengths: no completion is long.
    ([7, 7, 7, 7], [1, 1, 1, 1], [0, 0, 0, 0]),
    ([5], [1], [0]),
  ],
)
def test_group_relative_by_hand(lengths, correct, expected):
  penalty = relative(lengths, correct)
  np.testing.assert_allclose(penalty, expected, rtol=1e-6)
  assert penalty.dtype == np.float32


def test_completions_that_are_not_valid_are_ignored():
  rng = np.random.default_rng(3)
  for _ in range(20):
    lengths = rng.integers(1, 50, 6)
    correct = rng.random(6) < 0.5
    valid = rng.permutation([True, True, True, True, False, False])
    penalty = relative(lengths, correct, valid)
    np.testing.assert_array_equal(penalty[valid], relative(lengths[valid], correct[valid]))
    assert not penalty[~valid].any()
  assert relative([3, 9], [1, 1], [0, 0]).tolist() == [0, 0]


@pytest.mark.parametrize("gamma", [0.51, 0.6, 0.75, 0.875, 1.0])
def test_group_relative_against_the_slow_loop(gamma):
  rng = np.random.default_rng(int(gamma * 1000))
  for g in (1, 2, 4, 7, 8, 16):
    lengths = np.ceil(rng.gamma(1.0, 40.0, (60, g))).astype(np.int32)
    correct = rng.random((60, g)) < rng.random((60, 1))
    valid = rng.random((60, g)) < 0.9
    got = group_relative(lengths, correct, valid, gamma)
    expected = slow_group_relative(lengths, correct, valid, gamma)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
    assert (got > -0.5).all()  # L is more than half the longest, so 2 L is never reached
    assert g < 4 or (got < -0.05).any()


@pytest.mark.parametrize(
  ("gamma", "right", "g"), [(0.9, 1, 10), (0.9, 2, 20), (0.8, 1, 5), (0.8, 2, 10)]
)
def test_a_group_on_the_border_is_hard(gamma, right, g):
  lengths = np.arange(1, g + 1)  # c / G = 1 - gamma
  correct = np.arange(g) < right
  assert relative(lengths, correct, gamma=gamma).tolist() == [0] * g
