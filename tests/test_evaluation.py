import itertools

import numpy as np
import pytest

from gtpo_jax.evaluation import Evaluation, pass_at_k


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


EVALUATION = Evaluation("sums", np.array([[True, False, False], [True, True, True], [False, False, False]]), np.array([True, True, False]))


def test_an_evaluation_by_hand():
  assert EVALUATION.mean == pytest.approx(4 / 9)
  assert EVALUATION.pass_at(1) == pytest.approx(4 / 9)
  assert EVALUATION.pass_at(2) == pytest.approx((2 / 3 + 1 + 0) / 3)
  assert EVALUATION.pass_at(3) == pytest.approx(2 / 3)


def test_metrics_carry_the_name_and_the_ks():
  third = pytest.approx
  assert EVALUATION.metrics() == {"eval/sums/mean@3": third(4 / 9), "eval/sums/greedy": third(2 / 3), "eval/sums/pass@1": third(4 / 9),
                                  "eval/sums/pass@3": third(2 / 3)}
  assert set(EVALUATION.metrics([2])) == {"eval/sums/mean@3", "eval/sums/greedy", "eval/sums/pass@2"}
  assert all(type(value) is float for value in EVALUATION.metrics().values())


def test_more_samples_than_were_drawn_are_refused():
  with pytest.raises(ValueError, match="got k = 4 and n = 3"):
    EVALUATION.metrics([1, 4])
