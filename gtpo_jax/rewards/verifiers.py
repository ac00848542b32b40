"""Tables of the built-in verifiers and reward parts.

`VERIFIERS` is indexed by `Problem.kind`, `PARTS` by the names in the config's `reward.parts`. A
verifier receives many completions at once, so it can check them in parallel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from gtpo_jax.rewards.code import code_correct
from gtpo_jax.rewards.constraints.instruction_verdicts import STRICT, followed_shares
from gtpo_jax.rewards.gym.scores import AUTO, gym_scores, is_right
from gtpo_jax.rewards.math.extraction import extract
from gtpo_jax.rewards.math.verdicts import math_verdicts
from gtpo_jax.rewards.plain import choice_correct, exact_correct
from gtpo_jax.rewards.synthetic import (
  countdown_correct,
  forks_correct,
  last_number_correct,
  sentence_correct,
)
from gtpo_jax.runtime.errors import UserError, did_you_mean

# Maximum sandboxes at once: more than there are cores, as a short run mostly waits for processes.
MAX_SANDBOXES = 4 * (os.cpu_count() or 1)


@dataclass(frozen=True)
class Options:
  """The fields of the config's reward section that verifiers read, with their defaults."""

  math_rule: str = "math"
  instructions: str = STRICT
  gym_answer: str = AUTO
  timeout_s: float = 5.0
  code_timeout_s: float = 5.0
  code_memory_mb: int = 512
  unsandboxed: bool = False


class Score(NamedTuple):
  """A verdict with a number, for kinds that know more than right and wrong."""

  correct: bool
  number: float  # the reward part "verifier"


Texts = Sequence[str]
Extras = Sequence[Mapping[str, Any]]  # `Problem.extra` of each completion's problem
Verdicts = list[bool | None]  # None: no verdict was reached

# (completions, gold answers, extras, options) -> one verdict per completion, in the same order.
Verifier = Callable[[Texts, Texts, Extras, Options], Verdicts]
# The same, with a number for each verdict.
Scorer = Callable[[Texts, Texts, Extras, Options], list[Score | None]]
# (prompts, completions, gold answers, extras) -> one number per completion, in the same order.
RewardPart = Callable[[Texts, Texts, Texts, Extras], list[float]]


def _each(check: Callable[[str, str, Mapping[str, Any]], bool | None]) -> Verifier:
  """Returns the verifier that checks completions one by one, with their answers and extras."""
  return lambda completions, answers, extras, options: [
    check(*row) for row in zip(completions, answers, extras, strict=True)
  ]


