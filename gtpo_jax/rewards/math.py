"""Whether the answer a completion gives equals the gold answer: exact arithmetic first, math-verify in killable workers for the rest.

Most answers are numbers, and two numbers are compared here with fractions, without SymPy, right and wrong alike. Only what is left
(roots, symbols, matrices, inequalities) goes to math-verify, which is slow and can hang, in the workers of `pool.py`.

A verdict is None only where none was reached:
  - the check was stopped at its limit, or its worker died, or math-verify failed or cannot read the gold answer, or gold is empty;
  - the answer is refused unread: over MAX_CHARS characters, nested over MAX_DEPTH deep, a tower of powers, or a power or factorial
    of a number with many digits, unless it is decided first. Decided first are equal strings, parentheses around one number however
    many, and integer arithmetic: `(((72)))` is 72, and 9^{9^{9^9}} and (10^9)! are proved larger than 2^8000, so that they are wrong
    for any gold that is a number written out. That is a bound, not a guess; where no bound holds the verdict is None.

Sources: GSM8K (2110.14168, "#### 72"), MATH (2103.03874, \\boxed), DAPO (2503.14476, `Answer:`), math-verify 0.9.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo_jax.errors import UserError, nearest
from gtpo_jax.rewards.pool import Pool, shared_pool, wait_all

MAX_CHARS = 1000  # of an answer; the longest gold of MATH-500 has 159
MAX_DEPTH = 20  # of nested brackets in an answer
RULES = ("math", "dapo")


def math_correct(completion: str, gold: str, rule: str = "math", timeout_s: float = 5.0) -> bool | None:
  """Whether the completion's answer equals `gold`, or None where no verdict was reached. Raises for no text, never hangs.

  The answer is the last balanced `\\boxed{...}`; else the later of the last `Answer: ...` ("The answer is ...") and the last
  `#### ...`; else the last number. Gold may be written in the same ways. A completion without an answer is wrong.

  Args:
    completion: any text.
    gold: the answer, plain or within a solution.
    rule: "math"; or "dapo", DAPO's own verifier: the last `Answer:` line of the last 300 characters, equal as a normalised string.
    timeout_s: seconds a check in a worker may take.

  Raises:
    UserError: for an unknown rule.
  """
  return math_verdicts([completion], [gold], timeout_s, rule=rule)[0]


def math_verdicts(completions: Sequence[str], golds: Sequence[str], timeout_s: float = 5.0, workers: int | None = None, *,
                  rule: str = "math", pool: Pool | None = None) -> list[bool | None]:
  """`math_correct` of each pair, in order; what needs a worker is checked side by side while the rest is decided.

  Args:
    workers: processes, by default as many as cores; calls with the same number share them.
    pool: workers to use instead.

  Raises:
    UserError: for an unknown rule; ValueError where the two lists differ in length.
  """
  if rule not in RULES:
    raise UserError(f"rule must be one of {', '.join(RULES)}, got {rule!r}{nearest(rule, RULES)}")
  decide = _judge if rule == "math" else _dapo
  verdicts = []
  for completion, gold in zip(completions, golds, strict=True):
    verdict = decide(completion, gold)
    if isinstance(verdict, Undecided):
      pool = pool or shared_pool(workers)
      verdict = pool.submit(*verdict, timeout_s)
    verdicts.append(verdict)
  return wait_all(verdicts)


class Undecided(NamedTuple):
  """Two expressions for math-verify."""

  gold: str
  answer: str


def _judge(completion: str, gold: str) -> bool | Undecided | None:
  target, answer = gold_answer(gold), extract(completion)
  if not target.strip():
    return None
  return compare(target, answer) if answer else False


# The answer in a text.

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\.|[{}]", re.DOTALL)
_BOX_BARE = re.compile(r"\\boxed\s+([-+]?[\w.,/]+)")
_ANSWER = re.compile(r"(?i)\banswer[*_]*(?:\s*[:：]|(?:\s+\w+){0,4}?\s+(?:is|equals)\b[*_]*:?|\s*=)[*_\s]*([^\n]+)")
_HASHES = re.compile(r"####[^\S\n]*([^\n]+)")
_DIGITS = r"\d{1,3}(?:,\d{3})+(?![\d,])|\d+"
_LAST = re.compile(rf"\d+(?:[-/:]\d+){{2,}}|\d+:\d+|(?:(?<![\w)\]}}])[-−])?(?:\\[dt]?frac\{{\d+\}}\{{\d+\}}|"
                   rf"(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d+|\s*\\?%)?)", re.ASCII)
_SENTENCE_END = re.compile(r"[.?](?:\s|$)")
_PROSE = re.compile(r"(?<![\\A-Za-z\d{])(?!(?:and|or|sqrt|sin|cos|tan|log|mod)\b)[A-Za-z]{3,}")  # words beyond a unit and a name
_DOLLARS = re.compile(r"(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\((.+?)\\\)")


def extract(completion: str) -> str | None:
  """The text of the answer a completion gives, or None where there is none; see `math_correct` for the order."""
  boxed = _boxed(completion)
  if boxed is not None:
    return boxed
  stated = [match for pattern in (_ANSWER, _HASHES) if (match := _last_match(pattern, completion))]
  for match in sorted(stated, key=lambda match: -match.start()):
    answer = _focus(match[1].strip())
    if answer:
      return answer
  return _last_number(completion)


def gold_answer(gold: str) -> str:
  """The answer in a gold text: boxed, after `####`, after `Answer:`, else all of it."""
  boxed = _boxed(gold)
  if boxed is not None:
    return boxed
  match = _last_match(_HASHES, gold) or _last_match(_ANSWER, gold)
  return match[1] if match else gold


def _last_match(pattern: re.Pattern, text: str) -> re.Match | None:
  match = None
  for match in pattern.finditer(text):  # noqa: B007
    pass
  return match


def _last_number(text: str) -> str | None:
  for window in (2000, len(text)):
    match = _last_match(_LAST, text[-window:])
    if match and (match.start() > MAX_CHARS or window >= len(text)):  # not one that the window may have cut
      return match[0]
  return None


def _boxed(text: str) -> str | None:
  """What the last balanced box holds: one pass with a stack, since a search from every box would be quadratic."""
  if "box" not in text:
    return None
  opened, found = [], None  # (start, whether of a box)
  for match in _BOX.finditer(text):
    if match[0] == "}":
      if opened:
        start, box = opened.pop()
        if box and (found is None or start > found[0]):
          found = start, match.start()
    elif match[1] or match[0] == "{":
      opened.append((match.end(), bool(match[1])))
  if found:
    return text[found[0]:found[1]]
  bare = _last_match(_BOX_BARE, text)
  return bare[1] if bare else None


def _focus(line: str) -> str | None:
  """The answer in the rest of an answer line: its formula if it has one in prose, its last number if it is prose."""
  if len(line) > MAX_CHARS:
    return _last_number(line)
  formulas = [a or b for a, b in _DOLLARS.findall(line)]
  if formulas and not _PROSE.search(clean(formulas[-1])):  # in "$5 more than $8" dollars are dollars
    return formulas[-1]
  sentence = line[:end.start()] if (end := _SENTENCE_END.search(line)) else line
  if _PROSE.search(read(sentence)[0]) and not _WORDS.fullmatch(clean(sentence)):
    return _last_number(sentence) or sentence
  return sentence


# One spelling for many.

_SIGNS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "∞": "\\infty ", "π": "\\pi ", "°": "",
    "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "≈": "=", "％": "%", "²": "^2", "³": "^3",
    "½": "\\frac{1}{2}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "’": "'", "`": "",
    **dict.fromkeys("\xa0\u2009\u202f", " "), **dict.fromkeys("€£¥₹"), **{0xFF10 + i: str(i) for i in range(10)}})
_SPELLINGS = [(re.compile(pattern), new) for pattern, new in (
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
    (r"\s+", " "))]
_UNIT = re.compile(r"(?:\s|(?<=[\d)}%])|(?<=[ A-Za-z][A-Za-z])(?=/))\s*(?:/|\bper\b)?\s*([A-Za-z]+)\.?\s*(?:\^\s*\{?-?[23]\}?)?$")
_words = str.split
_UNITS = frozenset(_words(
    "mm cm dm km in ft yd mi mg kg lb oz ml mL cl dl kW min sec hr day mph kph kmh am pm sq rad deg usd USD EUR men cup box car cat dog "
    "egg hat pen pie bag toy job way"))
_LETTER_UNITS = frozenset("mgshlLJNWVK")
_MEANING = frozenset(_words(  # words that are more than a unit
    "sqrt half third thirds quarter quarters fourth fourths fifth fifths dozen dozens hundred thousand million billion trillion factorial "
    "squared cubed infinity union and or"))
_NAME = re.compile(  # x =, f(2) =, a_1 =, x \in, total:
    r"\s*((?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?'?(?:\([\w, ]*\))?\s*(?:=|\\in(?![a-z]))|[A-Za-z][A-Za-z ]{2,40}\s*[:=])\s*(?=\S)")


_FUNCTION = re.compile(r"a?r?c?(?:sin|cos|tan|log|ln|sqrt|exp)")  # 5 sinx
_COMPOUND = re.compile(r"[<>,;]|\\[lg]e|\bor\b|\band\b|=.*[A-Za-z]|[A-Za-z].*=")  # then its first name is not all of its left side
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not in 7 2


def clean(text: str) -> str:
  """The text without formatting: dollars, spaces, \\text and \\left, markdown, degrees, a full stop; \\dfrac and √ as \\frac and \\sqrt."""
  text = text.translate(_SIGNS)
  for pattern, new in _SPELLINGS:
    text = pattern.sub(new, text)
  return text.lstrip(" *_:;,").rstrip(" .,;:*_")


def _without_units(text: str) -> str:
  """Words behind a number are its unit, unless they mean a number or an operation; units are not compared and not converted."""
  while match := _UNIT.search(text, max(0, len(text) - 60)):
    word, rest = match[1], text[:match.start()].rstrip()
    spaced = word in _LETTER_UNITS and not match[0].startswith(word)  # 5 m, 60 km/h; but 5m may be a product
    known = word in _UNITS or word.removesuffix("s") in _UNITS
    plain = len(word) >= 4 and word.lower() not in _MEANING and not _FUNCTION.match(word)
    if not (spaced or known or plain) or not re.search(r"\d|\\", rest):
      break
    text = rest
  return text


# Values that are compared exactly.

class Number(NamedTuple):
  """A number as written: `percent` says whether with a percent sign, `places` how many digits follow the point."""

  value: Fraction | float  # a float is +-infinity and stands for a number of at least 2**7999 in size, see _arithmetic
  percent: bool = False
  places: int = 0


class Group(NamedTuple):
  """Values in brackets: `kind` is the pair of brackets, "list" without any, "union" of intervals, or "named" as in x = 1, y = 2."""

  kind: str
  items: tuple
  names: tuple = ()


Value = Number | Group | str  # words, dates and times are strings

_NUMBER = re.compile(r"([-+]?) ?(?:(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.(\d*))?|\.(\d+))(?:[eE]([-+]?\d{1,3}))?", re.ASCII)
_SCALE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_COUNT = {word: Fraction(i) for i, word in enumerate(_words("zero one two three four five six seven eight nine ten eleven twelve"))}
_SCALED = re.compile(rf"(.*\d) ?({'|'.join(_SCALE)})s?")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{2,4}|\d\d?-\d\d?-\d{4}|\d+(?: ?: ?\d+)+(?: ?[aApP]\.?[mM]\.?)?", re.ASCII)
_WORDS = re.compile(r"(?=.*[^\W\d_]{4}|(?:yes|no|odd|all|one|two|six|ten|red)$)[^\W\d_]+\.?(?:[-' ]+[^\W\d_]+\.?)*", re.IGNORECASE)
_INFINITY = {"\\infty": "oo", "+\\infty": "oo", "-\\infty": "-oo", "infinity": "oo", "-infinity": "-oo"}


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
  value = Fraction(int((whole or "").replace(",", "").replace(" ", "") + digits), 10 ** len(digits)) * Fraction(10) ** power
  return Number(-value if sign == "-" else value, False, max(0, len(digits) - power))


@lru_cache(8192)
def read(text: str) -> tuple[str, Value | None]:
  """The cleaned text, and its value where it has one that needs no SymPy."""
  if number := _plain(text):
    return text, number
  text = _without_units(clean(text))
  named = _NAME.match(text)
  if named and (named[1].endswith("\\in") or not _COMPOUND.search(text, named.end())):
    text = _without_units(text[named.end():])
  return text, _value(text)


def _value(text: str, depth: int = 0) -> Value | None:
  number = _plain(text)
  if number or depth > 4:
    return number
  if text in _INFINITY or _DATE.fullmatch(text):
    return _INFINITY.get(text) or re.sub(r"[ .]", "", text).lower()
  if text.lower() in _COUNT:
    return Number(_COUNT[text.lower()])
  if _WORDS.fullmatch(text) and not set(text.lower().split()) & _MEANING:
    return " ".join(text.casefold().split())
  if text.endswith("%"):
    number = _value(text[:-1].rstrip(), depth + 1)
    return number._replace(percent=True) if isinstance(number, Number) else None
  if scaled := _SCALED.fullmatch(text):
    number = _value(scaled[1], depth + 1)
    return Number(number.value * _SCALE[scaled[2]]) if isinstance(number, Number) and isinstance(number.value, Fraction) else None
  if "=" in text and not re.search(r"[A-Za-z,;<>]", text):  # 2 + 3 = 5
    return _value(text.rsplit("=", 1)[1].strip(), depth + 1)
  if "," in text and text[:1] in "([":  # (1,234) is a point, 1,234 a number
    return _group(text, depth)
  if text[:1] == "(" and (number := _plain(text[1:-1].strip())):  # (073)
    return number
  value = _arithmetic(text)
  return _group(text, depth) if value is None else Number(value)


_OPEN, _CLOSE = "([{", ")]}"
_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")


def _split(text: str, separator: re.Pattern) -> list[str] | None:
  """The parts between separators outside of brackets; None where brackets do not pair up."""
  parts, depth, start = [], 0, 0
  for match in re.finditer(rf"[(\[{{)\]}}]|{separator.pattern}", text):
    if match[0] in _OPEN:
      depth += 1
    elif match[0] in _CLOSE:
      depth -= 1
      if depth < 0:
        return None
    elif depth == 0:
      parts.append(text[start:match.start()])
      start = match.end()
  return None if depth else [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _group(text: str, depth: int) -> Group | None:
  """Intervals, tuples, sets, unions and lists whose members have values; None else."""
  if text.startswith("\\pm"):
    number = _value(text[3:].strip(), depth + 1)
    return Group("list", (number, number._replace(value=-number.value))) if isinstance(number, Number) else None
  text = text.replace("\\{", "{").replace("\\}", "}").replace("\\lbrace", "{").replace("\\rbrace", "}")
  kind, parts = "list", None
  if "\\cup" in text:
    kind, parts = "union", _split(text, re.compile(r"\\cup(?![a-z])"))
  elif text[:1] in _OPEN and text[-1:] in _CLOSE and len(text) > 1:
    parts = _split(text[1:-1], _SEPARATOR)
    kind = text[0] + text[-1] if parts else kind
  parts = parts or _split(text, _SEPARATOR) or ()
  if not (2 if kind in ("list", "union", "()", "[]") else 1) <= len(parts) <= 50:
    return None
  names = [match[1] if (match := _NAME.match(part)) else "" for part in parts]
  items = tuple(_value(_without_units(part[match.end():] if (match := _NAME.match(part)) else part), depth + 1) for part in parts)
  if None in items:
    return None
  if "" not in names and len(set(names)) == len(names) and kind in ("list", "()"):
    return Group("named", items, tuple(re.sub(r"[\s=:]", "", name) for name in names))
  return Group(kind, items)


class _NotDecidedError(ArithmeticError):
  """The value has no bound that is cheap and certain."""


_TOKEN = re.compile(r" *(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\\cdot|\\times|\\div|[-+*/^!(){}])", re.ASCII)
_MIXED = re.compile(r"(?<![\d.,^}/])(\d+) ?(?: and )?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+) ?/ ?(\d+))", re.ASCII)
_FRAC = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_EXPONENT = re.compile(r"\^\{([^{}]*)\}")
_SAME_OPERATOR = {"\\cdot": "*", "\\times": "*", "\\div": "/"}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "minus": 3, "^": 4}
_VAST_BITS, _EXACT_BITS = 8000, 4000


def _tokens(text: str) -> list[str] | None:
  """Numbers, operators and brackets, with fractions as (a)/(b); None where there is anything else."""
  text = _MIXED.sub(lambda m: f"({m[1]}+{m[2] or m[4]}/{m[3] or m[5]})", text.replace("**", "^"))
  for _ in range(MAX_DEPTH):
    text, fractions = _FRAC.subn(r"((\1)/(\2))", text)
    text, exponents = _EXPONENT.subn(r"^(\1)", text)
    if not fractions + exponents:
      break
  text, tokens, position = text.rstrip(), [], 0
  while position < len(text):
    match = _TOKEN.match(text, position)
    if not match:
      return None
    tokens.append(_SAME_OPERATOR.get(match[1], match[1]))
    position = match.end()
  return tokens


def _arithmetic(text: str) -> Fraction | float | None:
  """The exact value of + - * / ^ ! and \\frac over numbers, in one pass without recursion; None where it is not such or not decided.

  +-infinity stands for a number proved to be at least 2**8000 in size. Exact values stay under 2**4000, so that the few sums a text
  of MAX_CHARS has room for leave it over 2**7999.
  """
  values, operators, operand = [], [], ""  # operand: the token that ended one, just before

  def apply() -> None:
    right, operator = values.pop(), operators.pop()
    values.append(_combine(Fraction(-1), "*", right) if operator == "minus" else _combine(values.pop(), operator, right))

  def push(operator: str) -> None:
    while operators and operators[-1] not in _OPEN and (_PRECEDENCE[operators[-1]], operator != "^") >= (_PRECEDENCE[operator], True):
      apply()
    operators.append(operator)

  try:
    for token in _tokens(text) or ():
      if token in _PRECEDENCE and (operand or token in "+-"):
        if operand:
          push(token)
        elif token == "-":
          operators.append("minus")
        operand = ""
      elif token in _CLOSE or token == "!":
        if not operand:
          return None
        while token != "!" and operators[-1] not in _OPEN:
          apply()
        if token == "!":
          values.append(_factorial(values.pop()))
        elif _OPEN.index(operators.pop()) != _CLOSE.index(token):
          return None
        operand = token
      elif token in _PRECEDENCE:
        return None
      else:
        if operand:  # side by side is a product; 3 4, 05 - 01 and 1/2(3) are not decided
          if (operand[0] not in ")}!" and token[0] not in _OPEN) or (operators and operators[-1] == "/"):
            return None
          push("*")
        if token in _OPEN:
          operators.append(token)
          operand = ""
        else:
          if token[0] == "0" and token[1:2].isdigit():
            return None
          values.append(Fraction(token.replace(",", "")))
          operand = token
    while operators:
      apply()
    return values[0] if len(values) == 1 and operand else None
  except (IndexError, KeyError, ArithmeticError):
    return None


def _combine(a: Fraction | float, operator: str, b: Fraction | float) -> Fraction | float:
  """One operation; +-infinity is a bound on the size, so that only operations which keep the bound are done on it."""
  if operator == "^":
    return _power(a, b)
  if operator == "-":
    return _combine(a, "+", -b)
  if operator == "/":
    if isinstance(b, float):
      raise _NotDecidedError
    return _combine(a, "*", 1 / b)
  vast = [x for x in (a, b) if isinstance(x, float)]
  if not vast:
    return _exact(a + b if operator == "+" else a * b)
  if operator == "+":
    if len(set(vast)) > 1:
      raise _NotDecidedError
    return vast[0]
  if 0 in (a, b):
    return Fraction(0)
  if min(abs(a), abs(b)) < 1:
    raise _NotDecidedError
  return float("inf") if (a > 0) == (b > 0) else float("-inf")


def _exact(value: Fraction) -> Fraction:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > _EXACT_BITS:
    raise _NotDecidedError
  return value


def _power(a: Fraction | float, b: Fraction | float) -> Fraction | float:
  if isinstance(b, float):
    if b > 0 and a >= 2:
      return b
    raise _NotDecidedError
  if b.denominator != 1:
    raise _NotDecidedError
  n = b.numerator
  if isinstance(a, float):
    if n <= 0:
      raise _NotDecidedError
    return a if n % 2 else abs(a)
  if abs(a) in (0, 1):
    return a ** (n % 2 + 2) if n > 0 or a else a**n
  bits = max(abs(a.numerator).bit_length(), a.denominator.bit_length())
  if a.denominator == 1 and n > 0 and (bits - 1) * n >= _VAST_BITS:
    return float("-inf") if a < 0 and n % 2 else float("inf")
  if bits * abs(n) > _EXACT_BITS:
    raise _NotDecidedError
  return a**n


def _factorial(n: Fraction | float) -> Fraction | float:
  if n == float("inf") or (n >= 1000 and n.denominator == 1):  # 1000! > 2**8529
    return float("inf")
  if not 0 <= n <= 400 or n.denominator != 1:
    raise _NotDecidedError
  product = 1
  for factor in range(2, n.numerator + 1):
    product *= factor
  return Fraction(product)


# The comparison.

_TOO_COSTLY = re.compile(
    r"\^[\s{(]*-?\d{6,}|\^[\s{(]*-?\d+\s*\^[\s{(]*-?\d"
    r"|\d{5,}[\s)}]*!|!\s*[)}]*\s*!|\^[^!]{0,20}[)}]\s*!|\^[^^]{0,40}\^[^^]{0,40}\^|\d{301}", re.ASCII)
_LETTER = re.compile(r"\(?([A-J])\)?")
_LETTER_FIRST = re.compile(r"\(?([A-J])(?:[.):]|\)?$)")


def compare(gold: str, answer: str) -> bool | Undecided | None:
  """Whether two answers are equal, where that is decided cheaply; None where the answer is refused; else the pair for math-verify."""
  gold, answer = _unwrap(gold.strip()), _unwrap(answer.strip())
  if gold == answer:
    return True
  if max(len(gold), len(answer)) > MAX_CHARS:
    return None
  (gold, target), (answer, value) = read(gold), read(answer)
  if not gold:
    return None
  if _SPACE.sub("", gold) == _SPACE.sub("", answer):
    return True
  if (letter := _LETTER.fullmatch(gold)) and (chosen := _LETTER_FIRST.match(answer)):
    return letter[1] == chosen[1]
  if not answer:
    return False
  if target is not None and value is not None:
    verdict = same(target, value)
    if verdict is not None:
      return verdict
  elif isinstance(target, str) and target not in ("oo", "-oo"):
    return False  # not these words; math-verify would multiply their letters, and take "evil" for "live"
  if _depth(answer) > MAX_DEPTH or _TOO_COSTLY.search(answer):
    return None
  return Undecided(_latex(gold), _latex(answer))


def _latex(text: str) -> str:
  return re.sub(r"\b(and|or)\b", r" \\text{ \1 } ", text.replace("**", "^").replace("*", "\\cdot "))


def _unwrap(text: str) -> str:
  """Any number of round brackets around something without such brackets becomes one pair."""
  if not text.startswith("((") or not text.endswith("))"):
    return text
  left, right = len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")"))
  inner = text[left:-right]
  return f"({inner})" if left == right and "(" not in inner and ")" not in inner else text


def _depth(text: str) -> int:
  depth = deepest = 0
  for sign in text:
    depth += (sign in _OPEN) - (sign in _CLOSE)
    deepest = max(deepest, depth)
  return deepest


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
  return _near(share._replace(value=share.value / 100, places=share.places + 2), plain) or (abs(share.value) >= 1 and _near(share, plain))


def _near(a: Number, b: Number) -> bool:
  """Equal, or one is the other in decimals: rounded or cut after six digits at least, of a fraction without an end."""
  if a.value == b.value:
    return True
  for short, full in ((a, b), (b, a)):
    six_digits, period = short.places >= 6 and abs(short.value) * 10**short.places >= 10**5, full.value.denominator
    if six_digits and full.places == 0 and 10 ** period.bit_length() % period:
      scaled, written = full.value * 10**short.places, short.value * 10**short.places
      return written in (int(scaled), round(scaled))
  return False


def _same_groups(a: Group, b: Group) -> bool | None:
  if len(a.items) != len(b.items):
    return False
  kinds = {a.kind, b.kind}
  if kinds == {"named"} and set(a.names) == set(b.names):
    pairs = [(a.items[a.names.index(name)], item) for name, item in zip(b.names, b.items, strict=True)]
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


# DAPO's verifier, for faithful comparisons.

_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
    *((word, "") for word in _words(
        "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds meters "
        "meals edges students childrentickets multiples \\text{s} \\text{.}")),
    *((text, "") for text in ("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}",
                              "\\;", ",\\!", "{,}", '"', "\\dots")))
_DAPO_REWRITTEN = [(re.compile(pattern), new) for pattern, new in (
    (r".*?\$(.*?)\$.*", r"$\1$"), (r"\\text\{(.*?)\}", r"\1"), (r"\\textbf\{(.*?)\}", r"\1"), (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"), (r"frac([^{])(.)", r"frac{\1}{\2}"), (r"sqrt([^{])", r"sqrt{\1}"))]


def _dapo(completion: str, gold: str) -> bool | None:
  """DAPO's rule (2503.14476; verl's math_dapo): string equality; None for a gold over MAX_CHARS characters."""
  if not gold.strip() or len(gold) > MAX_CHARS:
    return None
  stated = _last_match(_DAPO_ANSWER, completion[-300:])
  return _dapo_spelling(stated[1] if stated else "[INVALID]") == _dapo_spelling(gold)


def _dapo_spelling(text: str) -> str:
  text = text.split("=")[-1]
  for old, new in _DAPO_REPLACED:
    text = text.replace(old, new)
  for pattern, new in _DAPO_REWRITTEN:
    text = pattern.sub(new, text)
  text = text.replace("$", "")
  digits = text.replace(",", "")
  return (digits if digits.isdigit() else text).strip()
