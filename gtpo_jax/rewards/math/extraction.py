"""Finds the answer in the text of a completion or of a gold solution."""

from __future__ import annotations

import re

from gtpo_jax.rewards.math.normalize import clean
from gtpo_jax.rewards.math.values import WORDS, read

MAX_CHARS = 1000  # longest answer that is compared; the longest gold answer of MATH-500 has 159
TAIL_CHARS = 2000  # end of a completion that is searched first for the last number, to save time

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\.|[{}]", re.DOTALL)
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s+([-+]?[\w.,/]+)")
_ANSWER = re.compile(
  r"(?i)\banswer[*_]*(?:\s*[:：]|(?:\s+\w+){0,4}?\s+(?:is|equals)\b[*_]*:?|\s*=)[*_\s]*([^\n]+)"
)
_HASHES = re.compile(r"####[^\S\n]*([^\n]+)")
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
_SENTENCE_END = re.compile(r"[.?](?:\s|$)")
# A word that is not a LaTeX command, a conjunction, a function, or a unit directly after a digit.
_PROSE = re.compile(r"(?<![\\A-Za-z\d{])(?!(?:and|or|sqrt|sin|cos|tan|log|mod)\b)[A-Za-z]{3,}")
_FORMULA = re.compile(r"(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)")


def extract(completion: str) -> str | None:
  """Returns the text of a completion's answer, or None if it has none.

  `math_correct` describes which of several answers is preferred.
  """
  boxed = boxed_answer(completion)
  if boxed is not None:
    return boxed
  matches = (last_match(pattern, completion) for pattern in (_ANSWER, _HASHES))
  for match in sorted(filter(None, matches), key=lambda match: -match.start()):
    answer = _focus(match[1].strip())
    if answer:
      return answer
  return _last_number(completion)


def marked_answer(text: str) -> str | None:
  """Returns the text that a completion marks as its answer, unchanged; None if it marks none.

  This is the content of the last box. Without a box, it is what follows the last `Answer:` or
  `####` on its line.
  """
  boxed = boxed_answer(text)
  if boxed is not None:
    return boxed
  matches = (last_match(pattern, text) for pattern in (_ANSWER, _HASHES))
  last = max(filter(None, matches), key=lambda match: match.start(), default=None)
  return last[1].strip() if last else None


def gold_answer(gold: str) -> str:
  """Returns the answer in a gold text.

  This is the first that exists of: the last box, the text after the last `####`, the text after the
  last `Answer:`, the entire text.
  """
  boxed = boxed_answer(gold)
  if boxed is not None:
    return boxed
  match = last_match(_HASHES, gold) or last_match(_ANSWER, gold)
  return match[1] if match else gold


def last_match(pattern: re.Pattern, text: str) -> re.Match | None:
  """Returns the last match of the pattern in the text, or None."""
  match = None
  for match in pattern.finditer(text):  # noqa: B007
    pass
  return match


def _last_number(text: str) -> str | None:
  for window in (TAIL_CHARS, len(text)):
    match = last_match(_NUMBER, text[-window:])
    # A match near the start of the window may be cut off by it.
    if match and (match.start() > MAX_CHARS or window >= len(text)):
      return match[0]
  return None


def boxed_answer(text: str) -> str | None:
  """Returns the content of the last balanced box, or None if there is none.

  It takes one pass with a stack. A separate search from every box would take quadratic time.
  """
  if "box" not in text:
    return None
  open_braces = []  # (start of the content, whether it belongs to a box)
  span = None
  for match in _BOX.finditer(text):
    if match[0] == "}":
      if open_braces:
        start, is_box = open_braces.pop()
        if is_box and (span is None or start > span[0]):
          span = (start, match.start())
    elif match[1] or match[0] == "{":
      open_braces.append((match.end(), bool(match[1])))
  if span:
    return text[span[0] : span[1]]
  match = last_match(_BOX_WITHOUT_BRACES, text)
  return match[1] if match else None


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
  sentence = line[: end.start()] if end else line
  if _PROSE.search(read(sentence)[0]) and not WORDS.fullmatch(clean(sentence)):
    return _last_number(sentence) or sentence
  return sentence