def _math(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return math_verdicts(completions, answers, options.timeout_s, rule=options.math_rule)


def _code(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  run_tests = functools.partial(
    code_correct,
    timeout_s=options.code_timeout_s,
    memory_mb=options.code_memory_mb,
    allow_unsandboxed=options.unsandboxed,
  )
  with ThreadPoolExecutor(MAX_SANDBOXES) as threads:  # each thread waits for one process
    return list(threads.map(run_tests, completions, extras))


def _constraints(
  completions: Texts, answers: Texts, extras: Extras, options: Options
) -> list[Score | None]:
  """The number is the share of the problem's instructions that the completion follows."""
  shares = followed_shares(completions, extras, options.instructions, options.timeout_s)
  return [None if share is None else Score(share == 1, share) for share in shares]


def _reasoning_gym(
  completions: Texts, answers: Texts, extras: Extras, options: Options
) -> list[Score | None]:
  """The number is the score of the library, which also pays for parts of an answer."""
  scores = gym_scores(completions, extras, options.gym_answer, options.timeout_s)
  return [None if score is None else Score(is_right(score), score) for score in scores]


# By `Problem.kind`: the kinds whose verdicts have a number of their own.
SCORERS: dict[str, Scorer] = {"constraints": _constraints, "reasoning_gym": _reasoning_gym}


def _verdicts_of(scorer: Scorer) -> Verifier:
  def verifier(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
    scores = scorer(completions, answers, extras, options)
    return [None if score is None else score.correct for score in scores]

  return verifier


# By `Problem.kind`: the function that decides whether completions are correct.
VERIFIERS: dict[str, Verifier] = {
  "last_number": _each(lambda text, answer, extra: last_number_correct(text, answer)),
  "countdown": _each(
    lambda text, answer, extra: countdown_correct(text, extra["numbers"], int(answer))
  ),
  "forks": _each(lambda text, answer, extra: forks_correct(text, answer)),
  "sentence": _each(lambda text, _, extra: sentence_correct(text, extra["topic"], extra["word"])),
  "exact": _each(lambda text, answer, extra: exact_correct(text, answer)),
  "choice": _each(lambda text, answer, extra: choice_correct(text, answer)),
  "math": _math,
  "code": _code,
  **{kind: _verdicts_of(scorer) for kind, scorer in SCORERS.items()},
}


# By `Problem.kind`: the keys of `extra` that its verifier reads. Of the test formats of `code`, a
# problem has one, which the first key identifies.
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
  "countdown": (("numbers",),),
  "sentence": (("topic", "word"),),
  "code": (("entry_point", "prompt", "test"), ("test_list",), ("input_output",)),
  "constraints": (("instruction_id_list", "kwargs"),),
  "reasoning_gym": (("task", "entry"),),
}


# By `Problem.kind`: further keys that are read if they are there, choices for the prompt.
OPTIONAL = {
  "choice": ("choices", "options"),
  "code": ("test_setup_code", "test_imports"),
  "reasoning_gym": ("knobs",),
}


def keys_read(kind: str) -> frozenset[str]:
  """Returns the keys of `extra` that are read for problems of `kind`."""
  return frozenset().union(*NEEDS.get(kind, ()), OPTIONAL.get(kind, ()))


def missing_extra(kind: str, extra: Mapping[str, Any]) -> str:
  """Returns the keys that the verifier of `kind` needs and `extra` lacks; "" if it lacks none."""
  formats = NEEDS.get(kind, ((),))
  if len(formats) == 1:
    (needed,) = formats
  else:
    needed = next((keys for keys in formats if keys[0] in extra), ())
    if not needed:
      return " or ".join(keys[0] for keys in formats)
  return " and ".join(key for key in needed if key not in extra)


def score(
  kind: str, completions: Texts, answers: Texts, extras: Extras, options: Options
) -> list[Score | None]:
  """Returns the verdict on each completion with its number; without a scorer, 1 or 0.

  Arguments and errors are as in `verify`; `options` are the fields of the config that it reads.
  """
  if kind in SCORERS:
    return SCORERS[kind](completions, answers, extras, options)
  verdicts = VERIFIERS[kind](completions, answers, extras, options)
  return [None if verdict is None else Score(verdict, float(verdict)) for verdict in verdicts]


def verify(kind: str, completions: Texts, answers: Texts, extras: Extras) -> Verdicts:
  """Returns whether each completion is correct, or None where no verdict is reached.

  The settings are the defaults of the config's reward section. Of the problems, only the keys of
  their extras are checked; a row that `check_gold` refuses may raise any error.

  Args:
    kind: a key of `VERIFIERS`.
    completions: any texts.
    answers: the gold answer of each completion's problem.
    extras: `Problem.extra` of each completion's problem.

  Raises:
    UserError: the kind has no verifier, an extra lacks a key that it needs, or something that it
      needs is missing on this machine.
    ValueError: the lists differ in length.
  """
  if kind not in VERIFIERS:
    raise UserError(
      f"kind must be one of {', '.join(VERIFIERS)}, got {kind!r}{did_you_mean(kind, VERIFIERS)}"
    )
  if not len(completions) == len(answers) == len(extras):
    raise ValueError(
      f"verify needs as many answers and extras as completions, got {len(completions)} "
      f"completions, {len(answers)} answers and {len(extras)} extras"
    )
  for i, extra in enumerate(extras):
    if missing := missing_extra(kind, extra):
      raise UserError(f"extras[{i}] has no {missing}, which the kind {kind!r} needs")
  return VERIFIERS[kind](completions, answers, extras, Options())


def _format(has_it: Callable[[str], bool]) -> RewardPart:
  return lambda prompts, completions, answers, extras: [float(has_it(x)) for x in completions]


# By name: format rewards, which are 1 if the completion has the format and 0 if not.
PARTS: dict[str, RewardPart] = {
  "boxed": _format(lambda text: "\\boxed{" in text),
  "answer_line": _format(lambda text: "answer:" in text.lower() and extract(text) is not None),
}
