"""The paths of the server."""

from __future__ import annotations

import functools

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gtpo_jax.serving.errors import ApiError, bad
from gtpo_jax.serving.generator import Generator
from gtpo_jax.serving.http import Events, answering, read_fields, starlette_app, wait_for
from gtpo_jax.serving.requests import Fields, read_chat, read_completion, shown
from gtpo_jax.serving.service import Service


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
      Route("/health", answering(self._health, only_loopback)),
      Route("/metrics", answer(self._metrics)),
      Route("/v1/models", answer(self._models)),
      Route("/v1/models/{name:path}", answer(self._model)),
      Route("/v1/chat/completions", answer(self._chat), methods=["POST"]),
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

  async def _models(self, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [self._answers.model()]})

  async def _model(self, request: Request) -> Response:
    self._check_model(request.path_params["name"])
    return JSONResponse(self._answers.model())

  async def _chat(self, request: Request) -> Response:
    read = read_chat(await self._fields(request))
    job = self._service.chat_job(read)
    if read.sampling.stream:
      return Events(self._answers.chat_stream(read, job.choices, job.parts()), job)
    await wait_for(request, job)
    return JSONResponse(self._answers.chat(read, job.choices))

  async def _completions(self, request: Request) -> Response:
    read = read_completion(await self._fields(request))
    job = self._service.completion_job(read)
    if read.sampling.stream:
      return Events(self._answers.completion_stream(read, job.choices, job.parts()), job)
    await wait_for(request, job)
    return JSONResponse(self._answers.completion(read, job.choices))

  async def _fields(self, request: Request) -> Fields:
    """Returns the fields of a body, without "model"."""
    fields = await read_fields(request)
    name = fields.text("model")
    if name is None:
      raise bad(f"model is missing; this server has {self._answers.name!r}", "model")
    self._check_model(name)
    return fields

  def _check_model(self, name: str) -> None:
    if name != self._answers.name:
      raise ApiError(
        404,
        f"there is no model {shown(name)}; this server has {self._answers.name!r}",
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
