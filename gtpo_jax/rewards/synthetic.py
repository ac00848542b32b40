"""Exact verifiers of the synthetic tasks. They accept any text and never raise."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence

_DIGIT = re.compile(r"[0-9]")
MAX_STEP = 10**9  # the numbers of a countdown step are below it
SHORTEST_SENTENCE = 6  # words
LONGEST_SENTENCE = 20
# Words of sentences that talk about a word instead of using it.
ABOUT_WORDS = """
word words sentence sentences contain contains containing contained include includes including
included mention mentions mentioned
"""
# One line that ends with its only full stop, question mark or exclamation mark, without quotation
# marks (but with apostrophes within words) or markup.
_SENTENCE = re.compile(r"""(?:[^.!?"“”„«»*_`\n‘’']|(?<=\w)['’](?=\w))+[.!?]""")
_WORD = re.compile(r"[a-z]+(?:['’-][a-z]+)*")
_POSSESSIVE = re.compile("['’]s$")
_STEP = re.compile(r"(\d{1,9})([+\-*])(\d{1,9})=(\d{1,9})", re.ASCII)


def last_number(completion: str) -> str | None:
  """Returns the digits of the last whole number in the text, or None if there is none."""
  numbers = re.findall(r"\d+", completion, re.ASCII)
  return numbers[-1] if numbers else None


def last_number_correct(completion: str, answer: str) -> bool:
  """Returns whether the last whole number in the text is `answer`."""
  return last_number(completion) == answer


def forks_digits(completion: str) -> str | None:
  """Returns the digits in the text, or None if there are none."""
  return "".join(_DIGIT.findall(completion)) or None


def forks_correct(completion: str, answer: str) -> bool:
  """Returns whether the text has the digits of `answer`, each written twice."""
  return forks_digits(completion) == "".join(digit * 2 for digit in answer)


def countdown_correct(completion: str, numbers: Sequence[int], target: int) -> bool:
  """Returns whether the text is a chain of correct steps `a+b=c,...` from `numbers` to `target`.

  The values that may be used start as `numbers`. Each step removes its two operands and adds its
  result; the operators are +, - and *. At the end only the target may remain, so every number is
  used exactly once.
  """
  pool = Counter(numbers)
  for part in completion.strip().split(","):
    step = _STEP.fullmatch(part.strip())
    if not step:
      return False
    a, b, c = (int(step[i]) for i in (1, 3, 4))
    pool[a] -= 1
    pool[b] -= 1
    if min(pool[a], pool[b]) < 0 or {"+": a + b, "-": a - b, "*": a * b}[step[2]] != c:
      return False
    pool[c] += 1
  return +pool == Counter([target])


def sentence_correct(completion: str, topic: str, word: str) -> bool:
  """Returns whether the text is one sentence of 6 to 20 words that uses both words.

  A text that quotes anything is refused, and so is one that talks about the word instead of using
  it, such as "The sea also contains words like paper."
  """
  text = completion.strip()
  if not _SENTENCE.fullmatch(text):
    return False
  words = [_POSSESSIVE.sub("", word) for word in _WORD.findall(text.lower())]
  return (
    SHORTEST_SENTENCE <= len(words) <= LONGEST_SENTENCE
    and {topic, word} <= set(words)
    and not set(ABOUT_WORDS.split()) & set(words)
  )


def countdown_reaches(numbers: Sequence[int], target: int) -> bool:
  """Returns whether some chain of steps is correct; for few numbers, as it tries all of them."""
  return len(numbers) > 1 and target in _totals(tuple(sorted(numbers)))


@functools.lru_cache(maxsize=1 << 16)
def _totals(numbers: tuple[int, ...]) -> frozenset[int]:
  """Returns the totals that steps with all numbers reach and that a step can write."""
  if len(numbers) == 1:
    return frozenset(numbers)
  totals = set()
  for size in range(1, len(numbers) // 2 + 1):
    for chosen in itertools.combinations(range(len(numbers)), size):
      part = _totals(tuple(numbers[i] for i in chosen))
      rest = _totals(tuple(numbers[i] for i in range(len(numbers)) if i not in chosen))
      for a, b in itertools.product(part, rest):
        totals.update((a + b, a * b, abs(a - b)))
  return frozenset(total for total in totals if total < MAX_STEP)
