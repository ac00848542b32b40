"""Synthetic reasoning tasks with imperfect teachers that the base model learns to imitate.

A task numbers its problems 0 .. size-1. A hash of the problem assigns about one in eight to the
held-out part, so the problems of training and evaluation are disjoint for every seed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.runtime.errors import UserError, did_you_mean

HELD_OUT = 8  # about one problem in this many is held out
MAX_PROBLEMS = 1 << 22  # a task with more possible problems uses a fixed sample of them

# Probabilities of the teachers' errors, at `slips` = 1.
CARRY_SLIP = 0.35  # forgets to carry
LARGE_CARRY_SLIP = 0.8  # forgets to carry if the addend is at least LARGE_ADDEND
LARGE_ADDEND = 7
COUNTDOWN_SLIP = 0.9  # computes something other than the solution
FORK_SLIP = 0.4  # writes the smaller digit of a pair
CONFIDENT_SLIP = 0.9  # the same, for pairs of close digits, by the teacher of forks_confident
COPY_SLIP = 0.05  # copies the other digit of the pair
CLOSE = 2  # digits that differ by at most this are close
FILLER = 2  # mean number of letters before a decision of forks, by default


class Task(Protocol):
  """The interface of a task, for warm start, training and evaluation."""

  name: str
  terms: int
  largest: int
  train_ids: np.ndarray  # i64[m], problem numbers
  held_out_ids: np.ndarray  # i64[m]

  def problem(self, index: int) -> Problem:
    """Returns the problem with this number."""

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns the teacher's completion; `slips` scales how often the teacher errs."""


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPart:
  """A subset of a task's problems, by number."""

  task: Task
  ids: np.ndarray  # i64[m], problem numbers

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, index: int) -> Problem:
    return self.task.problem(int(self.ids[index]))


class RunningSums:
  """Running sums: `46+4+3+4+2:` has the answer `46+4=50,50+3=53,53+4=57,57+2=59`.

  The teacher sometimes forgets to carry, more often for large addends, and continues from the wrong
  total. A model that imitates the teacher learns these errors too. Only the verdict on the last
  number can correct them.

  Args:
    terms: additions per problem.
    largest: the largest addend, 1-9. Totals always have two digits.

  Raises:
    UserError: with this difficulty, totals exceed two digits or there are too few problems.
  """

  name = "sums"

  def __init__(self, terms: int = 4, largest: int = 9):
    self.terms = terms
    self.largest = largest
    top = 99 - terms * largest
    if not (terms >= 1 and 1 <= largest <= 9 and top >= 10):
      raise UserError(
        f"data.terms = {terms} with data.largest = {largest} leaves no two-digit total; "
        "sums need terms >= 1, largest in 1..9 and terms * largest <= 89"
      )
    self._num_starts = top - 9  # number of first totals, which are 10..top
    space = self._num_starts * largest**terms
    self._codes = np.arange(space) if space <= MAX_PROBLEMS else _sample(space)
    self.size = len(self._codes)
    self.train_ids, self.held_out_ids = _split(self, self._codes)

  def numbers(self, index: int) -> list[int]:
    """Returns the first total and the addends."""
    rest, start = divmod(int(self._codes[index]), self._num_starts)
    numbers = [start + 10]
    for _ in range(self.terms):
      rest, addend = divmod(rest, self.largest)
      numbers.append(addend + 1)
    return numbers

  def problem(self, index: int) -> Problem:
    """Returns the sum as a question."""
    numbers = self.numbers(index)
    question = user("+".join(map(str, numbers)) + ":")
    return Problem(f"sums-{index}", question, str(sum(numbers)), "last_number")

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns the teacher's steps, some of which forget to carry."""
    total, *addends = self.numbers(index)
    steps = []
    for addend in addends:
      new = total + addend
      carries = new // 10 > total // 10
      rate = LARGE_CARRY_SLIP if addend >= LARGE_ADDEND else CARRY_SLIP
      if carries and rng.random() < slips * rate:
        new -= 10
      steps.append(f"{total}+{addend}={new}")
      total = new
    return ",".join(steps)


class Countdown:
  """Countdown: `7 12 5=14:` has the answer `12+7=19,19-5=14`, among others.

  A solution uses every number once and ends at the target. The teacher's computations are correct
  but often end at another number.

  Args:
    terms: numbers per problem.
    largest: the largest number.

  Raises:
    UserError: the difficulty is out of bounds, or there are too few problems.
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
    # i64[size, terms]; each row is in an order that solves the problem.
    self._numbers = rng.integers(1, largest + 1, (self.size, terms))
    minus = rng.random((self.size, terms)) < 0.5
    self._targets = self._numbers[:, 0].copy()
    self._minus = minus
    for i in range(1, terms):
      minus[:, i] &= self._targets > self._numbers[:, i]  # totals stay positive
      self._targets += np.where(minus[:, i], -1, 1) * self._numbers[:, i]
    # Problems with the same numbers have the same code, whatever their order and target.
    code = (np.sort(self._numbers, axis=1) * (largest + 1) ** np.arange(terms)).sum(1)
    self.train_ids, self.held_out_ids = _split(self, code)

  def problem(self, index: int) -> Problem:
    """Returns the numbers in ascending order with the target, as a question."""
    numbers = np.sort(self._numbers[index]).tolist()
    target = str(self._targets[index])
    question = user(" ".join(map(str, numbers)) + f"={target}:")
    return Problem(f"countdown-{index}", question, target, "countdown", {"numbers": numbers})

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns a chain of correct steps, which often ends at another number."""
    numbers = self._numbers[index].tolist()
    minus = self._minus[index].tolist()
    if rng.random() < COUNTDOWN_SLIP * slips:  # the same numbers in another computation
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


