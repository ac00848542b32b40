"""Requests to an OpenAI-compatible endpoint, with limits, retries and a key that is never shown."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import openai

from gtpo_jax.rewards.judge.judge_settings import ENDPOINT, KEY_VARIABLE, JudgeSettings
from gtpo_jax.rewards.judge.replies import Failure, Reply, read_completion, retry_after
from gtpo_jax.runtime.errors import UserError

MIN_SECRET = 8  # characters; shorter keys, such as "EMPTY" for a server without keys, are no secret
MAX_REPLY_BYTES = 4 << 20
SHOWN_CHARS = 300  # of a server's message
FIRST_DELAY_S = 0.5  # before the first retry; it doubles with each
LONGEST_DELAY_S = 30.0
_JITTER = random.Random()  # of its own, so that the state of `random` is the user's
TRANSIENT = (408, 409, 425, 429)  # statuses below 500 after which a request is repeated
SENT = {  # headers of a request
  *("host", "connection", "accept", "accept-encoding", "user-agent"),
  *("content-type", "content-length"),
}
OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")  # headers of raw bytes


class Client:
  """Sends messages to the endpoint. All of its coroutines run on one event loop.

  Attributes:
    key: of the environment, "" for none.
    retried: how many requests were repeated.
  """

  def __init__(self, settings: JudgeSettings):
    self._settings = settings
    self.key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (self.key.isascii() and self.key.isprintable()) or " " in self.key:
      raise UserError(
        f"the key in {KEY_VARIABLE} has a space, a line end or a character outside ASCII; "
        "set it to the key alone"
      )
    self._slots = asyncio.Semaphore(settings.concurrency)
    self._open_at = 0.0  # when the server wants to be asked again, on the loop's clock
    self.retried = 0
    self._openai = openai.AsyncOpenAI(
      base_url=settings.endpoint.removesuffix(ENDPOINT),
      api_key="none",  # `_HttpClient` sends the key
      max_retries=0,
      timeout=None,
      http_client=_HttpClient(self.key),
    )
    self.close = self._openai.close

  def fields(self, content: str) -> dict[str, Any]:
    """Returns the fields of a request with a message."""
    settings = self._settings
    message = content.encode(errors="replace").decode()  # half of a surrogate pair cannot be sent
    fields = {
      "model": settings.model,
      "messages": [{"role": "user", "content": message}],
      "max_tokens": settings.max_tokens,
      "temperature": settings.temperature,
      **settings.further_fields,
    }
    return {name: value for name, value in fields.items() if value is not None}

  async def ask(self, fields: dict[str, Any], retries: int) -> Reply:
    """Sends a request, again after a transient failure, and returns the reply.

    Raises:
      Failure: the last one.
    """
    loop = asyncio.get_running_loop()
    for attempt in range(retries + 1):
      try:
        async with self._slots:
          await asyncio.sleep(max(0.0, self._open_at - loop.time()))
          return await self._post(fields)
      except Failure as failure:
        if not failure.retry or attempt == retries:
          raise
        if failure.after_s:  # it holds for all requests
          self._open_at = max(self._open_at, loop.time() + failure.after_s)
      self.retried += 1
      delay = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S)
      await asyncio.sleep(delay * _JITTER.uniform(0.75, 1.25))
    raise AssertionError("unreachable")

  async def _post(self, fields: dict[str, Any]) -> Reply:
    limit = self._settings.timeout_s
    began = time.perf_counter()
    try:
      async with asyncio.timeout(limit):
        content = await self._openai.post(ENDPOINT, cast_to=str, body=fields)
    except TimeoutError:
      message = f"no reply within reward.judge.timeout_s = {limit:g}"
      raise Failure("timeout", message) from None
    except openai.APIStatusError as error:
      raise self._rejected(error) from None
    except openai.APIConnectionError as error:
      cause = error.__cause__
      if isinstance(cause, Failure):
        raise cause from None
      reason = self.without_key(str(cause)) or type(cause).__name__
      raise Failure("connection", reason) from None
    text, tokens, cut_off = read_completion(content)
    return Reply(self.without_key(text), tokens, time.perf_counter() - began, cut_off)

  def _rejected(self, error: openai.APIStatusError) -> Failure:
    """Returns what the server says about a request, in one line and without the key."""
    status = error.status_code
    headers = error.response.headers
    body = error.body.get("message", "") if isinstance(error.body, dict) else error.body
    said = " ".join(self.without_key(str(body)).split())[:SHOWN_CHARS]
    message = f"status {status}: {said or 'no message'}"
    if target := headers.get("location"):  # not followed: the key is for this address only
      message = f"status {status}, a redirection to {self.without_key(target)[:SHOWN_CHARS]}"
    retry = status >= 500 or status in TRANSIENT
    return Failure(f"status {status}", message, status, retry, retry_after(headers))

  def without_key(self, text: str) -> str:
    """Returns a text in which the key, if the server repeats it, is replaced."""
    return text.replace(self.key, f"[{KEY_VARIABLE}]") if len(self.key) >= MIN_SECRET else text


class _HttpClient(openai.DefaultAsyncHttpxClient):
  """Sends the key, and no other header that the environment may hold for a server of OpenAI.

  It follows no redirection, and reads no response that is longer than `MAX_REPLY_BYTES`.
  """

  def __init__(self, key: str):
    super().__init__(follow_redirects=False)
    self._authorization = {"authorization": f"Bearer {key}"} if key else {}

  async def send(self, request: Any, **settings: Any) -> Any:
    """Sends a request, and returns the response with its whole content."""
    for name in request.headers.keys() - SENT:
      del request.headers[name]
    request.headers.update(self._authorization)
    response = await super().send(request, **{**settings, "stream": True})
    data = bytearray()
    try:
      async for part in response.aiter_bytes():
        data += part
        if len(data) > MAX_REPLY_BYTES:
          message = f"a response of more than {MAX_REPLY_BYTES >> 20} MiB"
          raise Failure("size", message, response.status_code, retry=False)
    finally:
      await response.aclose()
    headers = [x for x in response.headers.multi_items() if x[0].lower() not in OF_TRANSFER]
    status = response.status_code
    return type(response)(status, headers=headers, content=bytes(data), request=request)
