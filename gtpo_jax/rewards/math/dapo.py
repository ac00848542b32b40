"""DAPO's own verifier, for faithful comparisons: string equality after normalisation.

Sources: DAPO (2503.14476); verl's `math_dapo`.
"""

from __future__ import annotations

import re

from gtpo_jax.rewards.finding import last_match
from gtpo_jax.rewards.math.extraction import MAX_CHARS

SEARCHED_CHARS = 300  # at the end of a completion; an answer before them is not found

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WITHOUT_ANSWER = "[INVALID]"
_REMOVED_WORDS = str.split(
  "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
  "cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} "
  "\\text{.}"
)
_REMOVED_TEXT = (
  *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
  *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REPLACEMENTS = (  # in this order
  *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
  *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
  *((text, "") for text in (*_REMOVED_WORDS, *_REMOVED_TEXT)),
)
_REWRITES = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
  )
]


def dapo_correct(completion: str, gold: str) -> bool | None:
  """Returns whether the last `Answer:` line equals `gold` as a normalised string.

  Returns None if gold is empty or longer than MAX_CHARS characters.
  """
  if not gold.strip() or len(gold) > MAX_CHARS:
    return None
  match = last_match(_ANSWER, completion[-SEARCHED_CHARS:])
  return _normalized(match[1] if match else _WITHOUT_ANSWER) == _normalized(gold)


def _normalized(text: str) -> str:
  text = text.split("=")[-1]
  for old, new in _REPLACEMENTS:
    text = text.replace(old, new)
  for pattern, replacement in _REWRITES:
    text = pattern.sub(replacement, text)
  text = text.replace("$", "")
  digits = text.replace(",", "")
  return (digits if digits.isdigit() else text).strip()
