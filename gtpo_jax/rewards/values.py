"""Answers as values that are compared without SymPy: one spelling for many, then numbers, groups of them, dates and words."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo_jax.rewards.exact import CLOSE, OPEN, arithmetic

# One spelling for many.

_SIGNS = str.maketrans(
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
    "％": "%",
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
    **dict.fromkeys("€£¥₹"),
    **{0xFF10 + i: str(i) for i in range(10)},
  }
)
_SPELLINGS = [
  (re.compile(pattern), new)
  for pattern, new in (
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", ","),
    (r"(?<!\\)\\[,!;: ]|~|\\q?quad(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle", " "),
    (r"\\(?:left|right)(?![a-z])\.?", ""),
    (r"(?<!\\)\\?\$|(?<!\\)\\[()]|^\s*\\\[|\\\]\s*$", ""),
    (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![a-z])", ""),
    (r"\\%|\\percent|\bper\s?cent\b", "%"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))", r"\\frac{\1\2}{\3\4}"),
    (r"(?:√|\\sqrt(?![a-z{\[]))\s*(\w)(?![\w.])|√\s*(\d+)", r"\\sqrt{\1\2}"),
    (r"(?:√|\\?\bsqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\\w])pi\b", r"\\pi "),
    (r"\\approx(?![a-z])", "="),
    (r"^\s*(?:approximately|approx\.?|about|around|roughly|exactly|USD|EUR)\s+", ""),
    (r"\s+", " "),
  )
]
_UNIT = re.compile(
  r"(?:\s|(?<=[\d)}%])|(?<=[ A-Za-z][A-Za-z])(?=/))\s*(?:/|\bper\b)?\s*([A-Za-z]+)\.?\s*(?:\^\s*\{?-?[23]\}?)?$"
)
_words = str.split
_UNITS = frozenset(
  _words(
    "mm cm dm km in ft yd mi mg kg lb oz ml mL cl dl kW min sec hr day mph kph kmh am pm sq rad deg usd USD EUR men cup box car cat dog "
    "egg hat pen pie bag toy job way"
  )
)
_LETTER_UNITS = frozenset("mgshlLJNWVK")
_MEANING = frozenset(
  _words(  # words that are more than a unit
    "sqrt half third thirds quarter quarters fourth fourths fifth fifths dozen dozens hundred thousand million billion trillion factorial "
    "squared cubed infinity union and or"
  )
)
_NAME = re.compile(  # x =, f(2) =, a_1 =, x \in, total:
  r"\s*((?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?'?(?:\([\w, ]*\))?\s*(?:=|\\in(?![a-z]))|[A-Za-z][A-Za-z ]{2,40}\s*[:=])\s*(?=\S)"
)


_FUNCTION = re.compile(r"a?r?c?(?:sin|cos|tan|log|ln|sqrt|exp)")  # 5 sinx
_COMPOUND = re.compile(
  r"[<>,;]|\\[lg]e|\bor\b|\band\b|=.*[A-Za-z]|[A-Za-z].*="
)  # then its first name is not all of its left side
SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not in 7 2


def clean(text: str) -> str:
  """The text without formatting: dollars, spaces, \\text and \\left, markdown, degrees, a full stop; \\dfrac and √ as \\frac and \\sqrt."""
  text = text.translate(_SIGNS)
  for pattern, new in _SPELLINGS:
    text = pattern.sub(new, text)
  return text.lstrip(" *_:;,").rstrip(" .,;:*_")


def _without_units(text: str) -> str:
  """Words behind a number are its unit, unless they mean a number or an operation; units are not compared and not converted."""
  while match := _UNIT.search(text, max(0, len(text) - 60)):
    word = match[1]
    rest = text[: match.start()].rstrip()
    spaced = word in _LETTER_UNITS and not match[0].startswith(
      word
    )  # 5 m, 60 km/h; but 5m may be a product
    known = word in _UNITS or word.removesuffix("s") in _UNITS
    plain = len(word) >= 4 and word.lower() not in _MEANING and not _FUNCTION.match(word)
    if not (spaced or known or plain) or not re.search(r"\d|\\", rest):
      break
    text = rest
  return text


# Values that are compared exactly.


class Number(NamedTuple):
  """A number as written: `percent` says whether with a percent sign, `places` how many digits follow the point."""

  value: (
    Fraction | float
  )  # a float is +-infinity and stands for a number of at least 2**7999 in size, see arithmetic
  percent: bool = False
  places: int = 0


class Group(NamedTuple):
  """Values in brackets: `kind` is the pair of brackets, "list" without any, "union" of intervals, or "named" as in x = 1, y = 2."""

  kind: str
  items: tuple
  names: tuple = ()


Value = Number | Group | str  # words, dates and times are strings

_NUMBER = re.compile(
  r"([-+]?) ?(?:(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.(\d*))?|\.(\d+))(?:[eE]([-+]?\d{1,3}))?",
  re.ASCII,
)
_SCALE = {
  "hundred": 100,
  "thousand": 1000,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "dozen": 12,
}
_COUNT = {
  word: Fraction(i)
  for i, word in enumerate(
    _words("zero one two three four five six seven eight nine ten eleven twelve")
  )
}
_SCALED = re.compile(rf"(.*\d) ?({'|'.join(_SCALE)})s?")
_DATE = re.compile(
  r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{2,4}|\d\d?-\d\d?-\d{4}|\d+(?: ?: ?\d+)+(?: ?[aApP]\.?[mM]\.?)?",
  re.ASCII,
)
WORDS = re.compile(
  r"(?=.*[^\W\d_]{4}|(?:yes|no|odd|all|one|two|six|ten|red)$)[^\W\d_]+\.?(?:[-' ]+[^\W\d_]+\.?)*",
  re.IGNORECASE,
)
_INFINITY = {
  "\\infty": "oo",
  "+\\infty": "oo",
  "-\\infty": "-oo",
  "infinity": "oo",
  "-infinity": "-oo",
}


def _plain(text: str) -> Number | None:
  """A number that is written out."""
  match = _NUMBER.fullmatch(text)
  if not match:
    return None
  sign, whole, places, point, exponent = match.groups()
  digits = places or point or ""
  power = int(exponent or 0)
  if abs(power) > 200:
    return None
  value = (
    Fraction(int((whole or "").replace(",", "").replace(" ", "") + digits), 10 ** len(digits))
    * Fraction(10) ** power
  )
  return Number(-value if sign == "-" else value, False, max(0, len(digits) - power))


@lru_cache(8192)
def read(text: str) -> tuple[str, Value | None]:
  """The cleaned text, and its value where it has one that needs no SymPy."""
  if number := _plain(text):
    return text, number
  text = _without_units(clean(text))
  named = _NAME.match(text)
  if named and (named[1].endswith("\\in") or not _COMPOUND.search(text, named.end())):
    text = _without_units(text[named.end() :])
  return text, _value(text)


def _value(text: str, depth: int = 0) -> Value | None:
  number = _plain(text)
  if number or depth > 4:
    return number
  if text in _INFINITY or _DATE.fullmatch(text):
    return _INFINITY.get(text) or re.sub(r"[ .]", "", text).lower()
  if text.lower() in _COUNT:
    return Number(_COUNT[text.lower()])
  if WORDS.fullmatch(text) and not set(text.lower().split()) & _MEANING:
    return " ".join(text.casefold().split())
  if text.endswith("%"):
    number = _value(text[:-1].rstrip(), depth + 1)
    return number._replace(percent=True) if isinstance(number, Number) else None
  if scaled := _SCALED.fullmatch(text):
    number = _value(scaled[1], depth + 1)
    return (
      Number(number.value * _SCALE[scaled[2]])
      if isinstance(number, Number) and isinstance(number.value, Fraction)
      else None
    )
  if "=" in text and not re.search(r"[A-Za-z,;<>]", text):  # 2 + 3 = 5
    return _value(text.rsplit("=", 1)[1].strip(), depth + 1)
  if "," in text and text[:1] in "([":  # (1,234) is a point, 1,234 a number
    return _group(text, depth)
  if text[:1] == "(" and (number := _plain(text[1:-1].strip())):  # (073)
    return number
  value = arithmetic(text)
  return _group(text, depth) if value is None else Number(value)


_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")


def _split(text: str, separator: re.Pattern) -> list[str] | None:
  """The parts between separators outside of brackets; None where brackets do not pair up."""
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


def _group(text: str, depth: int) -> Group | None:
  """Intervals, tuples, sets, unions and lists whose members have values; None else."""
  if text.startswith("\\pm"):
    number = _value(text[3:].strip(), depth + 1)
    return (
      Group("list", (number, number._replace(value=-number.value)))
      if isinstance(number, Number)
      else None
    )
  text = (
    text.replace("\\{", "{").replace("\\}", "}").replace("\\lbrace", "{").replace("\\rbrace", "}")
  )
  kind, parts = "list", None
  if "\\cup" in text:
    kind = "union"
    parts = _split(text, re.compile(r"\\cup(?![a-z])"))
  elif text[:1] in OPEN and text[-1:] in CLOSE and len(text) > 1:
    parts = _split(text[1:-1], _SEPARATOR)
    kind = text[0] + text[-1] if parts else kind
  parts = parts or _split(text, _SEPARATOR) or ()
  if not (2 if kind in ("list", "union", "()", "[]") else 1) <= len(parts) <= 50:
    return None
  names = [match[1] if (match := _NAME.match(part)) else "" for part in parts]
  items = tuple(
    _value(_without_units(part[match.end() :] if (match := _NAME.match(part)) else part), depth + 1)
    for part in parts
  )
  if None in items:
    return None
  if "" not in names and len(set(names)) == len(names) and kind in ("list", "()"):
    return Group("named", items, tuple(re.sub(r"[\s=:]", "", name) for name in names))
  return Group(kind, items)


def same(a: Value, b: Value) -> bool | None:
  """Whether two values are equal; None where the bounds do not tell."""
  if isinstance(a, Group) and isinstance(b, Group):
    return _same_groups(a, b)
  if isinstance(a, Group) or isinstance(b, Group):
    group, other = (a, b) if isinstance(a, Group) else (b, a)
    return same(group.items[0], other) if len(group.items) == 1 else False
  if isinstance(a, str) or isinstance(b, str):
    return a == b
  vast = [isinstance(x.value, float) for x in (a, b)]
  if any(vast):
    return None if all(vast) and a.value == b.value else False
  if a.percent == b.percent:
    return _near(a, b)
  share, plain = (a, b) if a.percent else (b, a)
  return _near(share._replace(value=share.value / 100, places=share.places + 2), plain) or (
    abs(share.value) >= 1 and _near(share, plain)
  )


def _near(a: Number, b: Number) -> bool:
  """Equal, or one is the other in decimals: rounded or cut after six digits at least, of a fraction without an end."""
  if a.value == b.value:
    return True
  for short, full in ((a, b), (b, a)):
    six_digits = short.places >= 6 and abs(short.value) * 10**short.places >= 10**5
    period = full.value.denominator
    if six_digits and full.places == 0 and 10 ** period.bit_length() % period:
      scaled = full.value * 10**short.places
      written = short.value * 10**short.places
      return written in (int(scaled), round(scaled))
  return False


def _same_groups(a: Group, b: Group) -> bool | None:
  if len(a.items) != len(b.items):
    return False
  kinds = {a.kind, b.kind}
  if kinds == {"named"} and set(a.names) == set(b.names):
    pairs = [
      (a.items[a.names.index(name)], item) for name, item in zip(b.names, b.items, strict=True)
    ]
    return _all(same(x, y) for x, y in pairs)
  if kinds <= {"list", "{}"} or kinds == {"union"}:
    left = list(b.items)
    for item in a.items:
      match = next((other for other in left if same(item, other)), None)
      if match is None:
        return False
      left.remove(match)
    return True
  if len(kinds) == 1 or kinds <= {"list", "()", "named"}:
    return _all(same(x, y) for x, y in zip(a.items, b.items, strict=True))
  return False


def _all(verdicts) -> bool | None:
  verdicts = list(verdicts)
  return False if False in verdicts else None if None in verdicts else True
