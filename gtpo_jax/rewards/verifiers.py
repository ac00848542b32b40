"""Tables of the built-in verifiers and reward parts.

`VERIFIERS` is indexed by `Problem.kind`, `PARTS` by the names in the config's `reward.parts`. A
verifier receives many completions at once, so it can check them in parallel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from gtpo_jax.rewards.code import code_correct
from gtpo_jax.rewards.math.extraction import extract
from gtpo_jax.rewards.math.verdicts import math_verdicts
from gtpo_jax.rewards.plain import choice_correct, exact_correct
from gtpo_jax.rewards.synthetic import (
  countdown_correct,
  forks_correct,
  last_number_correct,
  sentence_correct,
)

# Maximum sandboxes at once: more than there are cores, as a short run mostly waits for processes.
MAX_SANDBOXES = 4 * (os.cpu_count() or 1)


class Options(Protocol):
  """The fields of the config's reward section that verifiers read."""

  math_rule: str
  timeout_s: float
  code_timeout_s: float
  code_memory_mb: int
  unsandboxed: bool


Texts = Sequence[str]
Extras = Sequence[Mapping[str, Any]]  # `Problem.extra` of each completion's problem
Verdicts = list[bool | None]  # None: no verdict was reached

# (completions, gold answers, extras, options) -> one verdict per completion, in the same order.
Verifier = Callable[[Texts, Texts, Extras, Options], Verdicts]
# (prompts, completions, gold answers, extras) -> one number per completion, in the same order.
RewardPart = Callable[[Texts, Texts, Texts, Extras], list[float]]


def _last_number(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [last_number_correct(*pair) for pair in zip(completions, answers, strict=True)]


def _countdown(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [
    countdown_correct(completion, extra["numbers"], int(answer))
    for completion, answer, extra in zip(completions, answers, extras, strict=True)
  ]


def _forks(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [forks_correct(*pair) for pair in zip(completions, answers, strict=True)]


def _sentence(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [
    sentence_correct(completion, extra["topic"], extra["word"])
    for completion, extra in zip(completions, extras, strict=True)
  ]


def _exact(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [exact_correct(*pair) for pair in zip(completions, answers, strict=True)]


def _choice(completions: Texts, answers: Texts, extras: Extras, options: Options) -> Verdicts:
  return [choice_correct(*pair) for pair in zip(completions, answers, strict=True)]


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


# By `Problem.kind`: the function that decides whether completions are correct.
VERIFIERS: dict[str, Verifier] = {
  "last_number": _last_number,
  "countdown": _countdown,
  "forks": _forks,
  "sentence": _sentence,
  "exact": _exact,
  "choice": _choice,
  "math": _math,
  "code": _code,
}


def _boxed(prompts: Texts, completions: Texts, answers: Texts, extras: Extras) -> list[float]:
  return [float("\\boxed{" in text) for text in completions]


def _answer_line(prompts: Texts, completions: Texts, answers: Texts, extras: Extras) -> list[float]:
  return [float("answer:" in text.lower() and extract(text) is not None) for text in completions]


# By name: format rewards, which are 1 if the completion has the format and 0 if not.
PARTS: dict[str, RewardPart] = {"boxed": _boxed, "answer_line": _answer_line}
