"""Finds the answer in the text of a completion or of a gold solution."""

from __future__ import annotations

import re

from gtpo_jax.rewards.finding import (
  HASHES,
  after_thinking,
  boxed_answer,
  last_match,
  marked_answers,
  phrases,
  without_ending,
)
from gtpo_jax.rewards.languages import FOREIGN, TO_ASCII
from gtpo_jax.rewards.math.normalize import clean
from gtpo_jax.rewards.math.values import WORDS, read

MAX_CHARS = 1000  # longest answer that is compared; the longest gold answer of MATH-500 has 159
TAIL_CHARS = 2000  # end of a completion that is searched first for the last number, to save time

_DIGITS = r"\d{1,3}(?:,\d{3})+(?![\d,])|\d+"
_NUMBER = re.compile(
  # a date or a time
  r"\d+(?:[-/:]\d+){2,}|\d+:\d+"
  # or, with a minus sign unless that is a subtraction, a \frac,
  r"|(?:(?<![\w)\]}])[-−])?(?:\\[dt]?frac\{\d+\}\{\d+\}"
  # or digits with a denominator, an exponent or a percent sign
  rf"|(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d+|\s*\\?%)?)",
  re.ASCII,
)
_SENTENCE_END = re.compile(r"[.?](?:\s|$)|[。？]")
# A word that is not a LaTeX command, a conjunction, a function, or a unit directly after a digit.
_PROSE = re.compile(
  r"(?<![\\A-Za-z\d{])(?!(?:and|or|sqrt|sin|cos|tan|log|mod)\b)[A-Za-z]{3,}"
  rf"|(?<![\d{FOREIGN}])[{FOREIGN}]{{2,}}"
)
_FORMULA = re.compile(r"(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)")


def extract(completion: str) -> str | None:
  """Returns the text of a completion's answer, or None if it has none.

  `math_correct` describes which of several answers is preferred.
  """
  for answer in marked_answers(completion):
    text = answer.text if answer.is_whole else _focus(answer.text)
    if text or answer.is_whole:
      return text
  return _last_number(after_thinking(completion))


def gold_answer(gold: str) -> str:
  """Returns the answer in a gold text.

  This is the first that exists of: the last box, the text after the last `####`, the text after the
  last `Answer:`, the entire text.
  """
  boxed = boxed_answer(gold)
  if boxed is not None:
    return boxed
  match = last_match(HASHES, gold) or last_match(phrases(gold), gold)
  return match[1] if match else gold


def _last_number(text: str) -> str | None:
  if not text.isascii():
    text = text.translate(TO_ASCII)
  for window in (TAIL_CHARS, len(text)):
    match = last_match(_NUMBER, text[-window:])
    # A match near the start of the window may be cut off by it.
    if match and (match.start() > MAX_CHARS or window >= len(text)):
      return match[0]
  return None


def _focus(line: str) -> str | None:
  """Returns the answer in the text that follows `Answer:` or `####` on its line.

  This is the last formula if there is one. Otherwise it is the first sentence, or the last number
  of that sentence if it is prose. A line of more than MAX_CHARS characters gives its last number.
  """
  if len(line) > MAX_CHARS:
    return _last_number(line)
  formulas = [dollars or parentheses for dollars, parentheses in _FORMULA.findall(line)]
  # In "$5 more than $8" the dollar signs are a currency.
  if formulas and not _PROSE.search(clean(formulas[-1])):
    return formulas[-1]
  end = _SENTENCE_END.search(line)
  sentence = without_ending(line[: end.start()] if end else line)
  if _PROSE.search(read(sentence)[0]) and not WORDS.fullmatch(clean(sentence)):
    return _last_number(sentence) or sentence
  return sentence
