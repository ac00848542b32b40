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
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gtpo_jax.errors import UserError, nearest
from gtpo_jax.rewards.pool import Pool, shared_pool

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
  return Pool.wait(verdicts)


class Undecided(NamedTuple):
  """Two expressions for math-verify."""

  gold: str
  answer: str


def _judge(completion: str, gold: str) -> bool | None | Undecided:
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
_LAST = re.compile(rf"\d+(?:[-/:]\d+){{2,}}|\d+:\d+|(?:(?<![\w)\]}}])[-−])?(?:\\[dt]?frac\{{\d+\}}\{{\d+\}}|(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)"
                   r"(?:/\d+|[eE][-+]?\d+|\s*\\?%)?)", re.ASCII)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
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
  match = _last_match(_LAST, text)
  return match[0] if match else None


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
  if formulas and not _prose(formulas[-1]):
    return formulas[-1]
  sentence = line[:end.start()] if (end := _SENTENCE_END.search(line)) else line
  if _prose(sentence) and not _WORDS.fullmatch(clean(sentence)):
    return _last_number(sentence) or None
  return sentence


def _prose(text: str) -> bool:
  """Whether there are words in a text beyond a unit behind and a name before it."""
  text = _read(text)[0]
  return bool(re.search(r"(?<![\\A-Za-z])(?!and\b|or\b)[A-Za-z]{3,}", text))
