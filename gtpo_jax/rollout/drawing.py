"""Which problems the groups of a run have: in shuffled epochs, or by their difficulty.

Problems that are always solved, or never, give a policy gradient nothing: their groups have no
contrast. `DrawingByDifficulty` keeps the outcomes of each problem and draws those more often whose
next group is likely to have contrast. What it draws is a function of the seed, the number of groups
that have begun, and these outcomes, which are saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.config.data_sections import UNIFORM
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.rollout.groups import Group, kept_rows
from gtpo_jax.runtime.errors import UserError

DECAY = 0.5  # of earlier outcomes of a problem, each time that it is tried again
PRIOR = 1.0  # completion that the mean over all problems counts as, for each problem
SHARPNESS = 2.0  # a problem is drawn in proportion to this power of its preference, plus FLOOR
FLOOR = 0.01
MAX_PROBLEMS = 2**22
SOLVED = 0.95  # success rate of a solved problem; one up to 1 - SOLVED is hopeless

Index = tuple[int, int]  # of a group: its generation batch, and its row there


class UniformDrawing:
  """Draws problems in shuffled epochs; group k has row k % n of batch k // n.

  Args:
    problems: sources with weights.
    n: groups per batch.
    seed: the run's seed.

  Attributes:
    state: None; what is drawn depends on the seed and the group alone.
  """

  state = None

  def __init__(self, problems: Sequence[tuple[Problems, float]], n: int, seed: int):
    self._n = n
    self._batches = Batches(problems, n, seed)

  def draw(self, begun: int, count: int, kept: Sequence[Group]) -> list[tuple[Index, Problem]]:
    """Returns the index and problem of the next `count` groups after the first `begun`."""
    indices = [divmod(number, self._n) for number in range(begun, begun + count)]
    return [((batch, row), self._batches[batch][row]) for batch, row in indices]

  def observe(self, completed: Sequence[Group], kept: Sequence[Group]) -> None:
    """Has no effect: outcomes change nothing."""

  def metrics(self) -> dict[str, float]:
    """Returns no metrics."""
    return {}

  def save(self, kept: Sequence[Group]) -> dict[str, np.ndarray]:
    """Returns no arrays."""
    return {}

  def restore(self, arrays: Mapping[str, np.ndarray]) -> Callable[[Index], Problem]:
    """Returns a function from the index of a group to its problem."""
    return lambda index: self._batches[index[0]][index[1]]


class Outcomes(NamedTuple):
  """What is known of the problems. The arrays are replaced, never changed."""

  right: np.ndarray  # f32[problems], correct completions; earlier groups count less (`DECAY`)
  tried: np.ndarray  # f32[problems], completions with a verdict, weighted in the same way
  numbers: Mapping[Index, int]  # the problem of each group that has begun and is not yet trained on


class DrawingByDifficulty:
  """Draws problems by the contrast that is expected of their next group.

  The success rate of a problem has a Beta distribution: its outcomes, and one more completion
  (`PRIOR`) with the mean rate over all problems. Problems that were never tried have together at
  most the weight that as many of them have as were tried, so that problems are repeated in large
  sources too. The weights of several sources count before anything is known.

  Args:
    problems: sources with weights.
    n: groups per batch.
    seed: the run's seed.
    group: completions of the policy per group.
    preference: "explore" for the most contrast, "low" and "high" for low and high success rates
      among problems with contrast.
    rows: the most groups that are kept for later steps.

  Attributes:
    state: the outcomes so far. Setting it returns to an earlier state.

  Raises:
    UserError: there are too few problems, or too many.
  """

  def __init__(
    self,
    problems: Sequence[tuple[Problems, float]],
    n: int,
    seed: int,
    group: int,
    preference: str,
    rows: int,
  ):
    sizes = [len(part) for part, _ in problems]
    total = sum(sizes)
    if not n + rows <= total <= MAX_PROBLEMS:
      raise UserError(
        f"data.difficulty = {preference!r} needs from {n + rows} (the groups of a step and those "
        f"kept from earlier ones) to {MAX_PROBLEMS} problems, but data.train has {total}; change "
        f"data.train, or set data.difficulty={UNIFORM}"
      )
    self._sources = [part for part, _ in problems]
    self._ends = np.cumsum(sizes)
    shares = np.asarray([weight for _, weight in problems]) / np.asarray(sizes)
    self._base = np.repeat(shares / shares.max(), sizes)  # f64[problems]
    self._n = n
    self._seed = seed
    self._group = group
    self._preference = preference
    self._rows = rows
    self.state = Outcomes(np.zeros(total, np.float32), np.zeros(total, np.float32), {})

  @property
  def state(self) -> Outcomes:
    """The outcomes so far."""
    return self._state

  @state.setter
  def state(self, state: Outcomes) -> None:
    self._state = state
    self._observed = 0  # groups since the last call of `metrics`
    self._repeated = 0  # whose problem had been tried before

  def draw(self, begun: int, count: int, kept: Sequence[Group]) -> list[tuple[Index, Problem]]:
    """Returns the index and problem of the next `count` groups after the first `begun`.

    No problem is drawn twice, or while a group of it is kept.
    """
    state = self._state
    weights = self._base * draw_weights(state.right, state.tried, self._group, self._preference)
    active = {group.index: state.numbers[group.index] for group in kept}
    weights[list(active.values())] = 0.0
    rng = np.random.default_rng((self._seed, begun))
    with np.errstate(divide="ignore"):
      arrivals = rng.standard_exponential(len(weights)) / weights  # the first ones are drawn
    first = np.argpartition(arrivals, count - 1)[:count] if count else np.zeros(0, np.int64)
    drawn = first[np.argsort(arrivals[first])].tolist()
    indices = [divmod(number, self._n) for number in range(begun, begun + count)]
    numbers = active | dict(zip(indices, drawn, strict=True))
    self._state = state._replace(numbers=numbers)
    return [(index, self._problem(number)) for index, number in zip(indices, drawn, strict=True)]

  def observe(self, completed: Sequence[Group], kept: Sequence[Group]) -> None:
    """Adds the outcomes of groups.

    Args:
      completed: groups that have just got rewards.
      kept: the groups that have begun and are not yet trained on, if any remain for later steps.
    """
    state = self._state
    right = state.right.copy()
    tried = state.tried.copy()
    for group in completed:
      number = state.numbers[group.index]
      self._observed += 1
      self._repeated += bool(tried[number])
      rewards = group.rewards
      counted = rewards.scored & group.own
      if counted.any():
        right[number] = DECAY * right[number] + (rewards.correct & counted).sum()
        tried[number] = DECAY * tried[number] + counted.sum()
    numbers = {group.index: state.numbers[group.index] for group in kept}
    self._state = Outcomes(right, tried, numbers)

  def metrics(self) -> dict[str, float]:
    """Returns what is known of the problems, and how many groups since the last call were repeats.

    `difficulty/tried` is the share of all problems that were tried. The other shares are of those.
    """
    right, tried, _ = self._state
    known = tried > 0
    metrics = {"difficulty/tried": float(known.mean())}
    if self._observed:
      metrics["difficulty/repeated"] = self._repeated / self._observed
    self._observed = self._repeated = 0
    if known.any():
      rate = right[known].astype(np.float64) / tried[known]
      metrics |= {
        "difficulty/solved": float((rate >= SOLVED).mean()),
        "difficulty/mixed": float(((rate > 1 - SOLVED) & (rate < SOLVED)).mean()),
        "difficulty/hopeless": float((rate <= 1 - SOLVED).mean()),
      }
    return metrics

  def save(self, kept: Sequence[Group]) -> dict[str, np.ndarray]:
    """Returns the outcomes, and the problems of the groups that are kept, for a checkpoint."""
    state = self._state
    numbers = np.zeros(self._rows, np.int32)
    numbers[: len(kept)] = [state.numbers[group.index] for group in kept]
    names = ("difficulty_right", "difficulty_tried", "difficulty_kept")
    return dict(zip(names, (state.right, state.tried, numbers), strict=True))

  def restore(self, arrays: Mapping[str, np.ndarray]) -> Callable[[Index], Problem]:
    """Restores what `save` returned, beside what `save_groups` returned if groups are kept.

    Returns:
      A function from the index of a kept group to its problem.
    """
    total = len(self._base)
    if arrays.get("difficulty_right", np.zeros(0)).shape != (total,):
      raise UserError(
        f"the checkpoint has no success rates of these {total} problems; data.train and "
        "data.difficulty must not change"
      )
    count = int(arrays.get("count", 0))
    places = arrays["place"][:count].tolist() if count else []
    numbers = arrays["difficulty_kept"][:count].tolist()
    by_index = {tuple(place): number for place, number in zip(places, numbers, strict=True)}
    right, tried = (np.asarray(arrays[f"difficulty_{name}"]) for name in ("right", "tried"))
    self.state = Outcomes(right, tried, by_index)
    return lambda index: self._problem(by_index[tuple(index)])

  def _problem(self, number: int) -> Problem:
    """Returns a problem by its number over all sources."""
    source = int(np.searchsorted(self._ends, number, side="right"))
    start = int(self._ends[source - 1]) if source else 0
    return self._sources[source][number - start]


Drawing = UniformDrawing | DrawingByDifficulty


def make_drawing(config: Config, problems: Sequence[tuple[Problems, float]]) -> Drawing:
  """Returns how a run draws its problems (`data.difficulty`).

  Raises:
    UserError: this cannot be done with these problems.
  """
  n = config.batch.prompts
  if config.data.difficulty == UNIFORM:
    return UniformDrawing(problems, n, config.seed)
  rows = kept_rows(config)
  group = config.policy_completions
  return DrawingByDifficulty(problems, n, config.seed, group, config.data.difficulty, rows)


def draw_weights(right: np.ndarray, tried: np.ndarray, group: int, preference: str) -> np.ndarray:
  """Returns the weights f64[problems] by which problems are drawn.

  Args:
    right: f32[problems], correct completions.
    tried: f32[problems], completions with a verdict; 0 for a problem that was never tried.
    group: completions of the next group.
    preference: "explore", "low" or "high".
  """
  known = tried > 0
  mean = (right.sum(dtype=np.float64) + PRIOR / 2) / (tried.sum(dtype=np.float64) + PRIOR)
  a = np.append(right[known], 0.0).astype(np.float64) + PRIOR * mean
  b = np.append((tried - right)[known], 0.0).astype(np.float64) + PRIOR * (1 - mean)
  value = expected_contrast(a, b, group)
  if preference == "low":
    value *= b / (a + b)
  elif preference == "high":
    value *= a / (a + b)
  value = value**SHARPNESS + FLOOR
  new = len(known) - int(known.sum())
  weights = np.full(len(known), value[-1] * min(1.0, max(int(known.sum()), 1) / max(new, 1)))
  weights[known] = value[:-1]
  return weights


def expected_contrast(a: np.ndarray, b: np.ndarray, group: int) -> np.ndarray:
  """Returns the probability that a group has both correct and wrong completions.

  This is E[1 - p^g - (1 - p)^g] for a success rate p with the distribution Beta(a, b).

  Args:
    a: f64[m], above 0.
    b: f64[m], above 0.
    group: g.
  """
  all_right = np.ones_like(a)
  all_wrong = np.ones_like(b)
  for i in range(group):
    all_right *= (a + i) / (a + b + i)
    all_wrong *= (b + i) / (a + b + i)
  return 1.0 - all_right - all_wrong
