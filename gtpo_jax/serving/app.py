"""The HTTP side of the server: paths, the token, errors, and parts as server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.errors import ApiError, bad
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.requests import MAX_BODY, Fields, one_line, read_chat, read_completion, shown
from gtpo_jax.serving.service import RETRY_AFTER_S, Job, Service

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CLOSED_REQUEST = 499  # what logs call a request whose client has gone; nobody reads it


class App:
  """The paths of a server.

  Attributes:
    asgi: the application that a server runs.
  """

  def __init__(self, service: Service, generator: Generator, token: str, only_loopback: bool):
    """Args:
    service: answers requests.
    generator: its generator.
    token: what clients must send as a bearer token; "" for nothing.
    only_loopback: whether to refuse requests for other hosts, which a page in a browser could make
      if its own name leads to this address.
    """
    self._service = service
    self._generator = generator
    self._token = token
    self._only_loopback = only_loopback
    routes = [
      Route("/health", self._answer(self._health, is_open=True)),
      Route("/metrics", self._answer(self._metrics)),
      Route("/v1/models", self._answer(self._models)),
      Route("/v1/models/{name:path}", self._answer(self._model)),
      Route("/v1/chat/completions", self._answer(self._chat), methods=["POST"]),
      Route("/v1/completions", self._answer(self._completions), methods=["POST"]),
    ]
    self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

  def _answer(
    self, handler: Callable[[Request], Awaitable[Response]], is_open: bool = False
  ) -> Callable[[Request], Awaitable[Response]]:
    """Returns a handler whose errors become the protocol's error object."""

    async def answer(request: Request) -> Response:
      try:
        self._check_host(request)
        if not is_open:
          self._check_token(request)
        return await handler(request)
      except ApiError as error:
        return _error(error)
      except UserError as error:
        return _error(one_line(error))
      except ClientDisconnect:
        return Response(status_code=CLOSED_REQUEST)
      except Exception:
        print("gtpo: a request failed", file=sys.stderr)
        traceback.print_exc()
        return _error(ApiError(500, "the server has failed to answer; its log says why"))

    return answer

  def _check_host(self, request: Request) -> None:
    host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
    if self._only_loopback and host not in LOOPBACK:
      raise ApiError(403, "this server answers requests for localhost only")

  def _check_token(self, request: Request) -> None:
    if not self._token:
      return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
      raise ApiError(
        401,
        "the token is missing or wrong; send it as Authorization: Bearer TOKEN",
        code="invalid_api_key",
      )

  async def _health(self, request: Request) -> Response:
    return JSONResponse({"status": "ok"})

  async def _metrics(self, request: Request) -> Response:
    generator = self._generator
    lines = []
    gauges = {"running": generator.running, "waiting": generator.waiting, "slots": generator.slots}
    for name, value in gauges.items():
      lines += [f"# TYPE gtpo_{name} gauge", f"gtpo_{name} {value}"]
    for name in COUNTERS:
      value = generator.counts[name]
      lines += [f"# TYPE gtpo_{name}_total counter", f"gtpo_{name}_total {value}"]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

  async def _models(self, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [self._description()]})

  async def _model(self, request: Request) -> Response:
    self._check_model(request.path_params["name"])
    return JSONResponse(self._description())

  def _description(self) -> dict[str, Any]:
    service = self._service
    return {
      "id": service.name,
      "object": "model",
      "created": service.created,
      "owned_by": "gtpo_jax",
    }

  async def _chat(self, request: Request) -> Response:
    read = read_chat(await self._fields(request))
    service = self._service
    job = service.chat_job(read)
    if read.sampling.stream:
      return _Events(service.chat_stream(read, job), job)
    await _whole(request, job)
    return JSONResponse(service.chat_answer(read, job))

  async def _completions(self, request: Request) -> Response:
    read = read_completion(await self._fields(request))
    service = self._service
    job = service.completion_job(read)
    if read.sampling.stream:
      return _Events(service.completion_stream(read, job), job)
    await _whole(request, job)
    return JSONResponse(service.completion_answer(read, job))

  async def _fields(self, request: Request) -> Fields:
    """Returns the fields of a body, without "model"."""
    body = bytearray()
    async for part in request.stream():
      body += part
      if len(body) > MAX_BODY:
        raise ApiError(413, f"the body is over the limit of {MAX_BODY} bytes")
    fields = Fields(bytes(body))
    name = fields.text("model")
    if name is None:
      raise bad(f"model is missing; this server has {self._service.name!r}", "model")
    self._check_model(name)
    return fields

  def _check_model(self, name: str) -> None:
    if name != self._service.name:
      raise ApiError(
        404,
        f"there is no model {shown(name)}; this server has {self._service.name!r}",
        "model",
        "model_not_found",
      )


COUNTERS = (
  "completions",
  "cancelled",
  "failed",
  "prompt_tokens",
  "generated_tokens",
  "scored_tokens",
  "chunks",
)


async def _whole(request: Request, job: Job) -> None:
  """Waits until all choices have ended.

  Raises:
    ClientDisconnect: the client has gone, and its choices were cancelled.
  """

  async def collect() -> None:
    async for _ in job.parts():
      pass

  async def gone() -> None:
    while (await request.receive())["type"] != "http.disconnect":
      pass

  tasks = [asyncio.create_task(collect()), asyncio.create_task(gone())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[0].done():
      raise ClientDisconnect
    await tasks[0]
  finally:
    job.close()
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Events(StreamingResponse):
  """Server-sent events. If the client hangs up, what has not ended is cancelled."""

  def __init__(self, parts: AsyncIterator[dict[str, Any]], job: Job):
    super().__init__(_events(parts), media_type="text/event-stream")
    self._job = job

  async def __call__(self, *args: Any) -> None:
    try:
      await super().__call__(*args)
    finally:
      self._job.close()


async def _events(parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
  """Yields events with the parts of an answer. An error after the first is an event too."""
  try:
    async for part in parts:
      yield f"data: {json.dumps(part)}\n\n"
  except ApiError as error:
    yield f"data: {json.dumps(error.body())}\n\n"
  yield "data: [DONE]\n\n"


def _error(error: ApiError) -> Response:
  headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_AFTER_S)}}
  return JSONResponse(error.body(), error.status, headers=headers.get(error.status))


async def _http_error(request: Request, error: HTTPException) -> Response:
  """Returns the error of a path or method that does not exist."""
  what = {404: "there is no such path", 405: "this path has another method"}
  message = what.get(error.status_code, "the request is wrong")
  return _error(ApiError(error.status_code, message))
