"""Synthetic reasoning tasks, and the imperfect teachers whose writing the base model imitates.

A task numbers its problems 0 .. size-1. A hash of the problem itself puts one in eight into the held-out part, so that
training and evaluation are disjoint by construction, whatever the seed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.runtime.errors import UserError, nearest

HELD_OUT = 8  # one problem in this many
MOST = 1 << 22  # problems a task numbers; of a larger space it takes a fixed sample


class Task(Protocol):
  """What warm start, training and evaluation ask of a task."""

  name: str
  terms: int
  largest: int
  train_ids: np.ndarray  # i64[...]
  held_out_ids: np.ndarray

  def problem(self, index: int) -> Problem:
    """The problem of that number."""

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """What the teacher writes for it; `slips` scales how often the teacher errs."""


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPart:
  """Some of a task's problems, by number."""

  task: Task
  ids: np.ndarray  # i64[...]

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, index: int) -> Problem:
    return self.task.problem(int(self.ids[index]))


class RunningSums:
  """`46+4+3+4+2:` is answered step by step, `46+4=50,50+3=53,53+4=57,57+2=59`.

  The teacher forgets to carry when an addition carries, often for large addends, and goes on from the wrong total: errors
  that imitation learns as faithfully as the rest, and that only the verdict on the last number can mend.

  Args:
    terms: additions a problem.
    largest: the largest addend, 1-9. Totals stay at two digits.
  """

  name = "sums"

  def __init__(self, terms: int = 4, largest: int = 9):
    self.terms = terms
    self.largest = largest
    top = 99 - terms * largest
    if not (terms >= 1 and 1 <= largest <= 9 and top >= 10):
      raise UserError(
        f"data.terms = {terms} with data.largest = {largest} leaves no two-digit total; sums need terms >= 1, "
        f"largest in 1..9 and terms * largest <= 89"
      )
    self._firsts = top - 9
    space = self._firsts * largest**terms
    self._codes = np.arange(space) if space <= MOST else _sample(space)
    self.size = len(self._codes)
    self.train_ids, self.held_out_ids = _split(self, self._codes)

  def numbers(self, index: int) -> list[int]:
    """The first total and the addends."""
    rest, first = divmod(int(self._codes[index]), self._firsts)
    numbers = [first + 10]
    for _ in range(self.terms):
      rest, addend = divmod(rest, self.largest)
      numbers.append(addend + 1)
    return numbers

  def problem(self, index: int) -> Problem:
    """The sum as a question."""
    numbers = self.numbers(index)
    return Problem(
      f"sums-{index}", user("+".join(map(str, numbers)) + ":"), str(sum(numbers)), "last_number"
    )

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """The steps, with carries forgotten now and then."""
    total, *addends = self.numbers(index)
    steps = []
    for addend in addends:
      new = total + addend
      if new // 10 > total // 10 and rng.random() < slips * (0.8 if addend >= 7 else 0.35):
        new -= 10
      steps.append(f"{total}+{addend}={new}")
      total = new
    return ",".join(steps)


class Countdown:
  """`7 12 5=14:` is answered `12+7=19,19-5=14`: reach the target with every number used once. Several answers are right.

  The teacher often writes an honest computation that ends elsewhere.

  Args:
    terms: numbers a problem.
    largest: the largest of them.
  """

  name = "countdown"
  size = 1 << 17

  def __init__(self, terms: int = 3, largest: int = 20):
    if not (2 <= terms <= 6 and 3 <= largest <= 50):
      raise UserError(
        f"countdown needs data.terms in 2..6 and data.largest in 3..50, got {terms} and {largest}"
      )
    self.terms = terms
    self.largest = largest
    rng = np.random.default_rng(terms * 100 + largest)
    self._numbers = rng.integers(
      1, largest + 1, (self.size, terms)
    )  # in an order that solves the problem
    minus = rng.random((self.size, terms)) < 0.5
    self._targets = self._numbers[:, 0].copy()
    self._minus = minus
    for i in range(1, terms):
      minus[:, i] &= self._targets > self._numbers[:, i]  # totals stay positive
      self._targets += np.where(minus[:, i], -1, 1) * self._numbers[:, i]
    code = (np.sort(self._numbers, axis=1) * (largest + 1) ** np.arange(terms)).sum(
      1
    )  # one for all orders and targets
    self.train_ids, self.held_out_ids = _split(self, code)

  def problem(self, index: int) -> Problem:
    """The numbers in ascending order, and the target."""
    numbers = np.sort(self._numbers[index]).tolist()
    target = int(self._targets[index])
    return Problem(
      f"countdown-{index}",
      user(" ".join(map(str, numbers)) + f"={target}:"),
      str(target),
      "countdown",
      {"numbers": numbers},
    )

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """A true chain of steps, which often ends at another number."""
    numbers = self._numbers[index].tolist()
    minus = self._minus[index].tolist()
    if rng.random() < 0.9 * slips:  # the same numbers, another way
      numbers = [numbers[i] for i in rng.permutation(self.terms)]
      minus = (rng.random(self.terms) < 0.5).tolist()
    total = numbers[0]
    steps = []
    for number, subtract in zip(numbers[1:], minus[1:], strict=True):
      subtract = subtract and total > number
      new = total - number if subtract else total + number
      steps.append(f"{total}{'-' if subtract else '+'}{number}={new}")
      total = new
    return ",".join(steps)


TASKS: dict[str, type] = {task.name: task for task in (RunningSums, Countdown)}


@functools.lru_cache(maxsize=8)
def make_task(name: str, terms: int = 0, largest: int = 0) -> Task:
  """A task by name; 0 leaves a difficulty setting at the task's own.

  Raises:
    UserError: an unknown name, or a difficulty that the task cannot have.
  """
  if name not in TASKS:
    raise UserError(f"unknown task {name!r}{nearest(name, TASKS)}; valid are {', '.join(TASKS)}")
  return TASKS[name](
    **{key: value for key, value in (("terms", terms), ("largest", largest)) if value}
  )


def _split(task: Task, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The problem numbers of the training part and of the held-out part, by a hash of each problem's code."""
  held_out = _hash(codes.astype(np.uint64)) % np.uint64(HELD_OUT) == 0
  if held_out.all() or not held_out.any():
    raise UserError(
      f"data.terms = {task.terms} with data.largest = {task.largest} leaves too few different {task.name} problems to hold "
      f"some out; raise one of them"
    )
  return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _sample(space: int) -> np.ndarray:
  """About `MOST` different numbers below `space`, always the same. (`np.unique` takes 20 times as long.)"""
  numbers = np.sort(np.random.default_rng(0).integers(space, size=MOST))
  return numbers[np.append(True, np.diff(numbers) > 0)]


def _hash(x: np.ndarray) -> np.ndarray:
  """SplitMix64's finaliser: neighbouring codes land far apart."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
