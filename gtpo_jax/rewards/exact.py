"""Integer arithmetic as answers write it, exactly: `2^{10} + \\frac{3}{4}`, `7!`, mixed numbers. Nothing recurses, nothing grows large.

A result is a fraction, or a proof that it is at least 2**7999 in size, or undecided.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DEPTH = 20  # of nested brackets in an answer
OPEN, CLOSE = "([{", ")]}"


class NotDecidedError(ArithmeticError):
  """The value has no bound that is cheap and certain."""


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
_VAST_BITS, _EXACT_BITS = 8000, 4000


def _tokens(text: str) -> list[str] | None:
  """Numbers, operators and brackets, with fractions as (a)/(b); None where there is anything else."""
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


def arithmetic(text: str) -> Fraction | float | None:
  """The exact value of + - * / ^ ! and \\frac over numbers, in one pass without recursion; None where it is not such or not decided.

  +-infinity stands for a number proved to be at least 2**8000 in size. Exact values stay under 2**4000, so that the few sums a text
  of MAX_CHARS has room for leave it over 2**7999.
  """
  values = []  # operand: the token that ended one, just before
  operators = []
  operand = ""

  def apply() -> None:
    right = values.pop()
    operator = operators.pop()
    values.append(
      _combine(Fraction(-1), "*", right)
      if operator == "minus"
      else _combine(values.pop(), operator, right)
    )

  def push(operator: str) -> None:
    while (
      operators
      and operators[-1] not in OPEN
      and (_PRECEDENCE[operators[-1]], operator != "^") >= (_PRECEDENCE[operator], True)
    ):
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
      elif token in CLOSE or token == "!":
        if not operand:
          return None
        while token != "!" and operators[-1] not in OPEN:
          apply()
        if token == "!":
          values.append(_factorial(values.pop()))
        elif OPEN.index(operators.pop()) != CLOSE.index(token):
          return None
        operand = token
      elif token in _PRECEDENCE:
        return None
      else:
        if operand:  # side by side is a product; 3 4, 05 - 01 and 1/2(3) are not decided
          if (operand[0] not in ")}!" and token[0] not in OPEN) or (
            operators and operators[-1] == "/"
          ):
            return None
          push("*")
        if token in OPEN:
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
      raise NotDecidedError
    return _combine(a, "*", 1 / b)
  vast = [x for x in (a, b) if isinstance(x, float)]
  if not vast:
    return _exact(a + b if operator == "+" else a * b)
  if operator == "+":
    if len(set(vast)) > 1:
      raise NotDecidedError
    return vast[0]
  if 0 in (a, b):
    return Fraction(0)
  if min(abs(a), abs(b)) < 1:
    raise NotDecidedError
  return float("inf") if (a > 0) == (b > 0) else float("-inf")


def _exact(value: Fraction) -> Fraction:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > _EXACT_BITS:
    raise NotDecidedError
  return value


def _power(a: Fraction | float, b: Fraction | float) -> Fraction | float:
  if isinstance(b, float):
    if b > 0 and a >= 2:
      return b
    raise NotDecidedError
  if b.denominator != 1:
    raise NotDecidedError
  n = b.numerator
  if isinstance(a, float):
    if n <= 0:
      raise NotDecidedError
    return a if n % 2 else abs(a)
  if abs(a) in (0, 1):
    return a ** (n % 2 + 2) if n > 0 or a else a**n
  bits = max(abs(a.numerator).bit_length(), a.denominator.bit_length())
  if a.denominator == 1 and n > 0 and (bits - 1) * n >= _VAST_BITS:
    return float("-inf") if a < 0 and n % 2 else float("inf")
  if bits * abs(n) > _EXACT_BITS:
    raise NotDecidedError
  return a**n


def _factorial(n: Fraction | float) -> Fraction | float:
  if n == float("inf") or (n >= 1000 and n.denominator == 1):  # 1000! > 2**8529
    return float("inf")
  if not 0 <= n <= 400 or n.denominator != 1:
    raise NotDecidedError
  product = 1
  for factor in range(2, n.numerator + 1):
    product *= factor
  return Fraction(product)
