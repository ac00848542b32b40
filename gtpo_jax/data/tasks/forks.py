"""Forks: a task of which it is known which tokens decide."""

from __future__ import annotations

import numpy as np

from gtpo_jax.data.records import Problem, user
from gtpo_jax.data.tasks.task import MAX_PROBLEMS, sample_codes, split
from gtpo_jax.runtime.errors import UserError

# Probabilities of the teachers' errors, at `slips` = 1.
FORK_SLIP = 0.4  # writes the smaller digit of a pair
CONFIDENT_SLIP = 0.9  # the same, for pairs of close digits, by the teacher of forks_confident
COPY_SLIP = 0.05  # copies the other digit of the pair
CLOSE = 2  # digits that differ by at most this are close
FILLER = 2  # mean number of letters before a decision of forks, by default


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
    self._codes = np.arange(space) if space <= MAX_PROBLEMS else sample_codes(space)
    self.size = len(self._codes)
    self.train_ids, self.held_out_ids = split(self, self._codes)

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
