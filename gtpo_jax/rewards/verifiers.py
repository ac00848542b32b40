"""The verifiers by kind: each takes a whole batch, so that it may work on many completions side by side."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from gtpo_jax.rewards.arithmetic import countdown_correct, last_number_correct
from gtpo_jax.rewards.code import code_correct
from gtpo_jax.rewards.math import extract, math_verdicts

SANDBOXES = 4 * (os.cpu_count() or 1)  # at once: starting and ending one is mostly waiting


class Rules(Protocol):
  """What verifiers read of a config."""

  math_rule: str
  timeout_s: float
  code_timeout_s: float
  code_memory_mb: int
  unsandboxed: bool


Rewards = list[bool | None]
Verifier = Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]], Rules], Rewards]


def _last_number(
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
  rules: Rules,
) -> Rewards:
  return [
    last_number_correct(text, answer) for text, answer in zip(completions, answers, strict=True)
  ]


def _countdown(
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
  rules: Rules,
) -> Rewards:
  return [
    countdown_correct(text, extra["numbers"], int(answer))
    for text, answer, extra in zip(completions, answers, extras, strict=True)
  ]


def _math(
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
  rules: Rules,
) -> Rewards:
  return math_verdicts(completions, answers, rules.timeout_s, rule=rules.math_rule)


def _code(
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
  rules: Rules,
) -> Rewards:
  judge = functools.partial(
    code_correct,
    timeout_s=rules.code_timeout_s,
    memory_mb=rules.code_memory_mb,
    allow_unsandboxed=rules.unsandboxed,
  )
  with ThreadPoolExecutor(max_workers=SANDBOXES) as threads:  # each waits for a process of its own
    return list(threads.map(judge, completions, extras))


VERIFIERS: dict[str, Verifier] = {
  "last_number": _last_number,
  "countdown": _countdown,
  "math": _math,
  "code": _code,
}


def _boxed(
  prompts: Sequence[str],
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
) -> list[float]:
  return [float("\\boxed{" in text) for text in completions]


def _answer_line(
  prompts: Sequence[str],
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[Mapping[str, Any]],
) -> list[float]:
  return [float("answer:" in text.lower() and extract(text) is not None) for text in completions]


# Parts of a reward besides "correct": 1 where the completion has the form, else 0.
PARTS: dict[str, Callable[..., list[float]]] = {"boxed": _boxed, "answer_line": _answer_line}
