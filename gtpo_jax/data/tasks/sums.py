"""Running sums and countdown."""

from __future__ import annotations

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.task import MAX_PROBLEMS, sample_codes, split
from gtpo_jax.runtime.errors import UserError

# Probabilities of the teachers' errors, at `slips` = 1.
CARRY_SLIP = 0.35  # forgets to carry
LARGE_CARRY_SLIP = 0.8  # forgets to carry if the addend is at least LARGE_ADDEND
LARGE_ADDEND = 7
COUNTDOWN_SLIP = 0.9  # computes something other than the solution


class RunningSums:
  """Running sums: `46+4+3+4+2:` has the answer `46+4=50,50+3=53,53+4=57,57+2=59`.

  The teacher sometimes forgets to carry, more often for large addends, and continues from the wrong
  total. A model that imitates the teacher learns these errors too. Only the verdict on the last
  number can correct them.

  Args:
    terms: additions per problem.
    largest: the largest addend, 1-9. Totals always have two digits.
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
    self._codes = np.arange(space) if space <= MAX_PROBLEMS else sample_codes(space)
    self.size = len(self._codes)
    self.train_ids, self.held_out_ids = split(self, self._codes)

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
    self.train_ids, self.held_out_ids = split(self, code)

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
