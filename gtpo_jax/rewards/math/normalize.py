"""Normalises answer texts: the many ways to typeset an answer become one spelling."""

from __future__ import annotations

import re

from gtpo_jax.rewards.languages import (
  CHANGING_PARTS,
  CHANGING_WORDS,
  FOREIGN,
  SCALED_UNITS,
  SCALES,
  TO_ASCII,
)

# Replacements of single characters.
_CHARACTERS = TO_ASCII | str.maketrans(
  {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "÷": "/",
    "∞": "\\infty ",
    "π": "\\pi ",
    "°": "",
    "≤": "\\le ",
    "≥": "\\ge ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "±": "\\pm ",
    "≈": "=",
    "²": "^2",
    "³": "^3",
    "½": "\\frac{1}{2}",
    "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "’": "'",
    "`": "",
    **dict.fromkeys("\xa0\u2009\u202f", " "),
    **dict.fromkeys("€£¥₹￥₽₩₺₫"),  # None deletes the character
    "和": " and ",
    "或": " or ",
  }
)
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)"
_HEDGE = r"(?:approximately|approx\.?|about|around|roughly|exactly|USD|EUR)"
_REWRITES = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", ","),
    (r"(?<!\\)\\[,!;: ]|~|\\q?quad(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle", " "),
    (r"\\(?:left|right)(?![a-z])\.?", ""),
    (r"(?<!\\)\\?\$|(?<!\\)\\[()]|^\s*\\\[|\\\]\s*$", ""),
    (_TEXT_COMMAND + r"\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![a-z])", ""),
    (r"\\%|\\percent|\bper\s?cent\b", "%"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))", r"\\frac{\1\2}{\3\4}"),
    (r"(?:√|\\sqrt(?![a-z{\[]))\s*(\w)(?![\w.])|√\s*(\d+)", r"\\sqrt{\1\2}"),
    (r"(?:√|\\?\bsqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\\w])pi\b", r"\\pi "),
    (r"\\approx(?![a-z])", "="),
    (r"^\s*" + _HEDGE + r"\s+", ""),
    (r"\s+", " "),
  )
]

# A unit at the end, as in "5 cm^2", "60 km / h" and "8 per box". Group 1 is its last word.
_UNIT = re.compile(
  r"(?:\s|(?<=[\d)}%])|(?<=[ A-Za-z][A-Za-z])(?=/))\s*(?:/|\bper\b)?\s*"
  r"([A-Za-z]+)\.?\s*(?:\^\s*\{?-?[23]\}?)?$"
)
_UNIT_WINDOW = 60  # maximum characters of a unit; bounds the search
# Units of fewer than _MIN_UNIT_CHARS letters. Any longer word after a number counts as a unit.
_SHORT_UNITS = frozenset(
  str.split(
    "mm cm dm km in ft yd mi mg kg lb oz ml mL cl dl kW min sec hr day mph kph kmh am pm sq rad "
    "deg usd USD EUR men cup box car cat dog egg hat pen pie bag toy job way"
  )
)
_LETTER_UNITS = frozenset("mgshlLJNWVK")
_MIN_UNIT_CHARS = 4
# Words after a number that change its value, so they are not units.
MEANINGFUL_WORDS = frozenset(
  str.split(
    "sqrt half third thirds quarter quarters fourth fourths fifth fifths dozen dozens hundred "
    "thousand million billion trillion factorial squared cubed infinity union and or"
  )
)
# A word with a letter of another script, or with an accent, after a number or a space.
_FOREIGN_WORD = re.compile(rf"(?<=[\d)}}% ])[A-Za-z]*[{FOREIGN}][A-Za-z{FOREIGN}]*\.?$")
_NO_SPACES = re.compile("[\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_FUNCTION = re.compile(r"a?r?c?(?:sin|cos|tan|log|ln|sqrt|exp)")  # as in 5 sinx

SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two digits: 7 2 is not 72


def clean(text: str) -> str:
  """Returns the text without formatting.

  Dollar signs, surplus spaces, \\text, \\left, backticks, asterisks and underscores at the ends,
  degree signs, a leading word such as "about" and a final full stop are removed; \\dfrac and √
  become \\frac and \\sqrt.
  """
  text = text.translate(_CHARACTERS)
  for pattern, replacement in _REWRITES:
    text = pattern.sub(replacement, text)
  return text.lstrip(" *_:;,").rstrip(" .,;:*_")


def strip_units(text: str) -> str:
  """Removes the unit after a number. Units are neither compared nor converted.

  Words that change the number, such as "million" or "squared", are not units.
  """
  text = _strip_foreign_units(text)
  while match := _UNIT.search(text, max(0, len(text) - _UNIT_WINDOW)):
    word = match[1]
    rest = text[: match.start()].rstrip()
    # 5 m and 60 km/h have a unit, but 5m may be a product.
    is_letter = word in _LETTER_UNITS and not match[0].startswith(word)
    is_short = word in _SHORT_UNITS or word.removesuffix("s") in _SHORT_UNITS
    is_word = (
      len(word) >= _MIN_UNIT_CHARS
      and word.lower() not in MEANINGFUL_WORDS
      and word.lower() not in CHANGING_WORDS
      and word.lower() not in SCALES
      and not _FUNCTION.match(word)
    )
    if not (is_letter or is_short or is_word) or not re.search(r"\d|\\", rest):
      break
    text = rest
  return text


def _strip_foreign_units(text: str) -> str:
  if text.isascii():
    return text
  while match := _FOREIGN_WORD.search(text, max(0, len(text) - _UNIT_WINDOW)):
    rest = text[: match.start()]
    kept = _kept_of_unit(match[0].rstrip(".").casefold())
    if not re.search(r"\d|\\", rest) or kept == match[0]:
      break
    text = (rest + kept).rstrip()
  return text


def _kept_of_unit(word: str) -> str:
  """Returns what changes the number before a word: all of it, its start as in 万元, or nothing."""
  if word in SCALES or word in CHANGING_WORDS:
    return word
  if not _NO_SPACES.match(word) or word.startswith(SCALED_UNITS):
    return ""
  if scale := max((s for s in SCALES if word.startswith(s)), key=len, default=""):
    return scale
  return word if any(part in word for part in CHANGING_PARTS) else ""
