"""Normalises answer texts: the many ways to typeset an answer become one spelling."""

from __future__ import annotations

import re

from gtpo_jax.rewards.languages import CHARACTERS, FOREIGN, SCALES, UNITS, to_ascii

# Replacements of single characters, after those of `to_ascii`.
_CHARACTERS = str.maketrans(CHARACTERS["latex"])
TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)"
_HEDGE = r"(?:approximately|approx\.?|about|around|roughly|exactly|USD|EUR)"
_REWRITES = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", ","),
    (r"(?<!\\)\\[,!;: ]|~|\\q?quad(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle", " "),
    (r"\\(?:left|right)(?![a-z])\.?", ""),
    (r"(?<!\\)\\?\$|(?<!\\)\\[()]|^\s*\\\[|\\\]\s*$", ""),
    (TEXT_COMMAND + r"\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![a-z])", ""),
    (r"\\%|\\percent|\bper\s?cent\b", "%"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))", r"\\frac{\1\2}{\3\4}"),
    (r"(?:√|\\sqrt(?![a-z{\[]))\s*(\w)(?![\w.])|√\s*(\d+)", r"\\sqrt{\1\2}"),
    (r"(?:√|\\?\bsqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\\w])pi\b", r"\\pi "),
    (r"\\approx(?![a-z])", "="),
    (r"^\s*" + _HEDGE + r"\s+", ""),
    (r"^\s*(?:[Mm]inus|[Nn]egative)\s+(?=[\d.\\])", "-"),
    (r"(?<=\d) [xX] ?(?=\d)|(?<=\d)[xX](?=10\s*\^)", r" \\times "),
    (r"(?<=\d)['_](?=\d{3}(?!\d))", ","),
    (r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])", lambda match: match[0].replace(".", "")),
    (r"\s+", " "),
  )
]

# A unit at the end, as in "5 cm^2", "60 km / h" and "8 per box". Group 1 is its last word.
_UNIT = re.compile(
  r"(?:\s|(?<=[\d)}%])|(?<=[ A-Za-z][A-Za-z])(?=/))\s*(?:/|\bper\b)?\s*"
  r"([A-Za-z]+)\.?\s*(?:\^\s*\{?-?[23]\}?)?$"
)
_UNIT_WINDOW = 60  # maximum characters of a unit; bounds the search
_ENGLISH_UNITS = frozenset(UNITS["english"])
_SCALE_AT_END = re.compile(rf"(?i)(?<![a-z])(?:{'|'.join(SCALES)})s?$")
# A letter after a sum, unless it is in a formula; $2k + 1$ is one.
_MONEY = re.compile(
  r"(?:\\?\$|[€£])\s?(\d[\d.,]*)\s?([kKmMbB])n?(?![\w^$+*/=-])(?!\s*[-+*/=^]|[^$\n]*\$)"
)
MEANINGFUL_WORDS = frozenset(UNITS["meaningful"])  # after a number; they are no units
# A word with a letter of another script, or with an accent, after a number or a space.
_FOREIGN_WORD = re.compile(rf"(?<=[\d)}}% ])[A-Za-z]*[{FOREIGN}][A-Za-z{FOREIGN}]*\.?$")
_NO_SPACES = re.compile("[\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two digits: 7 2 is not 72


def spell_scales(text: str) -> str:
  """Spells the scales of sums of money: $2k is 2 thousand."""
  name = {"k": "thousand", "m": "million", "b": "billion"}
  return _MONEY.sub(lambda match: f"{match[1]} {name[match[2].lower()]}", text)


def clean(text: str) -> str:
  """Returns the text without formatting.

  Dollar signs, surplus spaces, \\text, \\left, backticks, asterisks and underscores at the ends,
  degree signs, a leading word such as "about" and a final full stop are removed; \\dfrac and √
  become \\frac and \\sqrt.
  """
  text = to_ascii(spell_scales(text)).translate(_CHARACTERS)
  for pattern, replacement in _REWRITES:
    text = pattern.sub(replacement, text)
  return text.lstrip(" *_:;,").rstrip(" .,;:*_")


def strip_units(text: str) -> str:
  """Removes the known units after a number. Units are neither compared nor converted.

  A word that is no known unit stays, because it could change the number.
  """
  while not text.isascii() and (
    match := _FOREIGN_WORD.search(text, max(0, len(text) - _UNIT_WINDOW))
  ):
    word = match[0].rstrip(".").casefold()
    kept = _kept_of_unit(word)
    if kept == word or not re.search(r"\d|\\", text[: match.start()]):
      break
    text = (text[: match.start()] + kept).rstrip()
  while match := _UNIT.search(text, max(0, len(text) - _UNIT_WINDOW)):
    word = match[1]
    rest = text[: match.start()].rstrip()
    # 5 m and 60 km/h have a unit, but 5m may be a product.
    is_letter = word in UNITS["letters"] and not match[0].startswith(word)
    is_word = match[0] != "a" and _is_unit(word.lower())
    is_known = is_letter or is_word or word in UNITS["symbols"]
    if not is_known or _SCALE_AT_END.search(text) or not re.search(r"\d|\\", rest):
      break
    text = rest
  return text


def _is_unit(word: str) -> bool:
  """Returns whether a word of ASCII is a unit, in the singular or the plural."""
  forms = (word, word.removesuffix("s"), word.removesuffix("es"), f"{word.removesuffix('ies')}y")
  return not _ENGLISH_UNITS.isdisjoint(forms[: 4 if word.endswith("ies") else 3])


def _kept_of_unit(word: str) -> str:
  """Returns what changes the number before a word: all of it, its start as in 万元, or nothing."""
  if not _NO_SPACES.match(word):
    return "" if word in UNITS["foreign"] else word
  sizes = () if word.startswith(UNITS["scaled"]) else (3, 2, 1)
  scale = next((word[:size] for size in sizes if word[:size] in SCALES), "")
  unit = word.removeprefix(scale)
  start = next((start for start in UNITS["starts"] if unit.startswith(start)), "")
  changes = any(part in unit.removeprefix(start) for part in UNITS["changing"])
  return word if changes or (unit and not start) else scale
