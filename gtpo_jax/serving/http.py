"""HTTP for the protocol: errors, bodies, whole answers and events, and servers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.choices import Job
from gtpo_jax.serving.requests import MAX_BODY, ApiError, one_line, parse_object

LONG_BODY = 65_536  # bytes, from which JSON is read on another thread
CLOSED_REQUEST = 499  # what logs call a request whose client has gone; nobody reads it
RETRY_AFTER_S = 1
STOP_S = 5  # time for answers under way once a server is asked to stop
Handler = Callable[[Request], Awaitable[Response]]


def starlette_app(routes: list[BaseRoute]) -> Starlette:
  """Returns an app whose paths and methods that do not exist get the protocol's errors."""
  return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


def answering(
  handler: Handler,
  only_loopback: bool,
  token: str = "",
  sent: Callable[[Request], str] | None = None,
) -> Handler:
  """Returns a handler whose errors become the protocol's error object.

  Args:
    handler: the handler.
    only_loopback: whether to refuse requests that a page in a browser could make: for other hosts,
      if its own name leads to this address, and with bodies that are not called JSON.
    token: what clients must send; "" for nothing.
    sent: returns what a client has sent in a header of its own, which a page elsewhere cannot send,
      so that its bodies may have any type; None for a bearer token.
  """

  async def answer(request: Request) -> Response:
    try:
      if only_loopback:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(name.removeprefix("[").removesuffix("]")):
          raise ApiError(403, "this server answers requests for localhost only")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent is None and request.method == "POST" and kind != "application/json":
          raise ApiError(415, "send the body with Content-Type: application/json")
      given = bearer(request) if sent is None else sent(request)
      # Headers are read as Latin-1, whatever their bytes mean.
      if token and not hmac.compare_digest(given.encode("latin-1"), token.encode()):
        how = "as Authorization: Bearer TOKEN" if sent is None else "as the client's API key"
        raise ApiError(401, f"the token is missing or wrong; send it {how}", code="invalid_api_key")
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


def bearer(request: Request) -> str:
  """Returns the token that a client has sent; "" if it has sent none."""
  kind, _, given = request.headers.get("authorization", "").partition(" ")
  return given if kind.lower() == "bearer" else ""


async def read_body(request: Request, most: int = MAX_BODY, whole: bool = True) -> bytes:
  """Returns a body; without `whole`, the first `most` + 1 bytes of a longer one."""
  body = bytearray()
  async for part in request.stream():
    if len(body) <= most:  # the rest is dropped: a client reads no answer before it has sent all
      body += part
  if len(body) > most and whole:
    raise ApiError(413, f"the body is over the limit of {most} bytes")
  return bytes(body[: most + 1])  # the same bytes, however the network has divided them


async def read_fields(
  request: Request, most: int = MAX_BODY, empty: bool = False
) -> dict[str, Any]:
  """Returns the fields of a body; those that are null are left out."""
  body = await read_body(request, most)
  if empty and not body:
    return {}
  if len(body) < LONG_BODY:
    return parse_object(body)
  return await asyncio.to_thread(parse_object, body)


async def respond(
  request: Request,
  job: Job,
  whole: Callable[..., dict[str, Any]],
  stream: Callable[..., AsyncIterator[dict[str, Any]]],
) -> Response:
  """Returns the answer of a job, whole or in parts as its request wants it.

  Args:
    request: what the client has sent.
    job: what generates the answer.
    whole, stream: write it, as the methods of `Answers` do.

  Raises:
    ApiError: generation has failed.
    ClientDisconnect: the client has gone, and its choices were cancelled.
  """
  if job.request.stream:
    return _Events(stream(job.request, job.choices, job.parts()), job)

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
  return JSONResponse(whole(job.request, job.choices))


class _Events(StreamingResponse):
  """Server-sent events. If the client hangs up, what has not ended is cancelled."""

  def __init__(self, parts: AsyncIterator[dict[str, Any]], job: Job):
    super().__init__(_events(parts), media_type="text/event-stream")
    self._job = job

  async def __call__(self, *args: Any) -> None:
    """Sends the events."""
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


def make_server(asgi: Starlette) -> uvicorn.Server:
  """Returns an HTTP server that leaves signals to its caller."""
  config = uvicorn.Config(
    asgi,
    http="h11",
    ws="none",
    lifespan="off",
    loop="asyncio",
    log_level="critical",  # errors of requests have been printed
    access_log=False,
    server_header=False,
    timeout_graceful_shutdown=STOP_S,
  )
  return _Server(config)


class _Server(uvicorn.Server):
  capture_signals = contextlib.nullcontext


def is_loopback(host: str) -> bool:
  """Returns whether only this machine reaches an address."""
  if host == "localhost":
    return True
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host).is_loopback
  return False


def listen(host: str, port: int) -> socket.socket:
  """Returns a socket that listens."""
  try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
  except (OSError, OverflowError) as error:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    raise UserError(f"cannot listen on {host}:{port}: {reason}; use another --port") from error
