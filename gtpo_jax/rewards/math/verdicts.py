"""Decides whether the answer of a completion equals the gold answer.

Most answers are numbers. They are compared here as exact fractions, without SymPy. Other answers
(roots, symbols, matrices, inequalities) are compared by math-verify, which is slow and can hang, in
the worker processes of `worker_pool.py`.

The verdict is None if no verdict was reached, in these cases:
  - The check exceeded its time limit, its worker died, math-verify failed or cannot parse the gold
    answer, or the gold answer is empty.
  - The answer is rejected without being parsed: it is longer than MAX_CHARS characters, nested
    deeper than MAX_DEPTH, a tower of powers, or a power or factorial of a number with many digits.

Such an answer still gets a verdict if a cheap check decides it first: equal strings, parentheses
around one number (`(((72)))` is 72), or, up to MAX_CHARS characters, exact arithmetic. For example,
9^{9^{9^9}} and (10^9)! are provably larger than 2^8000, so they differ from any gold answer that is
written in digits. If no such bound applies, the verdict is None.

Sources: GSM8K (2110.14168, "#### 72"), MATH (2103.03874, \\boxed), DAPO (2503.14476, `Answer:`),
math-verify 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gtpo_jax.rewards.finding import after_thinking, last_match
from gtpo_jax.rewards.languages import FOREIGN
from gtpo_jax.rewards.math.arithmetic import CLOSE, MAX_DEPTH, OPEN
from gtpo_jax.rewards.math.extraction import MAX_CHARS, extract, gold_answer
from gtpo_jax.rewards.math.normalize import SPACE, clean
from gtpo_jax.rewards.math.values import Composite, Number, read, same
from gtpo_jax.rewards.math.worker_pool import WorkerPool, shared_pool, wait_all
from gtpo_jax.rewards.plain import JOINED_AFTER
from gtpo_jax.runtime.errors import UserError, did_you_mean

RULES = ("math", "dapo")


def math_correct(
  completion: str, gold: str, rule: str = "math", timeout_s: float = 5.0
) -> bool | None:
  """Returns whether the completion's answer equals `gold`, or None if no verdict was reached.

  It neither raises nor hangs, whatever the text. The answer is what `finding.marked_answers` finds
  after the thinking: in <answer>...</answer> or the entire text, the last balanced
  `\\boxed{...}`, or else the later of the last `Answer: ...` ("The answer is ...") and the last
  `#### ...`. Without these, it is the last number. A completion without an answer is wrong, unless
  its text equals `gold`.

  Args:
    completion: any text.
    gold: the answer, or a solution that marks it by `\\boxed{...}`, `####` or `Answer:`.
    rule: "math"; or "dapo", DAPO's own verifier: the last `Answer:` line within the last 300
      characters, compared as a normalised string.
    timeout_s: time limit in seconds of a check in a worker.

  Raises:
    UserError: the rule is unknown.
  """
  return math_verdicts([completion], [gold], timeout_s, rule=rule)[0]


def math_verdicts(
  completions: Sequence[str],
  golds: Sequence[str],
  timeout_s: float = 5.0,
  workers: int | None = None,
  *,
  rule: str = "math",
  pool: WorkerPool | None = None,
) -> list[bool | None]:
  """Returns `math_correct` of each pair, in order.

  Checks that need a worker run in parallel while this process compares the remaining pairs.

  Args:
    completions: any texts.
    golds: one gold answer per completion.
    timeout_s: time limit in seconds of each check in a worker.
    workers: number of processes, by default one per core, up to 8; calls with the same number share
      them.
    rule: see `math_correct`.
    pool: a pool of workers to use instead of the shared one.

  Raises:
    UserError: the rule is unknown.
    ValueError: the two lists differ in length.
  """
  if rule not in RULES:
    suggestion = did_you_mean(rule, RULES)
    raise UserError(f"rule must be one of {', '.join(RULES)}, got {rule!r}{suggestion}")
  decide = _decide if rule == "math" else dapo_correct
  verdicts = []
  for completion, gold in zip(completions, golds, strict=True):
    verdict = decide(completion, gold)
    if isinstance(verdict, Undecided):
      pool = pool or shared_pool(workers)
      verdict = pool.submit(*verdict, timeout_s)
    verdicts.append(verdict)
  return wait_all(verdicts)


def quick_verdict(completion: str, gold: str, rule: str = "math") -> bool | None:
  """Returns `math_correct` if that needs no worker process, else None."""
  verdict = (_decide if rule == "math" else dapo_correct)(completion, gold)
  return None if isinstance(verdict, Undecided) else verdict


class Undecided(NamedTuple):
  """Two expressions that need math-verify."""

  gold: str
  answer: str


def _decide(completion: str, gold: str) -> bool | Undecided | None:
  target = gold_answer(gold)
  answer = extract(completion)
  if not target.strip():
    return None
  if after_thinking(completion).strip() == target.strip():  # even if the text contains no number
    return True
  return compare(target, answer) if answer else False


_TOO_COSTLY = re.compile(
  r"\^[\s{(]*-?\d{6,}|\^[\s{(]*-?\d+\s*\^[\s{(]*-?\d"
  r"|\d{5,}[\s)}]*!|!\s*[)}]*\s*!|\^[^!]{0,20}[)}]\s*!|\^[^^]{0,40}\^[^^]{0,40}\^|\d{301}",
  re.ASCII,
)
_EQUATION = re.compile(r"(?=.*[A-Za-z])[^=<>,;]+=[^=<>,;]+")
# A word that is neither a unit nor mathematics, or a number that is no digit, such as ⑤. What has a
# value does not equal what has such a word, and math-verify would read letters.
_UNREAD = re.compile(
  r"(?<![\\A-Za-z{])(?!(?:sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|arc[a-z]+|lim|det|gcd|lcm|cup|cap"
  r"|and|or)(?![a-z]))[^\W\d_]{2,}"
  rf"|[{FOREIGN}]|(?<=\d)(?:and|or)\b|(?<=\d)(?:'| e (?=\d))|\b(?:and|or)$"
  r"|[\u2150-\u218b\u2460-\u249b\u2776-\u2793\u3220-\u33ff]"
  r"|[^\W\d_a-zA-Z\u0370-\u03ff]"
)
# A number and a letter that is a unit, as in 900m and 5m/s; gold answers may mean a product.
_GLUED = re.compile(r"(-?[\d.,]+) ?[mghslLJNVW](?: ?/ ?[a-z]+)?")
_RELATION = re.compile(
  r"[<>≠]|\\(?:l|g|n)(?:e|eq|t|eqslant)(?![a-z])|\\not(?![a-z])|[!/]="
  r"|\\(?:[hv]?phantom|[bx]?cancel)"
)
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_FIRST = re.compile(r"\(?([A-J])(?:[.):]|\)?$)")


def compare(gold: str, answer: str) -> bool | Undecided | None:
  """Compares two answers, if that is cheap.

  Returns:
    Whether they are equal; None if the gold answer is empty or an answer is rejected; or the pair
    of expressions for math-verify.
  """
  gold = _collapse_parentheses(gold.strip())
  answer = _collapse_parentheses(answer.strip())
  if gold == answer:
    return True
  if max(len(gold), len(answer)) > MAX_CHARS:
    return None
  equations = [_equation(gold), _equation(answer)]
  gold, gold_value = read(gold)
  answer, answer_value = read(answer)
  if not gold:
    return None
  if SPACE.sub("", gold) == SPACE.sub("", answer):
    return True
  if (choice := _CHOICE.fullmatch(gold)) and (chosen := _CHOICE_FIRST.match(answer)):
    return choice[1] == chosen[1] and not JOINED_AFTER.match(answer, chosen.end(1))
  if not answer:
    return False
  if isinstance(gold_value, Composite) and gold_value.kind == "base" and answer.isdigit():
    return answer == gold_value.items[0]  # a problem that names the base may leave it out
  if isinstance(gold_value, Number) and (glued := _GLUED.fullmatch(answer)):
    answer, answer_value = read(glued[1])
  if gold_value is not None and answer_value is not None:
    verdict = same(gold_value, answer_value)
    if verdict is not None:
      return verdict
  elif isinstance(gold_value, str) and gold_value not in ("oo", "-oo"):
    # The gold answer is a word and the answer is not. math-verify would read a word as a product of
    # letters and accept "evil" for "live".
    return False
  unread = gold_value is not None and _UNREAD.search(answer)
  related = isinstance(gold_value, Number) and _RELATION.search(answer)
  values = (gold_value, answer_value)
  row = any(isinstance(x, Composite) and x.kind in ("row", "base") for x in values)
  if unread or related or row:
    return False
  if _depth(answer) > MAX_DEPTH or _TOO_COSTLY.search(answer):
    return None
  if all(equations) and "=" in gold + answer:  # one of them has lost its left side
    gold, answer = equations
  return Undecided(_latex(gold), _latex(answer))


def _equation(text: str) -> str:
  """Returns an answer without formatting if it is one equation with letters, else ""."""
  text = clean(text) if "=" in text or "＝" in text else ""
  return text if _EQUATION.fullmatch(text) else ""


def _latex(text: str) -> str:
  text = text.replace("**", "^").replace("*", "\\cdot ")
  return re.sub(r"\b(and|or)\b", r" \\text{ \1 } ", text)


def _collapse_parentheses(text: str) -> str:
  """Reduces several pairs of parentheses around a text to one; the text itself must have none."""
  if not text.startswith("((") or not text.endswith("))"):
    return text
  left = len(text) - len(text.lstrip("("))
  right = len(text) - len(text.rstrip(")"))
  inner = text[left:-right]
  return f"({inner})" if left == right and "(" not in inner and ")" not in inner else text


def _depth(text: str) -> int:
  depth = deepest = 0
  for character in text:
    depth += (character in OPEN) - (character in CLOSE)
    deepest = max(deepest, depth)
  return deepest


# DAPO's own verifier, for faithful comparisons, as in verl's `math_dapo`.

SEARCHED_CHARS = 300  # at the end of a completion; an answer before them is not found

_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WITHOUT_ANSWER = "[INVALID]"
_REMOVED_WORDS = str.split(
  "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
  "cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} "
  "\\text{.}"
)
_REMOVED_TEXT = (
  *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
  *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REPLACEMENTS = (  # in this order
  *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
  *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
  *((text, "") for text in (*_REMOVED_WORDS, *_REMOVED_TEXT)),
)
_REWRITES = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
  )
]


def dapo_correct(completion: str, gold: str) -> bool | None:
  """Returns whether the last `Answer:` line equals `gold` as a normalised string.

  Returns None if gold is empty or longer than MAX_CHARS characters.
  """
  if not gold.strip() or len(gold) > MAX_CHARS:
    return None
  match = last_match(_DAPO_ANSWER, completion[-SEARCHED_CHARS:])
  return _normalized(match[1] if match else _WITHOUT_ANSWER) == _normalized(gold)


def _normalized(text: str) -> str:
  text = text.split("=")[-1]
  for old, new in _REPLACEMENTS:
    text = text.replace(old, new)
  for pattern, replacement in _REWRITES:
    text = pattern.sub(replacement, text)
  text = text.replace("$", "")
  digits = text.replace(",", "")
  return (digits if digits.isdigit() else text).strip()