class Forks:
  """Forks: `38 52:` has the answer `QA:8=8XZB:5=5`, among others.

  For every pair of digits, the answer has filler: any letters, as many as you like, and a colon;
  then the larger digit, which is a decision; `=`; and that digit again. The verifier reads only the
  digits, so it is known of every token whether it decides. The teacher hesitates: of any pair, it
  writes the larger digit in 60 % of its demonstrations. It copies the digit that it wrote in 95 %.

  Args:
    terms: pairs per problem.
    largest: the largest digit.
    filler: the mean number of letters before a decision; the teacher writes up to twice as many.
      With 0, there is no colon either.

  Raises:
    UserError: the difficulty is out of bounds, or there are too few problems.
  """

  name = "forks"

  def __init__(self, terms: int = 3, largest: int = 9, filler: int = FILLER):
    if not (1 <= terms <= 8 and 1 <= largest <= 9 and 0 <= filler <= 16):
      raise UserError(
        f"{self.name} needs data.terms in 1..8, data.largest in 1..9 and data.filler in 0..16, got "
        f"{terms}, {largest} and {filler}"
      )
    self.terms = terms
    self.largest = largest
    self.filler = filler
    digits = range(largest + 1)
    self._pairs = [(a, b) for a in digits for b in digits if a != b]
    space = len(self._pairs) ** terms
    self._codes = np.arange(space) if space <= MAX_PROBLEMS else _sample(space)
    self.size = len(self._codes)
    self.train_ids, self.held_out_ids = _split(self, self._codes)

  def pairs(self, index: int) -> list[tuple[int, int]]:
    """Returns the pairs of different digits."""
    rest = int(self._codes[index])
    pairs = []
    for _ in range(self.terms):
      rest, pair = divmod(rest, len(self._pairs))
      pairs.append(self._pairs[pair])
    return pairs

  def problem(self, index: int) -> Problem:
    """Returns the pairs as a question; the answer is the larger digit of each."""
    pairs = self.pairs(index)
    question = user(" ".join(f"{a}{b}" for a, b in pairs) + ":")
    return Problem(f"{self.name}-{index}", question, "".join(str(max(p)) for p in pairs), "forks")

  def demonstration(self, index: int, rng: np.random.Generator, slips: float) -> str:
    """Returns the teacher's digits, some of which are the smaller ones or copied wrongly."""
    parts = []
    for pair in self.pairs(index):
      slipped = rng.random() < slips * self._slip(pair)
      digit = min(pair) if slipped else max(pair)
      copied = sum(pair) - digit if rng.random() < slips * COPY_SLIP else digit
      letters = rng.integers(ord("A"), ord("Z") + 1, rng.integers(2 * self.filler + 1))
      filler = "".join(map(chr, letters)) + ":" * bool(self.filler)
      parts.append(f"{filler}{digit}={copied}")
    return "".join(parts)

  def _slip(self, pair: tuple[int, int]) -> float:
    """Returns the probability of writing the smaller digit of a pair, at `slips` = 1."""
    return FORK_SLIP


class ConfidentForks(Forks):
  """Forks with a teacher that errs with confidence.

  Of a pair of close digits, the teacher writes the smaller one in 90 % of its demonstrations, and
  of any other pair never. A model that imitates it is sure of its mistakes.
  """

  name = "forks_confident"

  def _slip(self, pair: tuple[int, int]) -> float:
    return CONFIDENT_SLIP if abs(pair[0] - pair[1]) <= CLOSE else 0.0


TASKS: dict[str, type] = {
  task.name: task for task in (RunningSums, Countdown, Forks, ConfidentForks)
}


@functools.lru_cache(maxsize=8)
def make_task(name: str, terms: int = 0, largest: int = 0, filler: int = FILLER) -> Task:
  """Returns a task by name. `terms` or `largest` of 0 selects the task's default.

  Only forks reads `filler`.

  Raises:
    UserError: the name is unknown, or the task does not have this difficulty.
  """
  if name not in TASKS:
    suggestion = did_you_mean(name, TASKS)
    raise UserError(f"unknown task {name!r}{suggestion}; valid are {', '.join(TASKS)}")
  difficulty = {"terms": terms, "largest": largest}
  settings = {key: value for key, value in difficulty.items() if value}
  if issubclass(TASKS[name], Forks):
    settings["filler"] = filler
  return TASKS[name](**settings)


def _split(task: Task, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the problem numbers of the training and held-out parts, split by a hash of `codes`."""
  held_out = _hash(codes.astype(np.uint64)) % np.uint64(HELD_OUT) == 0
  if held_out.all() or not held_out.any():
    raise UserError(
      f"data.terms = {task.terms} with data.largest = {task.largest} gives too few different "
      f"{task.name} problems to hold some out; raise one of them"
    )
  return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _sample(space: int) -> np.ndarray:
  """Returns about MAX_PROBLEMS different numbers below `space`, the same in every call."""
  numbers = np.sort(np.random.default_rng(0).integers(space, size=MAX_PROBLEMS))
  return numbers[np.append(True, np.diff(numbers) > 0)]  # np.unique takes 20 times as long


def _hash(x: np.ndarray) -> np.ndarray:
  """Returns SplitMix64's finaliser, which maps neighbouring codes to distant values."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
