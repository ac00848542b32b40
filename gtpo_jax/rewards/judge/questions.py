"""Asks a judge the questions about completions, and reads and counts its grades."""

from __future__ import annotations

import asyncio
import collections
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gtpo_jax.rewards.judge.grade_cache import GradeCache, digest_of
from gtpo_jax.rewards.judge.grades import Texts, parse_scale, read_grade, render
from gtpo_jax.rewards.judge.judge_settings import JudgeSettings
from gtpo_jax.rewards.judge.replies import Failure
from gtpo_jax.runtime.errors import JudgeError

if TYPE_CHECKING:
  from gtpo_jax.rewards.judge.client import Client

GIVE_UP = 4  # times the concurrency: so many completions in a row without a reply end the run
COUNTS = ("requests", "tokens", "cached", "failed", "retries")  # metrics that are sums
SHOWN_CHARS = 200  # of a reply in a message


class Questions:
  """Grades completions, at most `concurrency` at once. All of its coroutines run on one event loop.

  The first failure of each kind is printed.
  """

  def __init__(self, settings: JudgeSettings, client: Client, cache: GradeCache):
    self._settings = settings
    self._scale = parse_scale(settings.scale)
    self._pattern = re.compile(settings.pattern)
    self._client = client
    self._cache = cache
    self._places = asyncio.Semaphore(settings.concurrency)
    self._running: dict[Texts, asyncio.Task[float | None]] = {}
    self._counts: collections.Counter[str] = collections.Counter()
    self._seconds = 0.0
    self._counted_retries = 0
    self._unanswered = 0  # completions in a row without a reply
    self._shown: set[str] = set()
    self._lock = threading.Lock()

  def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the sums since the last call, and the number of requests that took the seconds."""
    with self._lock:
      counts, seconds = self._counts, self._seconds
      self._counts = collections.Counter()
      self._seconds = 0.0
      counts["retries"] = self._client.retried - self._counted_retries
      self._counted_retries = self._client.retried
    sums = {f"judge/{name}": float(counts[name]) for name in COUNTS}
    return {**sums, "judge/seconds": seconds}, {"judge/seconds": float(counts["requests"])}

  async def grade(self, texts: Texts) -> float | None:
    """Returns the reward of a completion, None without a grade; equal ones are graded once.

    Raises:
      JudgeError: the server has not replied for many completions.
    """
    task = self._running.get(texts)
    if task:
      reward = await asyncio.shield(task)
      self._count(cached=0 if reward is None else len(self._settings.questions))
    else:
      task = self._running[texts] = asyncio.create_task(self._grade(texts))
      try:
        reward = await task
      finally:
        del self._running[texts]
    if reward is None:
      self._count(failed=1)
    return reward

  async def _grade(self, texts: Texts) -> float | None:
    """Returns the mean reward of all questions about a completion, None without a grade."""
    settings = self._settings
    asks = [
      self._client.fields(render(settings.template, texts, question))
      for question in settings.questions
    ]
    keys = [digest_of(json.dumps(fields), settings.pattern, settings.scale) for fields in asks]
    known = [self._cache.get(key) for key in keys]
    self._count(cached=len(known) - known.count(None))
    asked = [i for i, reward in enumerate(known) if reward is None]
    if asked:
      async with self._places:
        self._check_answering()
        failures: list[Failure] = []
        questions = (self._ask(asks[i], keys[i], failures) for i in asked)
        try:
          async with asyncio.timeout(settings.completion_timeout_s):
            rewards = await asyncio.gather(*questions)
        except TimeoutError:
          limit = f"reward.judge.completion_timeout_s = {settings.completion_timeout_s:g}"
          failures.append(Failure("completion timeout", f"no grade within {limit}"))
          rewards = [None] * len(asked)
        self._note(failures)
      for i, reward in zip(asked, rewards, strict=True):
        known[i] = reward
    return None if None in known else sum(known) / len(known)

  async def _ask(self, fields: dict[str, Any], key: str, failures: list[Failure]) -> float | None:
    """Asks one question and returns its reward; None after adding the reason to `failures`."""
    try:
      reply = await self._client.ask(fields, self._settings.retries)
    except Failure as failure:
      failures.append(failure)
      return None
    self._count(requests=1, tokens=reply.tokens, seconds=reply.seconds)
    grade = read_grade(reply.text, self._pattern)
    reward = None if grade is None else self._scale(grade)
    if reward is None:
      failures.append(_no_grade(reply.text, grade, reply.cut_off, self._settings))
      return None
    seconds = round(reply.seconds, 3)
    self._cache.put(key, reward, reply=reply.text, tokens=reply.tokens, seconds=seconds)
    return reward

  def _check_answering(self) -> None:
    """Raises JudgeError if the server has not replied for many completions."""
    if self._unanswered >= GIVE_UP * self._settings.concurrency:
      raise JudgeError(
        f"the judge at {self._settings.base_url} has not answered for the last {self._unanswered} "
        "completions"
      )

  def _note(self, failures: Sequence[Failure]) -> None:
    """Counts completions without a reply, and shows the first failure of each kind."""
    silent = any(failure.kind != "grade" for failure in failures)
    self._unanswered = self._unanswered + 1 if silent else 0
    for failure in failures:
      if failure.kind not in self._shown:
        self._shown.add(failure.kind)
        clock = time.strftime("%H:%M:%S")
        print(
          f"gtpo: {clock}: the judge gave no grade: {failure}; the completion is left out and "
          "counted in judge/failed",
          file=sys.stderr,
          flush=True,
        )

  def _count(self, seconds: float = 0.0, **counts: int) -> None:
    with self._lock:
      self._counts.update(counts)
      self._seconds += seconds


def _no_grade(text: str, grade: str | None, cut_off: bool, settings: JudgeSettings) -> Failure:
  """Returns why a reply has no reward."""
  shown = text if len(text) <= SHOWN_CHARS else f"...{text[-SHOWN_CHARS:]}"
  if grade is not None:
    message = f"reward.judge.scale = {settings.scale!r} does not have the grade {grade[:80]!r}"
  elif cut_off:
    message = (
      f"its reply was cut off at reward.judge.max_tokens = {settings.max_tokens} without a grade: "
      f"{shown!r}"
    )
  else:
    message = f"reward.judge.pattern does not match its reply {shown!r}"
  return Failure("grade", message, retry=False)
