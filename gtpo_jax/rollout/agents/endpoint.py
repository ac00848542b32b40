"""The endpoint that agents send their requests to, on this machine only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gtpo_jax.data.chat import Chat
from gtpo_jax.serving.answers import Answers, Choice
from gtpo_jax.serving.errors import ApiError, bad
from gtpo_jax.serving.http import (
  Events,
  answering,
  bearer,
  listen,
  make_server,
  read_fields,
  starlette_app,
  wait_for,
)
from gtpo_jax.serving.outputs import Output, Part, new_search
from gtpo_jax.serving.requests import ChatRequest, read_chat

HOST = "127.0.0.1"
NAME = "policy"  # of the model
START_S = 30.0
MAX_BODY = 4 << 20  # bytes


class AgentJob:
  """A request that waits for its answer.

  Attributes:
    request: what was asked.
    choices: its only choice.
    stop: the strings that end the answer.
    cancelled: whether nobody waits for it any more.
  """

  def __init__(self, request: ChatRequest, chat: Chat, stop: tuple[str, ...]):
    self._chat = chat
    self.request = request
    self.stop = (*stop, *request.sampling.stop)
    self.choices = [Choice([], Output(chat, new_search(chat, self.stop)))]
    self.cancelled = False
    self._loop = asyncio.get_running_loop()
    self._part: asyncio.Future[Part] = self._loop.create_future()

  def text_of(self, part: Part) -> str:
    """Returns the text of an answer."""
    output = Output(self._chat, new_search(self._chat, self.stop))
    output.add(part)
    return output.text

  def deliver(self, part: Part) -> None:
    """Takes the answer, on any thread."""
    self._resolve(lambda: self._part.set_result(part))

  def fail(self, error: ApiError) -> None:
    """Takes an error instead of the answer, on any thread."""
    self._resolve(lambda: self._part.set_exception(error))

  async def parts(self) -> AsyncIterator[tuple[int, Part]]:
    """Yields the answer, as one part.

    Raises:
      ApiError: there is none.
    """
    part = await self._part
    self.choices[0].output.add(part)
    yield 0, part

  def close(self) -> None:
    """Cancels it."""
    self.cancelled = True
    self._part.cancel()

  def _resolve(self, take: Callable[[], None]) -> None:
    def resolve() -> None:
      if not self._part.done():
        take()

    try:
      self._loop.call_soon_threadsafe(resolve)
    except RuntimeError:  # the endpoint is closed
      return


class Endpoint:
  """Reads requests, and passes them on by the key of their episode.

  Attributes:
    url: what clients take as their base URL.
  """

  def __init__(self, chat: Chat, stop: tuple[str, ...], submit: Callable[[str, AgentJob], None]):
    """Args:
    chat: the tokenizer.
    stop: strings that end every answer.
    submit: takes a request, with the key that it came with; raises `ApiError` if there is no
      episode with this key.
    """
    self._chat = chat
    self._stop = stop
    self._submit = submit
    self._answers = Answers(NAME, chat)
    routes = [
      Route("/v1/models", answering(self._models, only_loopback=True)),
      Route(
        "/v1/chat/completions", answering(self._complete, only_loopback=True), methods=["POST"]
      ),
    ]
    self._server = make_server(starlette_app(routes))
    self._listener = listen(HOST, 0)
    self.url = f"http://{HOST}:{self._listener.getsockname()[1]}/v1"
    self._thread = threading.Thread(target=self._run, name="gtpo endpoint", daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Ends the server."""
    self._server.should_exit = True
    self._thread.join(START_S)
    self._listener.close()

  def _run(self) -> None:
    asyncio.run(self._server.serve(sockets=[self._listener]))

  async def _models(self, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [self._answers.model()]})

  async def _complete(self, request: Request) -> Response:
    fields = await read_fields(request, MAX_BODY)
    fields.text("model")  # there is only one
    read = read_chat(fields)
    if read.sampling.n > 1:
      raise bad("n is 1 in training; send several requests", "n")
    if read.sampling.top:
      raise bad("top_logprobs is 0 in training; leave it out", "top_logprobs")
    job = AgentJob(read, self._chat, self._stop)
    self._submit(bearer(request), job)
    if read.sampling.stream:
      return Events(self._answers.chat_stream(read, job.choices, job.parts()), job)
    await wait_for(request, job)
    return JSONResponse(self._answers.chat(read, job.choices))
