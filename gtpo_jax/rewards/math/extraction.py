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
from gtpo_jax.rewards.languages import FOREIGN
from gtpo_jax.rewards.math.normalize import clean
from gtpo_jax.rewards.math.running_text import MAX_CHARS, last_expression, stated
from gtpo_jax.rewards.math.values import WORDS, Number, read

_SENTENCE_END = re.compile(r"[.?](?:\s|$)|[。？]")
_REFUSED = re.compile(r"(?i)(?<=[\d$%)])\s*[,;(]\s*(?:and\s|but\s)?not\s[^()]*\)?$")  # 18, not 17
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
  return last_expression(after_thinking(completion))


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


def _focus(line: str) -> str | None:
  """Returns the answer in the text that follows `Answer:` or `####` on its line.

  This is the last formula if there is one. Otherwise it is the first sentence, or the last number
  of that sentence if it is prose. A line of more than MAX_CHARS characters gives its last number.
  """
  if len(line) > MAX_CHARS:
    return last_expression(line)
  formulas = list(_FORMULA.finditer(line))
  # In "$5 more than $8" the dollar signs are a currency.
  if formulas and not _PROSE.search(clean(formula := formulas[-1][1] or formulas[-1][2])):
    around = (line[: formulas[-1].start()], line[formulas[-1].end() :])
    return stated(around[0], formula, around[1]) or line
  line = _REFUSED.sub("", line)
  end = _SENTENCE_END.search(line)
  sentence = without_ending(line[: end.start()] if end else line)
  text, value = read(sentence)
  if not isinstance(value, Number) and _PROSE.search(text) and not WORDS.fullmatch(clean(sentence)):
    return last_expression(sentence) or sentence
  return sentence
