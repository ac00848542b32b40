"""What the gradients of a probe say: cosines, noise, intervals, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # of a test
COLUMNS = (
  "cosine",
  "difference",
  "over_control",
  "alignment",
  "noise",
  "groups",
  "tokens",
  "mc_rank",
)
Interval = tuple[float, float, float]  # an estimate, and the ends of its 95 % interval


class Moments:
  """The mean of vectors, and how large it is beside their noise.

  Attributes:
    count: the number of vectors.
  """

  def __init__(self):
    self.count = 0
    self._sum: Any = 0.0
    self._squares = 0.0

  def add(self, x: np.ndarray) -> None:
    """Adds a vector."""
    x = x.astype(np.float64)
    self.count += 1
    self._sum = self._sum + x
    self._squares += float(x @ x)

  @property
  def mean(self) -> np.ndarray:
    """The mean, f64[p]."""
    return self._sum / self.count

  @property
  def signal(self) -> float:
    """The squared norm of the true mean, estimated without bias."""
    return (float(self._sum @ self._sum) - self._squares) / (self.count * (self.count - 1))

  def noise(self) -> float:
    """Returns the expected squared distance from the mean over the squared norm of the mean.

    Both are estimated without bias. It is infinite if the estimate of the norm is not positive.
    """
    return _inverse(_signal_to_noise(float(self._sum @ self._sum), self._squares, self.count))


def _signal_to_noise(square_of_sum: float, squares: float, n: int) -> float:
  noise = (squares - square_of_sum / n) / (n - 1)
  signal = (square_of_sum - squares) / (n * (n - 1))
  return signal / noise if noise > 0 else math.inf


def _inverse(x: float) -> float:
  return 1 / x if x > 0 else math.inf


def noise_interval(products: np.ndarray) -> Interval:
  """Returns the noise-to-signal ratio of n vectors, with an interval by the jackknife.

  Args:
    products: f64[n, n], their inner products.
  """
  ratio = lambda x: _signal_to_noise(x.sum(), np.trace(x), len(x))
  ratios = jackknife(lambda kept: ratio(products[np.ix_(kept, kept)]), len(products))
  estimate, low, high = (_inverse(x) for x in ratios)
  return estimate, high, low


def jackknife(statistic: Callable[[np.ndarray], float], n: int) -> Interval:
  """Returns a statistic of n batches, given their numbers, with its interval by the jackknife."""
  everything = np.arange(n)
  estimate = statistic(everything)
  if n < 3 or not math.isfinite(estimate):
    return estimate, -math.inf, math.inf
  others = np.array([statistic(np.delete(everything, i)) for i in range(n)])
  if not np.isfinite(others).all():
    return estimate, -math.inf, math.inf
  half = stdtrit(n - 1, 1 - LEVEL / 2) * math.sqrt((n - 1) * others.var())
  return estimate, estimate - half, estimate + half


def mean_interval(values: Sequence[float]) -> Interval:
  """Returns the mean of independent values, with its interval by Student's t."""
  x = np.asarray(values, np.float64)
  half = stdtrit(len(x) - 1, 1 - LEVEL / 2) * x.std(ddof=1) / math.sqrt(len(x))
  return float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def p_value(differences: Sequence[float]) -> float:
  """Returns the p-value of a paired t-test, which is 1 if all differences are 0."""
  x = np.asarray(differences, np.float64)
  error = x.std(ddof=1) / math.sqrt(len(x))
  if error == 0:
    return float(x.mean() == 0)
  return float(2 * stdtr(len(x) - 1, -abs(x.mean() / error)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
  """Returns p-values adjusted for their number by Holm's step-down procedure."""
  adjusted = {}
  largest = 0.0
  for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
    largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
    adjusted[name] = largest
  return adjusted


def cosine(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the cosine of two vectors, which is 0 if one of them is."""
  size = float(np.linalg.norm(a) * np.linalg.norm(b))
  return float(a @ b) / size if size else 0.0


def result_of_arm(vectors: np.ndarray, reference: Moments, shares: np.ndarray) -> dict[str, Any]:
  """Returns what is known of an arm without the others.

  `alignment` is the cosine of the arm's mean gradient with the true one, both without the noise of
  finitely many batches: 1 for every unbiased estimator, up to its own error.

  Args:
    vectors: f32[b, p], the gradient of each batch.
    reference: of the batches of the true gradient.
    shares: f64[b, 2], of groups and of tokens that carry credit.
  """
  x = vectors.astype(np.float64)
  true = reference.mean
  products = x @ x.T
  inner = x @ true

  def alignment(kept: np.ndarray) -> float:
    own = products[np.ix_(kept, kept)]
    n = len(kept)
    square = (own.sum() - np.trace(own)) / (n * (n - 1))
    size = square * reference.signal
    return inner[kept].mean() / math.sqrt(size) if size > 0 else math.nan

  cosines = [cosine(row, true) for row in x]
  return {
    "cosines": cosines,
    "cosine": mean_interval(cosines),
    "alignment": jackknife(alignment, len(x)),
    "noise": noise_interval(products),
    "groups": mean_interval(shares[:, 0]),
    "tokens": mean_interval(shares[:, 1]),
  }


def compare(arms: Mapping[str, dict[str, Any]], control: str) -> None:
  """Adds to each arm but the first its `difference` from the first, with `p` and `p_holm`.

  An arm with a control, whose name ends in `control`, also gets its difference `over_control`.
  """
  first, *others = arms
  minus = lambda name, other: np.subtract(arms[name]["cosines"], arms[other]["cosines"])
  for name in others:
    arms[name]["difference"] = mean_interval(minus(name, first))
    arms[name]["p"] = p_value(minus(name, first))
  for name, p in holm({name: arms[name]["p"] for name in others}).items():
    arms[name]["p_holm"] = p
  for name in arms:
    if name + control in arms:
      arms[name]["over_control"] = mean_interval(minus(name, name + control))


def verdict(arms: Mapping[str, dict[str, Any]], batches: int) -> str:
  """Returns one line that says which arm to start with."""
  first, *others = arms
  if not any(arm["groups"][0] for arm in arms.values()):
    return "no group carried credit in any arm: take easier or harder problems, or larger groups"
  differs = {name: arms[name] for name in others if arms[name]["p_holm"] < LEVEL}
  if not differs:
    reach = max(arms[name]["difference"][2] - arms[name]["difference"][0] for name in others)
    return (
      f"no arm differs from {first} ({batches} batches, whose intervals reach {reach:.3f} to each "
      f"side): start with {first}"
    )
  better = [name for name in differs if differs[name]["difference"][0] > 0]
  described = [
    f"{name} is {'better' if name in better else 'worse'} than {first}: its cosine differs by "
    "{:+.3f} [{:.3f}, {:.3f}]".format(*arm["difference"])
    + f" (p = {arm['p_holm']:.2g} by Holm)"
    for name, arm in differs.items()
  ]
  return f"{'; '.join(described)}; {batches} batches: start with {' or '.join(better) or first}"


def probe_rows(arms: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
  """Returns a table of texts: its heads, then for each arm estimates with 95 % intervals."""
  columns = [key for key in COLUMNS if any(key in arm for arm in arms.values())]
  rows = [["arm", *columns, "p (Holm)"]]
  for name, arm in arms.items():
    p = f"{arm['p_holm']:.2g}" if "p_holm" in arm else ""
    rows.append([name, *(_cell(arm.get(key)) for key in columns), p])
  return rows


def _cell(interval: Sequence[float | None] | None) -> str:
  if interval is None:
    return ""
  estimate, low, high = ("-" if x is None else f"{x:.3g}" for x in interval)
  return f"{estimate} [{low}, {high}]"
