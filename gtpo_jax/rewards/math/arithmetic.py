"""Exact rational arithmetic on answer strings such as `2^{10} + \\frac{3}{4}`, `7!` and `1 1/2`.

The result is an exact fraction, +-infinity if the magnitude is provably at least 2**7999, or None
if undecided. The parser does not recurse, and intermediate values stay small.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_DEPTH = 20  # deepest nesting of brackets in an answer
OPEN = "([{"
CLOSE = ")]}"


class EvaluationError(ArithmeticError):
  """Raised if a text is malformed, or if its value can be neither computed nor bounded cheaply."""


_TOKEN = re.compile(
  r" *(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\\cdot|\\times|\\div|[-+*/^!(){}])",
  re.ASCII,
)
_MIXED = re.compile(
  r"(?<![\d.,^}/])(\d+) ?(?: and )?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+) ?/ ?(\d+))", re.ASCII
)
_FRAC = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_EXPONENT = re.compile(r"\^\{([^{}]*)\}")
_SAME_OPERATOR = {"\\cdot": "*", "\\times": "*", "\\div": "/"}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "minus": 3, "^": 4}
# Exact values stay below 2**4000; a power proved to be at least 2**8000 is represented by
# +-infinity. The gap absorbs additions: the few sums that fit into an answer of MAX_CHARS
# characters cannot bring an infinity below 2**7999.
_EXACT_BITS = 4000
_INFINITY_BITS = 8000


def _tokens(text: str) -> list[str] | None:
  """Splits the text into numbers, operators and brackets; returns None if it has anything else.

  Rewrites \\frac{a}{b} as ((a)/(b)), ^{a} as ^(a), and a mixed number such as 1 1/2 as (1+1/2).
  """
  text = _MIXED.sub(lambda m: f"({m[1]}+{m[2] or m[4]}/{m[3] or m[5]})", text.replace("**", "^"))
  for _ in range(MAX_DEPTH):
    text, fractions = _FRAC.subn(r"((\1)/(\2))", text)
    text, exponents = _EXPONENT.subn(r"^(\1)", text)
    if not fractions + exponents:
      break
  text = text.rstrip()
  tokens = []
  position = 0
  while position < len(text):
    match = _TOKEN.match(text, position)
    if not match:
      return None
    tokens.append(_SAME_OPERATOR.get(match[1], match[1]))
    position = match.end()
  return tokens


def exact_value(text: str) -> Fraction | float | None:
  """Evaluates numbers with + - * / ^ ! and \\frac in one pass, without recursion.

  Returns:
    The exact value as a fraction. +-infinity if its magnitude is provably at least 2**8000 (2**7999
    after additions). None if the text is not such an expression or its value is undecided.
  """
  parser = _Parser()
  try:
    for token in _tokens(text) or ():
      parser.read(token)
    return parser.result()
  except (IndexError, KeyError, ArithmeticError):
    return None


class _Parser:
  """A shunting-yard parser that evaluates the expression while it reads the tokens."""

  def __init__(self):
    self._values: list[Fraction | float] = []
    self._operators: list[str] = []
    self._operand = ""  # the previous token if it ended an operand

  def read(self, token: str) -> None:
    """Consumes the next token. Raises EvaluationError, IndexError or KeyError."""
    if token in _PRECEDENCE and (self._operand or token in "+-"):
      if self._operand:
        self._push(token)
      elif token == "-":
        self._operators.append("minus")
      self._operand = ""
    elif token in CLOSE or token == "!":
      self._close_operand(token)
    elif token in _PRECEDENCE:  # a binary operator without a left operand
      raise EvaluationError
    else:
      self._open_operand(token)

  def result(self) -> Fraction | float | None:
    """Returns the value of all tokens, or None if they are not one complete expression."""
    while self._operators:
      self._apply()
    return self._values[0] if len(self._values) == 1 and self._operand else None

  def _open_operand(self, token: str) -> None:
    """Reads a number or an opening bracket."""
    # Implicit multiplication: 2(3) is 6. Two numbers without an operator (3 4) and a product after
    # a division (1/2(3)) are ambiguous, so they are undecided.
    if self._operand:
      two_numbers = self._operand[0] not in ")}!" and token[0] not in OPEN
      after_division = self._operators and self._operators[-1] == "/"
      if two_numbers or after_division:
        raise EvaluationError
      self._push("*")
    if token in OPEN:
      self._operators.append(token)
      self._operand = ""
    else:
      if token[0] == "0" and token[1:2].isdigit():  # leading zeros, as in the date 05-01
        raise EvaluationError
      self._values.append(Fraction(token.replace(",", "")))
      self._operand = token

  def _close_operand(self, token: str) -> None:
    """Reads a closing bracket or a factorial."""
    if not self._operand:
      raise EvaluationError
    if token == "!":
      self._values.append(_factorial(self._values.pop()))
    else:
      while self._operators[-1] not in OPEN:
        self._apply()
      if OPEN.index(self._operators.pop()) != CLOSE.index(token):
        raise EvaluationError
    self._operand = token

  def _push(self, operator: str) -> None:
    """Adds a binary operator after applying operators that bind at least as tightly."""
    limit = (_PRECEDENCE[operator], True)
    while self._operators and self._operators[-1] not in OPEN:
      if (_PRECEDENCE[self._operators[-1]], operator != "^") < limit:
        break
      self._apply()
    self._operators.append(operator)

  def _apply(self) -> None:
    right = self._values.pop()
    operator = self._operators.pop()
    if operator == "minus":
      value = _combine(Fraction(-1), "*", right)
    else:
      value = _combine(self._values.pop(), operator, right)
    self._values.append(value)


def _combine(a: Fraction | float, operator: str, b: Fraction | float) -> Fraction | float:
  """Applies one binary operation.

  +-infinity stands for an unknown number of at least 2**7999 in magnitude. Only operations for
  which this bound still holds accept it.
  """
  if operator == "^":
    return _power(a, b)
  if operator == "-":
    return _combine(a, "+", -b)
  if operator == "/":
    if isinstance(b, float):
      raise EvaluationError
    return _combine(a, "*", 1 / b)
  infinities = [x for x in (a, b) if isinstance(x, float)]
  if not infinities:
    return _check_size(a + b if operator == "+" else a * b)
  if operator == "+":
    if len(set(infinities)) > 1:
      raise EvaluationError
    return infinities[0]
  if 0 in (a, b):
    return Fraction(0)
  if min(abs(a), abs(b)) < 1:
    raise EvaluationError
  return float("inf") if (a > 0) == (b > 0) else float("-inf")


def _check_size(value: Fraction) -> Fraction:
  """Returns the value, or raises EvaluationError if it has more than _EXACT_BITS bits."""
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > _EXACT_BITS:
    raise EvaluationError
  return value


def _power(a: Fraction | float, b: Fraction | float) -> Fraction | float:
  if isinstance(b, float):
    if b > 0 and a >= 2:
      return b
    raise EvaluationError
  if b.denominator != 1:
    raise EvaluationError
  n = b.numerator
  if isinstance(a, float):
    if n <= 0:
      raise EvaluationError
    return a if n % 2 else abs(a)
  if abs(a) in (0, 1):
    return a ** (n % 2 + 2) if n > 0 or a else a**n
  bits = max(abs(a.numerator).bit_length(), a.denominator.bit_length())
  if a.denominator == 1 and n > 0 and (bits - 1) * n >= _INFINITY_BITS:
    return float("-inf") if a < 0 and n % 2 else float("inf")
  if bits * abs(n) > _EXACT_BITS:
    raise EvaluationError
  return a**n


def _factorial(n: Fraction | float) -> Fraction | float:
  if n == float("inf") or (n >= 1000 and n.denominator == 1):  # 1000! > 2**8529
    return float("inf")
  if not 0 <= n <= 400 or n.denominator != 1:
    raise EvaluationError
  return Fraction(math.factorial(n.numerator))
