"""The paths of the server, and the two that an agent's endpoint has too."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gtpo_jax.serving.answers import Answers
from gtpo_jax.serving.choices import Job
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.http import Handler, answering, read_fields, respond, starlette_app
from gtpo_jax.serving.requests import ApiError, ChatRequest, CompletionRequest, bad, checked, shown
from gtpo_jax.serving.service import Service


def chat_routes(
  answers: Answers,
  fields: Callable[[Request], Awaitable[dict[str, Any]]],
  start: Callable[[Request, dict[str, Any]], Awaitable[Job]],
  answer: Callable[[Handler], Handler],
) -> list[Route]:
  """Returns the paths /v1/models and /v1/chat/completions.

  Args:
    answers: writes the answers.
    fields: reads a body, and takes "model" from it.
    start: starts a chat with the fields of a request.
    answer: turns errors of a handler into answers, as `answering`.
  """

  async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [answers.model()]})

  async def chat(request: Request) -> Response:
    job = await start(request, await fields(request))
    return await respond(request, job, answers.chat, answers.chat_stream)

  return [
    Route("/v1/models", answer(models)),
    Route("/v1/chat/completions", answer(chat), methods=["POST"]),
  ]


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
    self._answers = service.answers
    self._generator = generator
    answer = functools.partial(answering, only_loopback=only_loopback, token=token)
    routes = [
      *chat_routes(self._answers, self._fields, self._start_chat, answer),
      Route("/health", answering(self._health, only_loopback)),
      Route("/metrics", answer(self._metrics)),
      Route("/v1/models/{name:path}", answer(self._model)),
      Route("/v1/completions", answer(self._completions), methods=["POST"]),
    ]
    self.asgi = starlette_app(routes)

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

  async def _model(self, request: Request) -> Response:
    self._check_model(request.path_params["name"])
    return JSONResponse(self._answers.model())

  async def _completions(self, request: Request) -> Response:
    fields = await self._fields(request)
    start = lambda loop: self._service.completion_job(checked(CompletionRequest, fields), loop)
    job = await _on_thread(start)
    return await respond(request, job, self._answers.completion, self._answers.completion_stream)

  async def _start_chat(self, request: Request, fields: dict[str, Any]) -> Job:
    return await _on_thread(lambda loop: self._service.chat_job(checked(ChatRequest, fields), loop))

  async def _fields(self, request: Request) -> dict[str, Any]:
    """Returns the fields of a body, without "model"."""
    fields = await read_fields(request)
    name = fields.pop("model", None)
    if name is None:
      raise bad(f"model is missing; this server has {self._answers.name!r}", "model")
    self._check_model(name)
    return fields

  def _check_model(self, name: Any) -> None:
    if name != self._answers.name:
      raise ApiError(
        404,
        f"there is no model {shown(name)}; this server has {self._answers.name!r}",
        "model",
        "model_not_found",
      )


async def _on_thread(start: Callable[[asyncio.AbstractEventLoop], Job]) -> Job:
  """Starts a job for this event loop on a thread: checking and encoding a long prompt take long."""
  return await asyncio.to_thread(start, asyncio.get_running_loop())


COUNTERS = (
  "completions",
  "cancelled",
  "failed",
  "prompt_tokens",
  "generated_tokens",
  "scored_tokens",
  "chunks",
)
