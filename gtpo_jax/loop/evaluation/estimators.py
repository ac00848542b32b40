"""Estimators of pass@k, best@k and maj@k from n >= k completions of each problem.

Each is the mean over all subsets of k completions, which makes it unbiased. The share of groups
with contrast is estimated from fewer completions too. This file uses only NumPy and SciPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.special import betaincinv

BOOTSTRAP_DRAWS = 1000
LARGEST_CONCENTRATION = 1e9  # a + b of a beta distribution in which all problems are the same


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


def mixed_share(correct: np.ndarray, samples: np.ndarray, group: int) -> float:
  """Estimates the expected share of groups with both correct and wrong completions.

  A group has `group` completions of one problem. If each is correct with probability p, the group
  is mixed with probability 1 - p^group - (1 - p)^group. The estimate is the mean over the problems.

  For a problem with at least `group` samples, it is the share of mixed subsets of that size, which
  is unbiased. With fewer samples there is no unbiased estimator in general: the probability is a
  polynomial in p whose degree exceeds their number. Putting the observed fraction in place of p is
  far too low: no sample of a hard problem may be correct although some of a group would be. So p is
  taken to have a beta distribution over the problems, Beta(a, b), fitted to unbiased estimates of
  its first two moments. The estimate is the expectation under the problem's posterior, which is
  Beta(a + correct, b + wrong).

  Args:
    correct: i[p], the number of correct samples of each problem.
    samples: i[p], the number of its samples; problems without any are left out.
    group: completions per group.

  Returns:
    A number in [0, 1]. NaN if it cannot be estimated: no problem has a sample, or some problem has
    fewer than `group` and not even two problems have two.
  """
  correct = correct[samples > 0]
  samples = samples[samples > 0]
  repeated = samples >= 2
  enough = samples >= group
  if not len(samples) or not (enough.all() or repeated.sum() >= 2):
    return math.nan
  a, b = (0.0, 0.0) if enough.all() else _fit_beta(correct[repeated], samples[repeated])
  shares = []
  for k, n in zip(correct.tolist(), samples.tolist(), strict=True):
    if n >= group:
      shares.append(pass_at_k(n, k, group) + pass_at_k(n, n - k, group) - 1)
    else:
      shares.append(1 - _beta_moments(a + k, b + n - k, group).sum())
  return max(float(np.mean(shares)), 0.0)  # rounding may leave less than 0


def most_mixed(rate: float, samples: int, group: int, level: float = 0.95) -> float:
  """Returns the largest share of groups with both correct and wrong completions that is plausible.

  The number of correct completions is taken as binomial, which bounds the mean probability of the
  rarer outcome by its interval of Clopper and Pearson. 1 - p^group - (1 - p)^group is concave in p,
  so its mean over the problems is at most its value at the mean of p.

  Args:
    rate: the observed share of correct completions.
    samples: the number of completions, of all problems.
    group: completions per group.
    level: of the two-sided interval.
  """
  rarer = round(min(rate, 1 - rate) * samples)
  p = min(float(betaincinv(rarer + 1, samples - rarer, (1 + level) / 2)), 0.5)
  return 1 - p**group - (1 - p) ** group


def _fit_beta(correct: np.ndarray, samples: np.ndarray) -> tuple[float, float]:
  """Returns the parameters of a beta distribution, fitted by moments.

  k (k - 1) / (n (n - 1)) estimates p^2 without bias, and mean^2 - (variance of k / n) / problems
  the square of the mean. A variance of p outside its possible range is moved to the end of it:
  either all problems are the same, or each is always or never solved.

  Args:
    correct: i[p], k of each problem.
    samples: i[p], n of each problem, at least 2; there are at least two problems.
  """
  fractions = correct / samples
  mean = fractions.mean()
  second = (correct * (correct - 1) / (samples * (samples - 1))).mean()
  largest = mean * (1 - mean)
  if largest == 0:
    return 0.0, 0.0
  variance = second - mean**2 + fractions.var(ddof=1) / len(fractions)
  total = largest / np.clip(variance, largest / LARGEST_CONCENTRATION, largest) - 1
  return float(mean * total), float((1 - mean) * total)


def _beta_moments(a: float, b: float, k: int) -> np.ndarray:
  """Returns the means of p^k and (1 - p)^k under Beta(a, b), f64[2], with a + b > 0."""
  i = np.arange(k)
  return np.prod((np.asarray([[a], [b]]) + i) / (a + b + i), axis=1)


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
