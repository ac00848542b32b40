"""What a policy can do, estimated from n completions a problem: unbiased for k <= n, the mean over all subsets of k. NumPy alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np

DRAWS = 1000  # of the bootstrap


def pass_at_k(n: int, right: int, k: int) -> float:
  """The chance that at least one of k completions drawn from n without replacement is right: 1 - C(n-right, k) / C(n, k).

  Source: Chen et al. 2021 (2107.03374), eq. 1. Raises ValueError unless 1 <= k <= n.
  """
  _check(n, k)
  return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def best_of_k(rewards: np.ndarray, k: int) -> float:
  """The mean, over all subsets of k of the rewards f[n], of the greatest in it; of rewards 0 and 1 it is pass@k.

  In ascending order reward i (from 0) is the greatest of C(i, k-1) of the C(n, k) subsets. Raises ValueError unless 1 <= k <= n.
  """
  _check(len(rewards), k)
  return float(np.sort(rewards) @ _shares_of_greatest(len(rewards), k))


def majority_at(votes: Sequence[Hashable | None], right: np.ndarray) -> np.ndarray:
  """For each k, how often the answer that most of k completions give is right: the mean over all subsets of k.

  None abstains: where all k abstain the vote is wrong. Answers that tie share the vote: of t such each counts 1 / t. An answer whose
  completions are judged differently is as right as their mean.

  Args:
    votes: the answers of n completions.
    right: bool[n], their verdicts.

  Returns:
    f64[n], for k = 1 .. n.
  """
  places: dict[Hashable, list[int]] = {}
  for place, vote in enumerate(votes):
    if vote is not None:
      places.setdefault(vote, []).append(place)
  worth = {vote: float(np.mean(right[at])) for vote, at in places.items()}
  total = np.zeros(len(votes))
  for vote in (vote for vote in places if worth[vote]):
    others = sorted(len(at) for other, at in places.items() if other != vote)
    total += worth[vote] * _wins(len(votes), len(places[vote]), tuple(others))
  return total


def bootstrap(columns: np.ndarray, level: float = 0.95, seed: int = 0) -> np.ndarray:
  """Percentile intervals of the means of `columns` f64[p, c] over problems drawn p at a time with replacement; NaN is left out.

  Returns:
    f64[2, c], lower and upper ends; NaN where a column has no number. All columns are drawn alike.
  """
  p = len(columns)
  times = (
    np.random.default_rng(seed).multinomial(p, np.full(p, 1 / p), size=DRAWS).astype(np.float64)
  )  # f64[draws, p]
  there = ~np.isnan(columns)
  count = times @ there
  means = np.divide(
    times @ np.where(there, columns, 0.0), count, out=np.full(count.shape, np.nan), where=count > 0
  )
  ends = np.full((2, columns.shape[1]), np.nan)
  some = there.any(0)
  ends[:, some] = np.nanpercentile(means[:, some], [50 * (1 - level), 50 * (1 + level)], axis=0)
  return ends


def _check(n: int, k: int) -> None:
  if not 1 <= k <= n:
    raise ValueError(f"a subset of k needs 1 <= k <= n samples, got k = {k} and n = {n}")


@functools.lru_cache(maxsize=256)
def _shares_of_greatest(n: int, k: int) -> np.ndarray:
  """f64[n]: C(i, k-1) / C(n, k) for i = 0 .. n-1, from its end k / n downwards by ratios, which never overflow."""
  i = np.arange(n - 1, 0, -1)
  return np.cumprod(np.append(k / n, np.maximum(i - k + 1, 0) / i))[::-1]


@functools.lru_cache(maxsize=4096)
def _wins(n: int, own: int, others: tuple[int, ...]) -> np.ndarray:
  """For each k = 1 .. n, the mean share of the vote won in subsets of k by an answer with `own` of n votes, the others having `others`.

  With m votes for it in a subset, no other answer may have more, and t that have as many leave it 1 / (1 + t), which is the integral
  of y^t over [0, 1]. So the subsets are counted by a product of polynomials in x, whose powers are their sizes, one factor an answer:
  sum_{i<m} C(c, i) x^i + y C(c, m) x^m, at as many y as make Gauss's quadrature exact. No term is negative, so nothing cancels.
  """
  won = np.zeros(n + 1, np.longdouble)
  silent = n - own - sum(others)
  for m in range(1, own + 1):
    ties = sum(c >= m for c in others)
    nodes, weights = np.polynomial.legendre.leggauss(ties // 2 + 1)
    y = (nodes + 1) / 2
    product = np.zeros((len(y), n + 1), np.longdouble)
    product[:, m] = weights / 2 * _comb(own, m)
    for c in others:
      factor = [np.full(len(y), _comb(c, i)) for i in range(min(m, c + 1))] + (
        [y * _comb(c, m)] if m <= c else []
      )
      product = _times(product, factor)
    won += _times(product, [np.full(len(y), _comb(silent, i)) for i in range(silent + 1)]).sum(0)
  return np.asarray([won[k] / _comb(n, k) for k in range(1, n + 1)], np.float64)


def _times(product: np.ndarray, factor: Sequence[np.ndarray]) -> np.ndarray:
  """Polynomials [y, n + 1] times others given by their coefficients; powers above n are dropped, for there are none."""
  out = np.zeros_like(product)
  for i, coefficient in enumerate(factor):
    out[:, i:] += product[:, : product.shape[1] - i] * coefficient[:, None]
  return out


def _comb(n: int, k: int) -> np.longdouble:
  return np.longdouble(
    math.comb(n, k)
  )  # its range suffices for n = 16,000 where it is wider than a double
