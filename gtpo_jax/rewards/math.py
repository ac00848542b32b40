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
from typing import NamedTuple

from gtpo_jax.rewards.exact import CLOSE, MAX_DEPTH, OPEN
from gtpo_jax.rewards.pool import Pool, shared_pool, wait_all
from gtpo_jax.rewards.values import SPACE, WORDS, clean, read, same
from gtpo_jax.runtime.errors import UserError, nearest

MAX_CHARS = 1000  # of an answer; the longest gold of MATH-500 has 159
RULES = ("math", "dapo")


def math_correct(
  completion: str, gold: str, rule: str = "math", timeout_s: float = 5.0
) -> bool | None:
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


def math_verdicts(
  completions: Sequence[str],
  golds: Sequence[str],
  timeout_s: float = 5.0,
  workers: int | None = None,
  *,
  rule: str = "math",
  pool: Pool | None = None,
) -> list[bool | None]:
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
  target = gold_answer(gold)
  answer = extract(completion)
  if not target.strip():
    return None
  return compare(target, answer) if answer else False


# The answer in a text.

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\.|[{}]", re.DOTALL)
_BOX_BARE = re.compile(r"\\boxed\s+([-+]?[\w.,/]+)")
_ANSWER = re.compile(
  r"(?i)\banswer[*_]*(?:\s*[:：]|(?:\s+\w+){0,4}?\s+(?:is|equals)\b[*_]*:?|\s*=)[*_\s]*([^\n]+)"
)
_HASHES = re.compile(r"####[^\S\n]*([^\n]+)")
_DIGITS = r"\d{1,3}(?:,\d{3})+(?![\d,])|\d+"
_LAST = re.compile(
  rf"\d+(?:[-/:]\d+){{2,}}|\d+:\d+|(?:(?<![\w)\]}}])[-−])?(?:\\[dt]?frac\{{\d+\}}\{{\d+\}}|"
  rf"(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d+|\s*\\?%)?)",
  re.ASCII,
)
_SENTENCE_END = re.compile(r"[.?](?:\s|$)")
_PROSE = re.compile(
  r"(?<![\\A-Za-z\d{])(?!(?:and|or|sqrt|sin|cos|tan|log|mod)\b)[A-Za-z]{3,}"
)  # words beyond a unit and a name
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
    if match and (
      match.start() > MAX_CHARS or window >= len(text)
    ):  # not one that the window may have cut
      return match[0]
  return None


def _boxed(text: str) -> str | None:
  """What the last balanced box holds: one pass with a stack, since a search from every box would be quadratic."""
  if "box" not in text:
    return None
  opened = []  # (start, whether of a box)
  found = None
  for match in _BOX.finditer(text):
    if match[0] == "}":
      if opened:
        start, box = opened.pop()
        if box and (found is None or start > found[0]):
          found = start, match.start()
    elif match[1] or match[0] == "{":
      opened.append((match.end(), bool(match[1])))
  if found:
    return text[found[0] : found[1]]
  bare = _last_match(_BOX_BARE, text)
  return bare[1] if bare else None


def _focus(line: str) -> str | None:
  """The answer in the rest of an answer line: its formula if it has one in prose, its last number if it is prose."""
  if len(line) > MAX_CHARS:
    return _last_number(line)
  formulas = [a or b for a, b in _DOLLARS.findall(line)]
  if formulas and not _PROSE.search(
    clean(formulas[-1])
  ):  # in "$5 more than $8" dollars are dollars
    return formulas[-1]
  sentence = line[: end.start()] if (end := _SENTENCE_END.search(line)) else line
  if _PROSE.search(read(sentence)[0]) and not WORDS.fullmatch(clean(sentence)):
    return _last_number(sentence) or sentence
  return sentence


# The comparison.

_TOO_COSTLY = re.compile(
  r"\^[\s{(]*-?\d{6,}|\^[\s{(]*-?\d+\s*\^[\s{(]*-?\d"
  r"|\d{5,}[\s)}]*!|!\s*[)}]*\s*!|\^[^!]{0,20}[)}]\s*!|\^[^^]{0,40}\^[^^]{0,40}\^|\d{301}",
  re.ASCII,
)
_LETTER = re.compile(r"\(?([A-J])\)?")
_LETTER_FIRST = re.compile(r"\(?([A-J])(?:[.):]|\)?$)")


def compare(gold: str, answer: str) -> bool | Undecided | None:
  """Whether two answers are equal, where that is decided cheaply; None where the answer is refused; else the pair for math-verify."""
  gold = _unwrap(gold.strip())
  answer = _unwrap(answer.strip())
  if gold == answer:
    return True
  if max(len(gold), len(answer)) > MAX_CHARS:
    return None
  (gold, target) = read(gold)
  (answer, value) = read(answer)
  if not gold:
    return None
  if SPACE.sub("", gold) == SPACE.sub("", answer):
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
    return (
      False  # not these words; math-verify would multiply their letters, and take "evil" for "live"
    )
  if _depth(answer) > MAX_DEPTH or _TOO_COSTLY.search(answer):
    return None
  return Undecided(_latex(gold), _latex(answer))


def _latex(text: str) -> str:
  return re.sub(r"\b(and|or)\b", r" \\text{ \1 } ", text.replace("**", "^").replace("*", "\\cdot "))


def _unwrap(text: str) -> str:
  """Any number of round brackets around something without such brackets becomes one pair."""
  if not text.startswith("((") or not text.endswith("))"):
    return text
  left = len(text) - len(text.lstrip("("))
  right = len(text) - len(text.rstrip(")"))
  inner = text[left:-right]
  return f"({inner})" if left == right and "(" not in inner and ")" not in inner else text


def _depth(text: str) -> int:
  depth = deepest = 0
  for sign in text:
    depth += (sign in OPEN) - (sign in CLOSE)
    deepest = max(deepest, depth)
  return deepest


# DAPO's verifier, for faithful comparisons.

_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_REPLACED = (
  ("an ", ""),
  ("a ", ""),
  (".$", "$"),
  ("\\$", ""),
  ("\\ ", ""),
  (" ", ""),
  ("mbox", "text"),
  (",\\text{and}", ","),
  ("\\text{and}", ","),
  ("\\text{m}", "\\text{}"),
  *(
    (word, "")
    for word in str.split(
      "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds meters "
      "meals edges students childrentickets multiples \\text{s} \\text{.}"
    )
  ),
  *(
    (text, "")
    for text in (
      "\\text{\ns}",
      "\\text{}^2",
      "\\text{}^3",
      "\\text{\n}",
      "\\text{}",
      "\\mathrm{th}",
      "^\\circ",
      "^{\\circ}",
      "\\;",
      ",\\!",
      "{,}",
      '"',
      "\\dots",
    )
  ),
)
_DAPO_REWRITTEN = [
  (re.compile(pattern), new)
  for pattern, new in (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
  )
]


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
