"""The judge: grades completions on a thread of its own, many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from gtpo_jax.rewards.judge.grade_cache import FILE_NAME, GradeCache
from gtpo_jax.rewards.judge.grades import Texts
from gtpo_jax.rewards.judge.judge_settings import KEY_VARIABLE, JudgeSettings
from gtpo_jax.rewards.judge.questions import Questions
from gtpo_jax.rewards.judge.replies import Failure
from gtpo_jax.runtime.errors import JudgeError, UserError
from gtpo_jax.runtime.installing import require_package

PROBE = "Reply with the word ready."  # the message with which a run checks the endpoint
PROBE_RETRIES = 2
CLOSE_S = 5.0  # seconds that cancelled requests may take to end


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
    self._client = Client(settings)
    self._cache = GradeCache()
    self._questions = Questions(settings, self._client, self._cache)
    self._thread = _LoopThread("gtpo judge", self._client.close)

  def use_cache(self, folder: Path) -> None:
    """Keeps grades in a folder, and takes what it has already; see `GradeCache.open`."""
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
      return self._thread.run(ask())
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
    async def grade_all() -> list[float | None]:
      return await asyncio.gather(*map(self._questions.grade, rows))

    try:
      return self._thread.run(grade_all())
    except (asyncio.CancelledError, CancelledError):
      raise JudgeError("the judge was closed") from None

  def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the sums since the last call, and the number of requests that took the seconds."""
    return self._questions.take_metrics()

  def close(self) -> None:
    """Cancels what is under way and ends the thread; replies so far are in the cache."""
    self._thread.close()
    self._cache.close()


class _LoopThread:
  """Runs coroutines on a thread of its own, which starts with the first of them.

  `at_end` is called on its loop, after everything there has been cancelled.
  """

  def __init__(self, name: str, at_end: Callable[[], Awaitable[None]]):
    self._name = name
    self._at_end = at_end
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._thread: threading.Thread | None = None
    self._closed = False

  def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns."""
    with self._lock:
      if self._closed:
        coroutine.close()
        raise JudgeError("the judge was closed")
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a request cannot keep the program from ending.
        self._thread = threading.Thread(
          target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()
      future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    return future.result()

  def close(self) -> None:
    """Cancels what is under way and ends the thread."""
    with self._lock:
      self._closed = True
      loop, self._loop = self._loop, None
    if loop:
      loop.call_soon_threadsafe(loop.stop)
      self._thread.join(CLOSE_S)

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
    await self._at_end()
