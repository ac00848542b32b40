"""Truth marks: which characters of a completion decide its verdict, and which of them are wrong.

On most problems nobody knows. On the synthetic tasks, and on problems whose row has a column
`truth`, it can be computed. Marks are a text as long as the completion, one letter per character:

  d  a decision: in a correct completion, another character of its kind makes the verdict wrong
  c  copied or computed from earlier text; if changed, the verdict is wrong too
  f  filler: any other letter gives the same verdict
  i  fixed by the format, such as `=`, and decides nothing
  D, C  a decision or a copy that is wrong

Marks are None if the text does not have the form of an answer. Any text is accepted.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.rewards.math.values import Number, read, same

Extra = Mapping[str, Any]
Numbers = tuple[int, ...]  # the numbers that a countdown step may use, ascending

MARKS = "ifcdCD"  # from the weakest to the strongest: a token takes the strongest of its characters
MAX_NUMBERS = 5  # of a countdown problem; with more, the search for solutions is long
MAX_STEPS = 1000  # of a column `truth`
SHOWN_CHARS = 80  # of a value in a message

_SUM = re.compile(r"\d+(?:\+\d+)+:", re.ASCII)
_STEP = re.compile(r"(\d{1,9})([+\-*])(\d{1,9})=(\d{1,9})", re.ASCII)
_FORK = re.compile(r"([^0-9]*)([0-9])([^0-9]*)([0-9])")
# The value in a text: a number with its sign, currency, fraction, percent sign and unit, or a word.
# A fraction before `=`, as in 12/4=3, is a step and not a value.
_FRACTION = r"/[0-9]+(?![0-9]|\s?=)"
_PERCENT = r" ?\\?%"
_AMOUNT = (
  r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+(?::[0-9]+)*)(?:\.[0-9]+)?|\.[0-9]+"
  r"|\\[dtc]?frac\{[^{}]*\}\{[^{}]*\}"
)
_VALUE = re.compile(
  rf"[-+−]?(?:\\?[$€£¥₹])?[-+−]?(?:{_AMOUNT})(?:{_FRACTION}|{_PERCENT})?"
  r"(?:[A-Za-z0-9_.]*[A-Za-z0-9_])?"
  r"|[-+−]?[([{\\]*\w(?:[\w.]*\w)?"
)
# What makes a longer value of a number or a word before it.
_MORE_NUMBER = re.compile(rf"[A-Za-z0-9_]|[.:][0-9]|,[0-9]{{3}}(?![0-9])|{_FRACTION}|{_PERCENT}")
_MORE_WORD = re.compile(r"\.?\w")
_SPACE = re.compile(r"\s*")
MAX_VALUE_CHARS = 100  # of a value that is compared as a number


def truth_marks(kind: str, prompt: str, completion: str, answer: str, extra: Extra) -> str | None:
  """Returns the marks of a completion; None if they are unknown.

  Args:
    kind: `Problem.kind`.
    prompt: the text of the problem's last message.
    completion: the text without stop tokens.
    answer: `Problem.answer`.
    extra: `Problem.extra`. If it has "truth", a list of pairs [text before, right value], these
      pairs decide: each value that follows such a text is a decision, the pairs being found one
      after another, and the first one that is not the right value is wrong. Numbers are compared
      as the kind `math` compares them, without units. Everything else is `i`.
  """
  if extra.get("truth"):
    return _value_marks(completion, extra["truth"])
  if kind not in TRUTHS:
    return None
  return TRUTHS[kind](prompt, completion, answer, extra)


def knows_truth(kind: str, extra: Extra) -> bool:
  """Returns whether completions of such a problem can have marks."""
  return bool(extra.get("truth")) or kind in TRUTHS


def check_truth(extra: Extra) -> None:
  """Raises ValueError unless `extra["truth"]` is a list of pairs that completions can match."""
  steps = extra.get("truth")
  if steps is None:
    return
  is_pair = lambda step: (
    isinstance(step, list | tuple) and len(step) == 2 and all(isinstance(x, str) for x in step)
  )
  if not isinstance(steps, list | tuple) or not all(map(is_pair, steps)):
    raise ValueError(
      'has a truth that is not a list of pairs such as [["48/2=", "24"]]: the text before a value, '
      "and the right value"
    )
  if len(steps) > MAX_STEPS:
    raise ValueError(f"has a truth of {len(steps)} pairs, more than {MAX_STEPS}")
  for before, right in steps:
    marks = _value_marks(before + right, [(before, right)])
    if marks is None or "d" not in marks or "D" in marks:
      raise ValueError(
        f"has a truth with the value {right[:SHOWN_CHARS]!r} after {before[:SHOWN_CHARS]!r}; write "
        "the right value there, such as 24"
      )


def _value_marks(completion: str, steps: Sequence[Sequence[str]]) -> str | None:
  marks = ["i"] * len(completion)
  position = 0
  found = False
  for before, right in steps:
    start = completion.find(before, position)
    if start < 0:
      break
    start = _SPACE.match(completion, start + len(before)).end()
    end, is_right = _value_end(completion, start, right.strip())
    if end == start:
      break
    found = True
    position = end
    marks[start:end] = ("d" if is_right else "D") * (end - start)
    if not is_right:  # what follows may be right for the wrong value
      break
  return "".join(marks) if found else None


def _value_end(text: str, start: int, right: str) -> tuple[int, bool]:
  """Returns where the value ends that starts here, and whether it is the right one.

  The end is `start` if there is no value.
  """
  end = start + len(right)
  if right and text.startswith(right, start):
    more = _MORE_NUMBER if right[-1] in string.digits else _MORE_WORD
    if not (right[-1].isalnum() and more.match(text, end)):
      return end, True
  if not re.search(r"\w", right):  # an operator, for example
    return min(end, len(text)), False
  value = _VALUE.match(text, start)
  if not value:
    return start, False
  if max(len(value[0]), len(right)) > MAX_VALUE_CHARS:
    return value.end(), False
  numbers = [read(text)[1] for text in (value[0], right)]
  are_numbers = all(isinstance(number, Number) for number in numbers)
  return value.end(), are_numbers and same(*numbers) is True


def _sum_marks(prompt: str, completion: str, answer: str, extra: Extra) -> str | None:
  """Marks of running sums such as `46+4=50,50+3=53` for the prompt `46+4+3:`.

  The first wrong step is marked: the wrong digits of an operand as C, and those of a total that is
  not the sum of the operands as D.
  """
  if not _SUM.fullmatch(prompt):
    return None
  total, *addends = (int(x) for x in prompt[:-1].split("+"))
  steps = _steps(completion)
  if steps is None or len(steps) != len(addends) or any(step[2] != "+" for step in steps):
    return None
  marks = []
  is_right = True
  for step, addend in zip(steps, addends, strict=True):
    classes = ("c", "i", "c", "d")
    if is_right:  # after the first wrong step, later ones may be right for the wrong total
      classes = (
        _compared(step[1], total, "c"),
        "i",
        _compared(step[3], addend, "c"),
        _compared(step[4], int(step[1]) + int(step[3]), "d"),
      )
      is_right = all(mark.islower() for mark in classes)
    marks.append(_step_marks(step, classes))
    total += addend
  return "i".join(marks)


def _countdown_marks(prompt: str, completion: str, answer: str, extra: Extra) -> str | None:
  """Marks of countdown steps such as `12+7=19,19-5=14`.

  The first wrong token is the first one after which no continuation reaches the target: an operand
  or an operator as D, a result that is computed wrongly as C.
  """
  numbers = extra["numbers"]
  steps = _steps(completion)
  if steps is None or not 2 <= len(numbers) <= MAX_NUMBERS or len(steps) != len(numbers) - 1:
    return None
  pool = tuple(sorted(numbers))
  target = int(answer)
  marks = []
  is_right = True
  for step in steps:
    classes = ("d", "d", "d", "c")
    if is_right:
      a, b, c = (int(step[i]) for i in (1, 3, 4))
      classes = _judged(pool, target, a, step[2], b, step[4])
      is_right = all(mark.islower() for mark in classes)
      if is_right:
        pool = _after(pool, a, b, c)
    marks.append(_step_marks(step, classes))
  return "i".join(marks)


def _judged(pool: Numbers, target: int, a: int, operator: str, b: int, c: str) -> tuple[str, ...]:
  """Returns the marks of the operands, the operator and the result of a countdown step.

  Classes are in the order of the text: first operand, operator, second operand, result.
  """
  solving = [move for move in _moves(pool) if _reaches(_after(pool, *move[::2], move[3]), target)]
  if all(move[0] != a for move in solving):
    return "D", "d", "d", "c"
  if all(move[:2] != (a, operator) for move in solving):
    return "d", "D", "d", "c"
  if all(move[:3] != (a, operator, b) for move in solving):
    return "d", "d", "D", "c"
  result = {"+": a + b, "-": a - b, "*": a * b}[operator]
  return "d", "d", "d", _compared(c, result, "c")


def _moves(pool: Numbers) -> list[tuple[int, str, int, int]]:
  """Returns all steps (a, operator, b, result) with numbers of the pool and a result >= 0."""
  moves = []
  for i, a in enumerate(pool):
    for j, b in enumerate(pool):
      if i != j:
        moves += [(a, "+", b, a + b), (a, "*", b, a * b)]
        moves += [(a, "-", b, a - b)] if a >= b else []
  return moves


def _after(pool: Numbers, a: int, b: int, result: int) -> Numbers:
  """Returns the pool after a step."""
  rest = list(pool)
  rest.remove(a)
  rest.remove(b)
  return tuple(sorted([*rest, result]))


@functools.lru_cache(maxsize=1 << 16)
def _reaches(pool: Numbers, target: int) -> bool:
  """Returns whether steps lead from the pool to the target alone."""
  if len(pool) == 1:
    return pool[0] == target
  moves = set(_moves(pool))
  return any(_reaches(_after(pool, a, b, result), target) for a, _, b, result in moves)


def _fork_marks(prompt: str, completion: str, answer: str, extra: Extra) -> str | None:
  """Marks of forks such as `QA:8=8XZB:5=5` for the answer `85`.

  Every wrong decision is marked, and every copy that differs from the digit before it.
  """
  marks = []
  position = 0
  for right in answer:
    fork = _FORK.match(completion, position)
    if not fork:
      return None
    filler, digit, between, copied = fork.groups()
    decision = "d" if digit == right else "D"
    marks.append("f" * len(filler) + decision + "i" * len(between) + "cC"[copied != digit])
    position = fork.end()
  rest = completion[position:]
  if re.search(r"[0-9]", rest):
    return None
  return "".join(marks) + "f" * len(rest)


def _steps(completion: str) -> list[re.Match[str]] | None:
  """Returns the steps `a+b=c` between commas; None if the text is anything else."""
  steps = [_STEP.fullmatch(part) for part in completion.split(",")]
  return steps if all(steps) else None


def _step_marks(step: re.Match[str], classes: Sequence[str]) -> str:
  """Returns the marks of `a+b=c`.

  Args:
    step: the match.
    classes: of a, operator, b and c; one mark for all characters, or one each.
  """
  spread = lambda text, marks: marks if len(marks) == len(text) else marks * len(text)
  first, operator, second, result = map(spread, step.groups(), classes)
  return f"{first}{operator}{second}i{result}"


def _compared(number: str, right: int, mark: str) -> str:
  """Returns one mark per digit: `mark`, in upper case where the digit is not the right one.

  If the lengths differ, every digit is wrong.
  """
  digits = str(right)
  if len(number) != len(digits):
    return mark.upper() * len(number)
  return "".join(mark if x == y else mark.upper() for x, y in zip(number, digits, strict=True))


# By `Problem.kind`: a function (prompt, completion, answer, extra) -> marks.
TRUTHS: dict[str, Callable[[str, str, str, Extra], str | None]] = {
  "last_number": _sum_marks,
  "countdown": _countdown_marks,
  "forks": _fork_marks,
}
