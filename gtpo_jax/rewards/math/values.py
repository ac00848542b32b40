"""Parses answers into values that are compared without SymPy.

Values are numbers, words, dates, and groups of values such as tuples, sets and intervals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo_jax.rewards.languages import SCALES
from gtpo_jax.rewards.math.arithmetic import CLOSE, OPEN, exact_value
from gtpo_jax.rewards.math.normalize import MEANINGFUL_WORDS, clean, strip_units

CACHED_READS = 8192  # answers; a gold answer is read again for each completion of its problem
MAX_EXPONENT = 200  # of a number like 1e30; bounds the size of its fraction
MAX_NESTING = 4  # levels of groups within groups
MAX_ITEMS = 50  # values in a group


class Number(NamedTuple):
  """A number, and the notation it was written in.

  Attributes:
    value: a fraction; or +-infinity for an unknown number of at least 2**7999 in magnitude (see
      `exact_value`).
    percent: whether it has a percent sign.
    places: number of digits after the decimal point.
  """

  value: Fraction | float
  percent: bool = False
  places: int = 0


class Composite(NamedTuple):
  """Several values in one answer, such as a tuple, a set or an interval.

  It is unrelated to a group of completions.

  Attributes:
    kind: the pair of brackets, such as "()"; "list" if there are no brackets; "row" for numbers
      with only spaces between them; "union" for a union of intervals; "named" for values with
      names, as in x = 1, y = 2; "base" for digits and their base.
    items: the values.
    names: the names of a "named" group, in the order of its items.
  """

  kind: str
  items: tuple
  names: tuple = ()


Value = Number | Composite | str  # words, dates and times are strings

_DIGITS = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+"
_NUMBER = re.compile(
  rf"([-+]?) ?(?:({_DIGITS})(?:\.(\d*))?|\.(\d+))(?:[eE]([-+]?\d{{1,3}}))?", re.ASCII
)
# A decimal with repeating digits: 0.1\overline{6}, 0.\dot{3} or 0.(3).
_REPEATING = re.compile(
  r"([-+]?) ?(\d*)\.(\d*) ?(?:\\(?:overline|bar|dot) ?(?:\{(\d{1,50})\}|(\d))|\((\d{1,50})\))",
  re.ASCII,
)
# Digits with a base, as in 101_2 and 1F_{16}.
_BASED = re.compile(r"\(?([0-9][0-9A-Fa-f]*)\)?(?:_|_\{| base )\(?(\d{1,2}|[a-z]{3,8})\)?\}?")
_HEX = re.compile(r"-?0[xX][0-9a-fA-F]+")
# Numbers with only spaces between them. math-verify would read a product: 1 0 2 as 0.
_ROW = re.compile(r"[-+]?\d+(?:\.\d+)?(?: [-+]?\d+(?:\.\d+)?)+", re.ASCII)
_SCALED = re.compile(
  rf"(.*[\d}}])[ -]?({'|'.join(sorted(SCALES, key=len, reverse=True))})s?", re.IGNORECASE
)
_COUNTING_WORDS = str.split("zero one two three four five six seven eight nine ten eleven twelve")
_COUNT = {word: Fraction(number) for number, word in enumerate(_COUNTING_WORDS)}
_DATE_OR_TIME = re.compile(
  r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{2,4}|\d\d?-\d\d?-\d{4}"
  r"|\d+(?: ?: ?\d+)+(?: ?[aApP]\.?[mM]\.?)?",
  re.ASCII,
)
WORDS = re.compile(
  r"(?=.*[^\W\d_]{4}|(?:yes|no|odd|all|one|two|six|ten|red)$)"
  r"[^\W\d_]+\.?(?:[-' ]+[^\W\d_]+\.?)*",
  re.IGNORECASE,
)
_INFINITY = {
  "\\infty": "oo",
  "+\\infty": "oo",
  "-\\infty": "-oo",
  "infinity": "oo",
  "-infinity": "-oo",
}
# The left side of an answer: x =, f(2) =, a_1 =, x \in, total: (but not "twice x" or "not")
_LEFT_SIDE = re.compile(
  r"\s*(?!\\n(?:ot|eg)(?![a-z])|(?i:minus|negative)\s*[:=]|[^:=]*(?i:\b(?:not|except|but|than|or"
  r"|wrong|incorrect|squared|twice|half (?:of|the)|at least|at most)\b))"
  r"((?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?'?(?:\([\w, ]*\))?\s*(?:=|\\in(?![a-z]))"
  r"|[A-Za-z][A-Za-z ]{2,40}\s*[:=])\s*(?=\S)"
)
# If one of these follows, the first name is not the left side of the entire answer.
_COMPOUND = re.compile(r"[<>,;]|\\[lg]e|\bor\b|\band\b|=.*[A-Za-z]|[A-Za-z].*=")
_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")
_UNION = re.compile(r"\\cup(?![a-z])")


@lru_cache(CACHED_READS)
def read(text: str) -> tuple[str, Value | None]:
  """Returns the cleaned text and its value. The value is None if it needs SymPy."""
  if number := _literal(text):
    # math-verify would read a hexadecimal number as a product of digits and letters.
    return str(number.value) if _HEX.fullmatch(text) else text, number
  text = strip_units(clean(text))
  named = _LEFT_SIDE.match(text)
  if named and (named[1].endswith("\\in") or not _COMPOUND.search(text, named.end())):
    text = strip_units(text[named.end() :])
  return text, _value(text)


def same(a: Value, b: Value) -> bool | None:
  """Returns whether two values are equal, or None if both have numbers known only to be huge."""
  if isinstance(a, Composite) and isinstance(b, Composite):
    return _same_groups(a, b)
  if isinstance(a, Composite) or isinstance(b, Composite):
    group, other = (a, b) if isinstance(a, Composite) else (b, a)
    return same(group.items[0], other) if len(group.items) == 1 else False
  if isinstance(a, str) or isinstance(b, str):
    return a == b
  return _same_numbers(a, b)


# Parsing.


def _literal(text: str) -> Number | None:
  """Parses a number written in decimal or hexadecimal digits, or returns None."""
  match = _NUMBER.fullmatch(text)
  if repeating := not match and _REPEATING.fullmatch(text):
    return Number(_repeating(*repeating.groups()))
  if not match:
    return Number(Fraction(int(text, 16))) if _HEX.fullmatch(text) else None
  sign, whole, places, point, exponent = match.groups()
  decimals = places or point or ""
  power = int(exponent or 0)
  if abs(power) > MAX_EXPONENT:
    return None
  digits = (whole or "").replace(",", "").replace(" ", "") + decimals
  value = Fraction(int(digits), 10 ** len(decimals)) * Fraction(10) ** power
  return Number(-value if sign == "-" else value, False, max(0, len(decimals) - power))


def _repeating(sign: str, whole: str, start: str, *digits: str | None) -> Fraction:
  (repeated,) = filter(None, digits)
  once = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(start))
  value = Fraction(int(whole + start or 0), 10 ** len(start)) + once
  return -value if sign == "-" else value


def _value(text: str, depth: int = 0) -> Value | None:
  number = _literal(text)
  if number or depth > MAX_NESTING:
    return number
  if text in _INFINITY or _DATE_OR_TIME.fullmatch(text):
    return _INFINITY.get(text) or re.sub(r"[ .]", "", text).lower()
  if text.lower() in _COUNT:
    return Number(_COUNT[text.lower()])
  if WORDS.fullmatch(text) and not set(text.lower().split()) & MEANINGFUL_WORDS:
    return " ".join(text.casefold().split())
  if text.endswith("%"):
    number = _value(text[:-1].rstrip(), depth + 1)
    return number._replace(percent=True) if isinstance(number, Number) else None
  if scaled := _SCALED.fullmatch(text):
    number = _value(scaled[1], depth + 1)
    if not isinstance(number, Number) or not isinstance(number.value, Fraction):
      return None
    return Number(number.value * SCALES[scaled[2].lower()])
  if "=" in text and not re.search(r"[A-Za-z,;<>]|[!/]=", text):  # 2 + 3 = 5
    return _value(text.rsplit("=", 1)[1].strip(), depth + 1)
  if "," in text and text[:1] in "([":  # (1,234) is a point, 1,234 a number
    return _group(text, depth)
  if based := _BASED.fullmatch(text):
    return Composite("base", based.groups())
  if text[:1] == "(" and (number := _literal(text[1:-1].strip())):  # (073)
    return number
  value = exact_value(text)
  if value is None and _ROW.fullmatch(text):
    return Composite("row", tuple(Number(Fraction(item)) for item in text.split(" ")))
  return _group(text, depth) if value is None else Number(value)


def _group(text: str, depth: int) -> Composite | None:
  """Parses an interval, tuple, set, union or list. Returns None if an item has no value."""
  if text.startswith("\\pm"):
    number = _value(text[3:].strip(), depth + 1)
    if not isinstance(number, Number):
      return None
    return Composite("list", (number, number._replace(value=-number.value)))
  for command, bracket in (("\\{", "{"), ("\\}", "}"), ("\\lbrace", "{"), ("\\rbrace", "}")):
    text = text.replace(command, bracket)
  kind = "list"
  parts = None
  if "\\cup" in text:
    kind = "union"
    parts = _split(text, _UNION)
  elif text[:1] in OPEN and text[-1:] in CLOSE and len(text) > 1:
    parts = _split(text[1:-1], _SEPARATOR)
    kind = text[0] + text[-1] if parts else kind
  parts = parts or _split(text, _SEPARATOR) or ()
  min_items = 2 if kind in ("list", "union", "()", "[]") else 1
  if not min_items <= len(parts) <= MAX_ITEMS:
    return None

  left_sides = [_LEFT_SIDE.match(part) for part in parts]
  names = [match[1] if match else "" for match in left_sides]
  items = tuple(
    _value(strip_units(part[match.end() :] if match else part), depth + 1)
    for part, match in zip(parts, left_sides, strict=True)
  )
  if None in items:
    return None
  if "" not in names and len(set(names)) == len(names) and kind in ("list", "()"):
    return Composite("named", items, tuple(re.sub(r"[\s=:]", "", name) for name in names))
  return Composite(kind, items)


def _split(text: str, separator: re.Pattern) -> list[str] | None:
  """Splits the text at separators outside of brackets. Returns None if brackets do not match."""
  parts = []
  depth = 0
  start = 0
  for match in re.finditer(rf"[(\[{{)\]}}]|{separator.pattern}", text):
    if match[0] in OPEN:
      depth += 1
    elif match[0] in CLOSE:
      depth -= 1
      if depth < 0:
        return None
    elif depth == 0:
      parts.append(text[start : match.start()])
      start = match.end()
  return None if depth else [part.strip() for part in (*parts, text[start:]) if part.strip()]


# Comparing.


def _same_numbers(a: Number, b: Number) -> bool | None:
  is_infinite = [isinstance(x.value, float) for x in (a, b)]
  if any(is_infinite):
    return None if all(is_infinite) and a.value == b.value else False
  if a.percent == b.percent:
    return _near(a, b)
  percent, plain = (a, b) if a.percent else (b, a)
  as_fraction = percent._replace(value=percent.value / 100, places=percent.places + 2)
  # "50 %" equals both 0.5 and 50, but "0.5 %" does not equal 0.5.
  return _near(as_fraction, plain) or (abs(percent.value) >= 1 and _near(percent, plain))


def _near(a: Number, b: Number) -> bool:
  """Returns whether two numbers are equal, or one is a decimal expansion of the other.

  An expansion must be rounded or truncated after at least six digits, and the other number must be
  a fraction without a finite decimal expansion.
  """
  if a.value == b.value:
    return True
  for short, full in ((a, b), (b, a)):
    six_digits = short.places >= 6 and abs(short.value) * 10**short.places >= 10**5
    denominator = full.value.denominator
    is_endless = 10 ** denominator.bit_length() % denominator != 0
    if six_digits and full.places == 0 and is_endless:
      scaled = full.value * 10**short.places
      written = short.value * 10**short.places
      return written in (int(scaled), round(scaled))
  return False


def _same_groups(a: Composite, b: Composite) -> bool | None:
  if len(a.items) != len(b.items):
    return False
  kinds = {a.kind, b.kind}
  if kinds == {"named"} and set(a.names) == set(b.names):
    reordered = [a.items[a.names.index(name)] for name in b.names]
    return _all(same(x, y) for x, y in zip(reordered, b.items, strict=True))
  if kinds <= {"list", "{}"} or kinds == {"union"}:
    unmatched = list(b.items)
    for item in a.items:
      match = next((other for other in unmatched if same(item, other)), None)
      if match is None:
        return False
      unmatched.remove(match)
    return True
  if len(kinds) == 1 or kinds <= {"list", "()", "named"}:
    return _all(same(x, y) for x, y in zip(a.items, b.items, strict=True))
  return False


def _all(verdicts: Iterable[bool | None]) -> bool | None:
  verdicts = list(verdicts)
  return False if False in verdicts else None if None in verdicts else True
