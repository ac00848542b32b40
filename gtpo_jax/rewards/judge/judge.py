"""The judge: grades completions on a thread of its own, many at once."""

from __future__ import annotations

import asyncio
import collections
import json
import re
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from gtpo_jax.rewards.judge.grade_cache import FILE_NAME, GradeCache, digest_of
from gtpo_jax.rewards.judge.grades import Texts, parse_scale, read_grade, render
from gtpo_jax.rewards.judge.judge_settings import KEY_VARIABLE, JudgeSettings
from gtpo_jax.rewards.judge.replies import Failure
from gtpo_jax.runtime.errors import JudgeError, UserError
from gtpo_jax.runtime.installing import require_package

PROBE = "Reply with the word ready."  # the message with which a run checks the endpoint
PROBE_RETRIES = 2
GIVE_UP = 4  # times the concurrency: so many completions in a row without a reply end the run
COUNTS = ("requests", "tokens", "cached", "failed", "retries")  # metrics that are sums
CLOSE_S = 5.0  # seconds that cancelled requests may take to end
SHOWN_CHARS = 200  # of a reply in a message


class Judge:
  """Grades completions with a language model behind an endpoint.

  Requests run on the event loop of one thread, which starts with the first of them, at most
  `concurrency` at once whoever calls. A completion has no grade if a request fails in the end, the
  reply has no grade of the scale, or the time is over; the first failure of each kind is printed.

  Raises:
    UserError: the key cannot be used, or the package openai is missing.
  """

  def __init__(self, settings: JudgeSettings):
    require_package("openai", "reward.judge", "judge")
    from gtpo_jax.rewards.judge.client import Client

    self._settings = settings
    self._scale = parse_scale(settings.scale)
    self._pattern = re.compile(settings.pattern)
    self._client = Client(settings)
    self._cache = GradeCache()
    self._places = asyncio.Semaphore(settings.concurrency)
    self._running: dict[Texts, asyncio.Task[float | None]] = {}
    self._counts: collections.Counter[str] = collections.Counter()
    self._seconds = 0.0
    self._counted_retries = 0
    self._unanswered = 0  # completions in a row without a reply
    self._shown: set[str] = set()
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._thread: threading.Thread | None = None
    self._closed = False

  def use_cache(self, folder: Path) -> None:
    """Keeps grades in a folder, and takes those that it has already; see `GradeCache.open`."""
    self._cache.open(folder / FILE_NAME)

  def probe(self) -> float:
    """Checks the endpoint, the model and the key with one request, and returns its seconds.

    Raises:
      UserError: the judge cannot be asked; the message says why.
    """
    settings = self._settings
    limit = settings.timeout_s

    async def ask() -> float:
      async with asyncio.timeout(limit):
        return (await self._client.ask(self._client.fields(PROBE), PROBE_RETRIES)).seconds

    try:
      return self._on_loop(ask())
    except TimeoutError:
      reason = f"no reply within reward.judge.timeout_s = {limit:g}"
    except Failure as failure:
      if failure.status in (401, 403):
        fix = "check the key in" if self._client.has_key else "it wants a key: set"
        raise UserError(
          f"the judge at {settings.base_url} refuses access ({failure}); {fix} the environment "
          f"variable {KEY_VARIABLE}"
        ) from None
      reason = str(failure)
      if failure.status == 404:
        reason += f"; check reward.judge.model = {settings.model!r}"
    raise UserError(
      f"the judge at {settings.endpoint} cannot be asked: {reason}; check reward.judge.base_url "
      "and that the server is running"
    )

  def grade(
    self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
  ) -> list[float | None]:
    """Returns a reward in [0, 1] for each completion, None if it has no grade.

    It may be called on several threads at once. Equal completions of a prompt are graded once.

    Raises:
      JudgeError: too many completions in a row had no reply, or `close` was called.
    """
    return self._grade_rows(
      [Texts(*row) for row in zip(prompts, completions, answers, strict=True)]
    )

  def compare(
    self, prompts: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]
  ) -> list[float | None]:
    """Returns the reward in [0, 1] of each first text against the second, None without a grade.

    The second one gets the rest. Equal texts get 0.5 each, without a request. Otherwise this is as
    `grade`.
    """
    rows = [
      Texts(prompt, first, "", second)
      for prompt, first, second in zip(prompts, firsts, seconds, strict=True)
    ]
    different = [row for row in rows if row.completion != row.other]
    rewards = iter(self._grade_rows(different))
    return [0.5 if row.completion == row.other else next(rewards) for row in rows]

  def _grade_rows(self, rows: Sequence[Texts]) -> list[float | None]:
    try:
      return self._on_loop(self._grade_all(rows))
    except (asyncio.CancelledError, CancelledError):
      raise JudgeError("the judge was closed") from None

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

  def close(self) -> None:
    """Cancels what is under way and ends the thread; replies so far are in the cache."""
    with self._lock:
      self._closed = True
      loop, self._loop = self._loop, None
    if loop:
      loop.call_soon_threadsafe(loop.stop)
      self._thread.join(CLOSE_S)
    self._cache.close()

  def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
    with self._lock:
      if self._closed:
        coroutine.close()
        raise JudgeError("the judge was closed")
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a request cannot keep the program from ending.
        self._thread = threading.Thread(
          target=self._run, args=(self._loop,), name="gtpo judge", daemon=True
        )
        self._thread.start()
      future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    return future.result()

  def _run(self, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
      loop.run_forever()
      loop.run_until_complete(self._cancel_all())
    finally:
      loop.close()

  async def _cancel_all(self) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._client.close()

  async def _grade_all(self, rows: Sequence[Texts]) -> list[float | None]:
    return await asyncio.gather(*map(self._grade_once, rows))

  async def _grade_once(self, texts: Texts) -> float | None:
    """Grades a completion, or waits for the grade of an equal one."""
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
