"""Estimators of pass@k, best@k and maj@k from n >= k completions of each problem.

Each is the mean over all subsets of k completions, which makes it unbiased. This file uses only
NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

BOOTSTRAP_DRAWS = 1000


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Returns the probability that at least one of k completions is correct.

  The k completions are drawn without replacement from n, of which `correct` are correct. The
  result is 1 - C(n - correct, k) / C(n, k). Source: Chen et al. 2021 (2107.03374), eq. 1.

  Raises:
    ValueError: k is not in [1, n].
  """
  _check(n, k)
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_of_k(rewards: np.ndarray, k: int) -> float:
  """Returns the mean of the maximum reward over all subsets of k of the rewards f[n].

  With the rewards in ascending order, reward i (from 0) is the maximum in C(i, k-1) of the C(n, k)
  subsets. If all rewards are 0 or 1, the result is pass@k.

  Raises:
    ValueError: k is not in [1, n].
  """
  _check(len(rewards), k)
  return float(np.sort(rewards) @ _maximum_weights(len(rewards), k))


def majority_at_each_k(votes: Sequence[Hashable | None], correct: np.ndarray) -> np.ndarray:
  """Returns maj@k for each k: the probability that the most frequent of k answers is correct.

  The mean is over all subsets of k completions. A completion with answer None does not vote; if
  none of the k votes, the result is wrong. Each of t answers that tie counts 1 / t. If completions
  with the same answer have different verdicts, the value of the answer is the mean of the verdicts.

  Args:
    votes: the answers of n completions, or None.
    correct: bool[n], the verdicts on the completions.

  Returns:
    f64[n], for k = 1 .. n.
  """
  voters: dict[Hashable, list[int]] = {}
  for i, vote in enumerate(votes):
    if vote is not None:
      voters.setdefault(vote, []).append(i)
  value = {vote: float(np.mean(correct[ids])) for vote, ids in voters.items()}
  total = np.zeros(len(votes))
  for vote in (vote for vote in voters if value[vote]):
    other_counts = sorted(len(ids) for other, ids in voters.items() if other != vote)
    wins = _win_probabilities(len(votes), len(voters[vote]), tuple(other_counts))
    total += value[vote] * wins
  return total


def bootstrap(columns: np.ndarray, level: float = 0.95, seed: int = 0) -> np.ndarray:
  """Returns percentile bootstrap intervals of the means of `columns` f64[p, c] over p problems.

  Each draw takes p problems with replacement; all columns use the same draws. NaN is ignored.

  Returns:
    f64[2, c], the lower and upper ends; NaN for a column that is all NaN.
  """
  p = len(columns)
  rng = np.random.default_rng(seed)
  draws = rng.multinomial(p, np.full(p, 1 / p), size=BOOTSTRAP_DRAWS)
  draws = draws.astype(np.float64)  # f64[draws, p], how often each problem is drawn
  is_number = ~np.isnan(columns)
  sums = draws @ np.where(is_number, columns, 0.0)
  counts = draws @ is_number
  means = np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
  intervals = np.full((2, columns.shape[1]), np.nan)
  has_numbers = is_number.any(0)
  percentiles = [50 * (1 - level), 50 * (1 + level)]
  intervals[:, has_numbers] = np.nanpercentile(means[:, has_numbers], percentiles, axis=0)
  return intervals


def _check(n: int, k: int) -> None:
  if not 1 <= k <= n:
    raise ValueError(f"a subset of k needs 1 <= k <= n samples, got k = {k} and n = {n}")


@functools.lru_cache(maxsize=256)
def _maximum_weights(n: int, k: int) -> np.ndarray:
  """Returns C(i, k-1) / C(n, k) for i = 0 .. n-1, f64[n].

  The weights are computed by ratios, downwards from the last, which is k / n. This never overflows.
  """
  i = np.arange(n - 1, 0, -1)
  return np.cumprod(np.append(k / n, np.maximum(i - k + 1, 0) / i))[::-1]


@functools.lru_cache(maxsize=4096)
def _win_probabilities(n: int, own: int, others: tuple[int, ...]) -> np.ndarray:
  """Returns the probability that an answer wins the vote in subsets of k = 1 .. n, f64[n].

  The answer has `own` of n votes; the other answers have the counts `others`. Suppose that it has m
  votes in a subset. It wins only if no other answer has more, and if t others have m votes too, the
  win counts 1 / (1 + t), which is the integral of y^t over [0, 1]. The subsets are counted by a
  product of polynomials in x, where the power of x is the size of the subset. Another answer with c
  votes contributes the factor sum_{i<m} C(c, i) x^i + y C(c, m) x^m, and the integral over y is
  computed exactly by Gauss quadrature. All terms are non-negative, so there is no cancellation.
  """
  won = np.zeros(n + 1, np.longdouble)
  abstentions = n - own - sum(others)
  for m in range(1, own + 1):
    ties = sum(c >= m for c in others)
    nodes, weights = np.polynomial.legendre.leggauss(ties // 2 + 1)
    y = (nodes + 1) / 2
    product = np.zeros((len(y), n + 1), np.longdouble)
    product[:, m] = weights / 2 * _comb(own, m)
    for c in others:
      factor = [np.full(len(y), _comb(c, i)) for i in range(min(m, c + 1))]
      if m <= c:
        factor.append(y * _comb(c, m))
      product = _multiply(product, factor)
    factor = [np.full(len(y), _comb(abstentions, i)) for i in range(abstentions + 1)]
    won += _multiply(product, factor).sum(0)
  return np.asarray([won[k] / _comb(n, k) for k in range(1, n + 1)], np.float64)


def _multiply(product: np.ndarray, factor: Sequence[np.ndarray]) -> np.ndarray:
  """Multiplies polynomials of degree n, given as coefficients [y, n + 1], by a factor.

  The factor is a list of coefficients [y], one for each power. Powers above n are dropped; they do
  not occur.
  """
  out = np.zeros_like(product)
  for i, coefficient in enumerate(factor):
    out[:, i:] += product[:, : product.shape[1] - i] * coefficient[:, None]
  return out


def _comb(n: int, k: int) -> np.longdouble:
  # On platforms where long double is wider than double, its range suffices up to n = 16,000.
  return np.longdouble(math.comb(n, k))
