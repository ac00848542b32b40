import numpy as np
import pytest

from gtpo_jax.rewards.length import soft_overlong


def test_the_penalty_by_hand():
  lengths = np.array([[0, 1, 12], [16, 17, 18], [19, 20, 21]])
  penalty = soft_overlong(lengths, longest=20, buffer=4)
  np.testing.assert_array_equal(penalty, np.array([[0, 0, 0], [0, -0.25, -0.5], [-0.75, -1, -1]], np.float32))
  assert penalty.dtype == np.float32 and penalty.shape == (3, 3)


def test_no_buffer_is_no_penalty():
  penalty = soft_overlong(np.array([1, 20, 10**6]), longest=20, buffer=0)
  np.testing.assert_array_equal(penalty, np.zeros(3, np.float32))
  assert penalty.dtype == np.float32


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(("longest", "buffer"), [(20480, 4096), (40, 39), (7, 3), (2, 1)])
def test_against_the_three_cases_of_the_definition(longest, buffer, kind):
  lengths = np.arange(0, longest + 5, max(longest // 100, 1))
  slow = [0.0 if n <= longest - buffer else ((longest - buffer) - n) / buffer if n <= longest else -1.0 for n in lengths.tolist()]
  np.testing.assert_allclose(soft_overlong(lengths.astype(kind), longest, buffer), slow, rtol=1e-6)


def test_the_penalty_never_rises_with_length():
  penalty = soft_overlong(np.arange(100), longest=60, buffer=17)
  assert (np.diff(penalty) <= 0).all() and penalty[0] == 0 and penalty[-1] == -1
