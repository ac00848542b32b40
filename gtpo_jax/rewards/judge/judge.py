"""The judge: asks a language model about completions, many at once, and reads its grades."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import hashlib
import io
import json
import re
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gtpo_jax.rewards.judge.judge_settings import KEY_VARIABLE, JudgeSettings, parse_scale
from gtpo_jax.rewards.judge.replies import Failure, Reply
from gtpo_jax.runtime.errors import JudgeError, UserError
from gtpo_jax.runtime.event_loop import EventLoop
from gtpo_jax.runtime.installing import require_package

FILE_NAME = "judge.jsonl"
PROBE = "Reply with the word ready."  # the message with which a run checks the endpoint
PROBE_RETRIES = 2
GIVE_UP = 4  # times the concurrency: so many completions in a row without a reply end the run
COUNTS = ("requests", "tokens", "cached", "failed", "retries")  # metrics that are sums
SHOWN_CHARS = 200  # of a reply in a message
_PLACE = re.compile(r"\{(prompt|completion|other|answer|question|mark)\}")


class Texts(NamedTuple):
  """What a judge reads about one completion; `other` is what it is compared with, "" for none."""

  prompt: str
  completion: str
  answer: str
  other: str = ""


class Judge:
  """Grades completions with a language model behind an endpoint.

  Requests run on an event loop, at most `concurrency` at once whoever calls. A completion has no
  grade if a request fails in the end, the reply has no grade of the scale, or the time is over; the
  first failure of each kind is printed.

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
    self._loop = EventLoop()
    self._places = asyncio.Semaphore(settings.concurrency)
    self._running: dict[Texts, asyncio.Task[float | None]] = {}
    self._counts: collections.Counter[str] = collections.Counter()
    self._seconds = 0.0
    self._counted_retries = 0
    self._unanswered = 0  # completions in a row without a reply
    self._shown: set[str] = set()
    self._lock = threading.Lock()  # of the counts

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

    async def ask() -> Reply:
      async with asyncio.timeout(limit):
        return await self._client.ask(self._client.fields(PROBE), PROBE_RETRIES)

    try:
      return self._run(ask()).seconds
    except TimeoutError:
      reason = f"no reply within reward.judge.timeout_s = {limit:g}"
    except Failure as failure:
      if failure.status in (401, 403):
        fix = "check the key in" if self._client.key else "it wants a key: set"
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
    rows = zip(prompts, completions, answers, strict=True)
    return self._run(self._grade_rows([Texts(*row) for row in rows]))

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
    rewards = iter(self._run(self._grade_rows(different)))
    return [0.5 if row.completion == row.other else next(rewards) for row in rows]

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
    self._loop.close(self._client.close)
    self._cache.close()

  def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns that runs on the event loop."""
    try:
      return self._loop.start(work).result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError):
      work.close()
      raise JudgeError("the judge was closed") from None

  async def _grade_rows(self, rows: Sequence[Texts]) -> list[float | None]:
    return await asyncio.gather(*map(self._grade_once, rows))

  async def _grade_once(self, texts: Texts) -> float | None:
    """Returns the reward of a completion, None without a grade; equal ones are graded once."""
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
    parts = [(json.dumps(fields), settings.pattern, settings.scale) for fields in asks]
    keys = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:32] for part in parts]
    rewards = [self._cache.get(key) for key in keys]
    asked = [i for i, reward in enumerate(rewards) if reward is None]
    self._count(cached=len(rewards) - len(asked))
    if asked:
      async with self._places:
        if self._unanswered >= GIVE_UP * settings.concurrency:
          raise JudgeError(
            f"the judge at {settings.base_url} has not answered for the last {self._unanswered} "
            "completions"
          )
        failures: list[Failure] = []
        questions = (self._ask(asks[i], keys[i], failures) for i in asked)
        try:
          async with asyncio.timeout(settings.completion_timeout_s):
            found = await asyncio.gather(*questions)
        except TimeoutError:
          limit = f"reward.judge.completion_timeout_s = {settings.completion_timeout_s:g}"
          failures.append(Failure("completion timeout", f"no grade within {limit}"))
          found = [None] * len(asked)
        self._note(failures)
      for i, reward in zip(asked, found, strict=True):
        rewards[i] = reward
    return None if None in rewards else sum(rewards) / len(rewards)

  async def _ask(self, fields: dict[str, Any], key: str, failures: list[Failure]) -> float | None:
    """Asks one question and returns its reward; None after adding the reason to `failures`."""
    settings = self._settings
    try:
      reply = await self._client.ask(fields, settings.retries)
    except Failure as failure:
      failures.append(failure)
      return None
    self._count(requests=1, tokens=reply.tokens, seconds=reply.seconds)
    grade = read_grade(reply.text, self._pattern)
    reward = None if grade is None else self._scale(grade)
    if reward is not None:
      seconds = round(reply.seconds, 3)
      self._cache.put(key, reward, reply=reply.text, tokens=reply.tokens, seconds=seconds)
      return reward
    text = reply.text
    shown = repr(text if len(text) <= SHOWN_CHARS else f"...{text[-SHOWN_CHARS:]}")
    if grade is not None:
      why = f"reward.judge.scale = {settings.scale!r} does not have the grade {grade[:80]!r}"
    elif reply.cut_off:
      limit = f"reward.judge.max_tokens = {settings.max_tokens}"
      why = f"its reply was cut off at {limit} without a grade: {shown}"
    else:
      why = f"reward.judge.pattern does not match its reply {shown}"
    failures.append(Failure("grade", why, retry=False))
    return None

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


class GradeCache:
  """The grades that a judge has given, on disk, so that no request is made twice.

  They are rewards by the digest of what they depend on. Until `open` is called, they are only in
  memory. Each entry is a line that is written at once, so a program that is killed loses none, and
  two programs may append to the same file.
  """

  def __init__(self):
    self._rewards: dict[str, float] = {}
    self._file: io.FileIO | None = None

  def open(self, path: Path) -> None:
    """Reads the entries of a file, except damaged ones, and appends further ones to it.

    If the file cannot be written, grades are only in memory, and a message says so.
    """
    line = b"\n"
    try:
      if path.exists():
        with path.open("rb") as lines:
          for line in lines:
            self._read(line)
      self._file = open(path, "ab", buffering=0)  # noqa: SIM115
      if not line.endswith(b"\n"):  # torn by a full disk
        self._file.write(b"\n")
    except OSError as error:
      self._give_up(error)

  def _read(self, line: bytes) -> None:
    try:
      row = json.loads(line)
      if 0 <= row["reward"] <= 1:
        self._rewards[row["key"]] = float(row["reward"])
    except (ValueError, TypeError, KeyError, RecursionError):
      pass

  def get(self, key: str) -> float | None:
    """Returns the reward under a key, or None."""
    return self._rewards.get(key)

  def put(self, key: str, reward: float, **details: Any) -> None:
    """Keeps a reward, and writes it with `details` for people who read the file."""
    self._rewards[key] = reward
    if self._file:
      line = json.dumps({"key": key, "reward": reward, **details}).encode() + b"\n"
      try:
        if self._file.write(line) < len(line):
          raise OSError("the disk is full")
      except OSError as error:
        self._give_up(error)

  def close(self) -> None:
    """Closes the file."""
    if self._file:
      self._file.close()
    self._file = None

  def _give_up(self, error: OSError) -> None:
    self.close()
    print(
      f"gtpo: grades cannot be written to {FILE_NAME} ({error}); a resumed run will ask the judge "
      "for them again",
      file=sys.stderr,
      flush=True,
    )


def render(template: str, texts: Texts, question: str) -> str:
  """Returns the message to the judge.

  All places are filled at once, so that a completion that contains "{answer}" stays as it is. The
  mark is a digest of the texts: a completion cannot contain its own.
  """
  content = "\0".join((*texts[:3], question, *filter(None, texts[3:])))
  mark = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
  values = {**texts._asdict(), "question": question, "mark": mark}
  return _PLACE.sub(lambda match: values[match[1]], template)


def read_grade(reply: str, pattern: re.Pattern[str]) -> str | None:
  """Returns the text of the first group of the last match; None without a match."""
  grade = None
  for match in pattern.finditer(reply):
    grade = next((group for group in match.groups() if group is not None), grade)
  return grade


def pairs_of(count: int, opponents: int) -> list[tuple[int, int]]:
  """Returns the comparisons of a group, each as the completion in the first place and the other.

  Completion i is in the first place against each of the next `opponents` ones, of which the first
  follow the last. So each is equally often in the first and in the second place.

  At most count - 1 opponents are used.
  """
  distances = range(1, min(opponents, count - 1) + 1)
  return [(i, (i + distance) % count) for distance in distances for i in range(count)]


def win_rates(
  count: int, pairs: Sequence[tuple[int, int]], rewards: Sequence[float | None]
) -> list[float | None]:
  """Returns the mean reward of each completion over its comparisons.

  The rewards are what the completion in the first place got, from 0 to 1; the other one gets the
  rest. Comparisons with None are left out. A completion without any other has None.
  """
  won: list[list[float]] = [[] for _ in range(count)]
  for (first, second), reward in zip(pairs, rewards, strict=True):
    if reward is not None:
      won[first].append(reward)
      won[second].append(1 - reward)
  return [sum(values) / len(values) if values else None for values in won]
