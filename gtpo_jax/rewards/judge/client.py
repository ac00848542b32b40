"""Requests to an OpenAI-compatible endpoint, with limits, retries and a key that is never shown."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from typing import Any, NamedTuple

from gtpo_jax.rewards.judge.settings import JudgeSettings
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.installing import install_command

KEY_VARIABLE = "GTPO_JUDGE_API_KEY"
MIN_SECRET = 8  # characters; shorter keys, such as "EMPTY" for a server without keys, are no secret
MAX_REPLY_BYTES = 4 << 20
SHOWN_CHARS = 300  # of a server's message
FIRST_DELAY_S = 0.5  # before the first retry; it doubles with each
LONGEST_DELAY_S = 30.0
_JITTER = random.Random()  # of its own, so that the state of `random` is the user's
TRANSIENT = (408, 409, 425, 429)  # statuses below 500 after which a request is repeated


class Reply(NamedTuple):
  """A judge's reply.

  Attributes:
    text: what it wrote.
    tokens: prompt and reply, as the server counts them; 0 if it does not.
    seconds: the time that the request took.
    cut_off: whether it was cut off at the maximum length.
  """

  text: str
  tokens: int
  seconds: float
  cut_off: bool


class Failure(Exception):
  """There is no reply.

  Attributes:
    kind: "connection", "timeout", "status", "reply" or the like; each is shown once.
    status: of the response, 0 without one.
    retry: whether the same request may succeed later.
    after_s: seconds after which the server wants to be asked again.
  """

  def __init__(
    self, kind: str, message: str, status: int = 0, retry: bool = True, after_s: float = 0.0
  ):
    super().__init__(message)
    self.kind = kind
    self.status = status
    self.retry = retry
    self.after_s = after_s


class Client:
  """Sends messages to the endpoint. All of its coroutines run on one event loop.

  Attributes:
    retried: how many requests were repeated.

  Raises:
    UserError: the package for HTTP is missing, or the key cannot be part of a request.
  """

  def __init__(self, settings: JudgeSettings):
    try:
      import httpx2
    except ImportError:
      raise UserError(
        f"reward.judge needs the package httpx2: {install_command('judge')}"
      ) from None
    self._errors = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL)
    self._settings = settings
    self._key = _key()
    self._slots = asyncio.Semaphore(settings.concurrency)
    self._open_at = 0.0  # when the server wants to be asked again, on the loop's clock
    self.retried = 0
    limits = httpx2.Limits(
      max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency
    )
    headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
    self._http = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)

  async def close(self) -> None:
    """Closes the connections."""
    await self._http.aclose()

  def body(self, content: str) -> bytes:
    """Returns a request with a message, as JSON."""
    settings = self._settings
    fields = {
      "model": settings.model,
      "messages": [{"role": "user", "content": content}],
      "max_tokens": settings.max_tokens,
      "temperature": settings.temperature,
      **settings.further_fields,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(fields).encode()

  async def ask(self, body: bytes, retries: int) -> Reply:
    """Sends a request, again after a transient failure, and returns the reply.

    Raises:
      Failure: the last one.
    """
    loop = asyncio.get_running_loop()
    for attempt in range(retries + 1):
      try:
        async with self._slots:
          await asyncio.sleep(max(0.0, self._open_at - loop.time()))
          return await self._post(body)
      except Failure as failure:
        if not failure.retry or attempt == retries:
          raise
        if failure.after_s:  # it holds for all requests
          self._open_at = max(self._open_at, loop.time() + failure.after_s)
      self.retried += 1
      delay = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S)
      await asyncio.sleep(delay * _JITTER.uniform(0.75, 1.25))
    raise AssertionError("unreachable")

  async def _post(self, body: bytes) -> Reply:
    limit = self._settings.timeout_s
    began = time.perf_counter()
    try:
      async with asyncio.timeout(limit):
        status, headers, data = await self._response(body)
    except TimeoutError:
      message = f"no reply within reward.judge.timeout_s = {limit:g}"
      raise Failure("timeout", message) from None
    except self._errors as error:
      reason = self.without_key(str(error)) or type(error).__name__
      raise Failure("connection", reason) from None
    if status != 200:
      message = f"status {status}: {self._message(data)}"
      if target := headers.get("location"):  # not followed: the key is for this address only
        message = f"status {status}, a redirection to {target[:SHOWN_CHARS]}"
      retry = status >= 500 or status in TRANSIENT
      raise Failure(f"status {status}", message, status, retry, _retry_after(headers))
    text, tokens, cut_off = _completion(data)
    return Reply(self.without_key(text), tokens, time.perf_counter() - began, cut_off)

  async def _response(self, body: bytes) -> tuple[int, Any, bytes]:
    headers = {"Content-Type": "application/json"}
    url = self._settings.endpoint
    async with self._http.stream("POST", url, content=body, headers=headers) as response:
      data = bytearray()
      async for part in response.aiter_bytes():
        data += part
        if len(data) > MAX_REPLY_BYTES:
          message = f"a response of more than {MAX_REPLY_BYTES >> 20} MiB"
          raise Failure("size", message, response.status_code, retry=False)
      return response.status_code, response.headers, bytes(data)

  def _message(self, data: bytes) -> str:
    """Returns what the server says about an error, in one line and without the key."""
    text = data.decode(errors="replace")
    try:
      error = json.loads(text)["error"]
      text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, TypeError, KeyError, RecursionError):
      pass
    text = " ".join(self.without_key(str(text)).split())
    return text[:SHOWN_CHARS] or "no message"

  def without_key(self, text: str) -> str:
    """Returns a text in which the key, if the server repeats it, is replaced."""
    return text.replace(self._key, f"[{KEY_VARIABLE}]") if len(self._key) >= MIN_SECRET else text

  @property
  def has_key(self) -> bool:
    """Whether the environment has a key."""
    return bool(self._key)


def _key() -> str:
  """Returns the key of the environment, or "".

  Raises:
    UserError: a header cannot contain it. The message does not show it.
  """
  key = os.environ.get(KEY_VARIABLE, "").strip()
  if not (key.isascii() and key.isprintable()) or " " in key:
    raise UserError(
      f"the key in {KEY_VARIABLE} has a space, a line end or a character outside ASCII; "
      "set it to the key alone"
    )
  return key


def _completion(data: bytes) -> tuple[str, int, bool]:
  """Returns the text of a chat completion, its tokens, and whether it was cut off.

  Raises:
    Failure: the response is no chat completion.
  """
  try:
    response = json.loads(data)
    choice = response["choices"][0]
    text = choice["message"].get("content") or ""
    if not isinstance(text, str):
      raise TypeError
  except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
    raise Failure("response", "a response that is no chat completion") from None
  usage = response.get("usage")
  tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
  counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 2**31
  return text, tokens if counted else 0, choice.get("finish_reason") == "length"


def _retry_after(headers: Any) -> float:
  """Returns the seconds in the header Retry-After, a number or a date; 0 without one."""
  text = headers.get("retry-after", "")
  try:
    seconds = float(text)
  except ValueError:
    try:
      seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
      return 0.0
  return seconds if 0 < seconds < 86_400 else 0.0
