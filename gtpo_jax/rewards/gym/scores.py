"""Scores of completions by reasoning-gym, in worker processes that are killed when they hang."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gtpo_jax.rewards.finding import after_thinking
from gtpo_jax.rewards.gym.rows import require_library, task_names
from gtpo_jax.rewards.math.extraction import extract
from gtpo_jax.rewards.math.worker_pool import WorkerPool, wait_all
from gtpo_jax.rewards.plain import exact_vote
from gtpo_jax.runtime.errors import did_you_mean

AUTO = "auto"
TAG = "tag"
BOXED = "boxed"
LINE = "line"
OPENING, CLOSING = "<answer>", "</answer>"
MIN_SCORE = 1 - 1e-6  # scores of wrong answers can be above 0.5: some scorers pay for substrings
MAX_ANSWER_BYTES = 8192  # as JSON
MAX_PROBLEM_BYTES = 20_000  # packed
WORKER_MB = 8192  # of address space: the libraries reserve some GiB

Extra = Mapping[str, Any]


def answer_of(completion: str, mode: str = AUTO) -> str | None:
  """Returns the answer in a completion, after its thinking, or None.

  Args:
    completion: any text.
    mode: "tag", the text in the last <answer>...</answer>, as the library's `extract_answer`;
      "boxed", what the kind math reads: the last tag, box, `Answer:`, or number; "auto", the tag,
      unchanged, if there is one, and else the same as "boxed"; "line", what the kind exact reads:
      the last tag, box or `Answer:`, or the last line.
  """
  completion = after_thinking(completion)
  if mode == LINE:
    return exact_vote(completion)
  answer = None if mode == BOXED else _tagged(completion)
  return extract(completion) if answer is None and mode != TAG else answer


def _tagged(text: str) -> str | None:
  answer = None
  end = 0
  while (start := text.find(OPENING, end)) >= 0:
    start += len(OPENING)
    close = text.find(CLOSING, start)
    if close < 0:
      break
    answer = text[start:close]
    end = close + len(CLOSING)
  return None if answer is None else answer.strip()


def gym_scores(
  completions: Sequence[str], extras: Sequence[Extra], mode: str = AUTO, timeout_s: float = 5.0
) -> list[float | None]:
  """Returns the library's score of each completion's answer, usually in [0, 1].

  The score is 0 without an answer, or if the answer is longer than any problem needs. It is None if
  the scorer raised an error or took longer than `timeout_s` seconds.

  The extras are accepted by `check_entry`; for the mode see `answer_of`.
  """
  pending: list[float | Future] = []
  for completion, extra in zip(completions, extras, strict=True):
    answer = answer_of(completion, mode)
    if not answer or len(json.dumps(answer)) > MAX_ANSWER_BYTES:
      pending.append(0.0)
    else:
      pending.append(_pool().submit(pack(extra), answer, timeout_s))
  return wait_all(pending)


def is_right(score: float) -> bool:
  """Returns whether a score of the library is full marks."""
  return score >= MIN_SCORE


def pack(extra: Extra) -> str:
  """Returns a problem as the text that `library.score` reads."""
  content = json.dumps([extra["task"], extra.get("knobs") or {}, extra["entry"]], default=str)
  return base64.b64encode(zlib.compress(content.encode())).decode()


def check_entry(answer: str, extra: Extra) -> None:
  """Checks that the library can score a problem.

  Raises:
    ValueError: `extra.task` or `extra.entry` is missing or malformed.
    MissingPackage: the library is not installed.
  """
  task = extra.get("task")
  entry = extra.get("entry")
  knobs = extra.get("knobs") or {}
  if not isinstance(task, str) or not isinstance(entry, Mapping):
    raise ValueError("is of kind 'reasoning_gym', but has no extra.task and extra.entry")
  if not isinstance(entry.get("metadata"), Mapping) or "answer" not in entry:
    raise ValueError("is of kind 'reasoning_gym', but its entry has no answer and metadata")
  is_text = lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value)
  if not isinstance(knobs, Mapping) or not all(map(is_text, knobs.values())):
    raise ValueError("is of kind 'reasoning_gym', but its knobs are not lists of texts")
  require_library("the kind 'reasoning_gym'")
  if task not in task_names():
    suggestion = did_you_mean(task, task_names())
    raise ValueError(f"has the unknown task {task[:80]!r} of reasoning-gym{suggestion}")
  if len(pack(extra)) > MAX_PROBLEM_BYTES:
    raise ValueError(f"has an entry of more than {MAX_PROBLEM_BYTES} compressed bytes")


@functools.cache
def _pool() -> WorkerPool:
  return WorkerPool(check="gtpo_jax.rewards.gym.library:score", memory_mb=WORKER_MB)
