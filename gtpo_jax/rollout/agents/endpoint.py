"""The endpoint that agents send their requests to, on this machine only."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from gtpo_jax.data.chat import Chat
from gtpo_jax.serving.answers import Answers
from gtpo_jax.serving.app import chat_routes
from gtpo_jax.serving.choices import Choice, Job, new_search
from gtpo_jax.serving.http import answering, bearer, listen, make_server, read_fields, starlette_app
from gtpo_jax.serving.requests import ChatRequest, bad, checked

HOST = "127.0.0.1"
NAME = "policy"  # of the model
START_S = 30.0
MAX_BODY = 4 << 20  # bytes


class Endpoint:
  """Reads requests, and passes them on by the key of their episode.

  Attributes:
    url: what clients take as their base URL.
  """

  def __init__(self, chat: Chat, stop: tuple[str, ...], submit: Callable[[str, Job], None]):
    """Args:
    chat: the tokenizer.
    stop: strings that end every answer.
    submit: takes a request, with the key that it came with; raises `ApiError` if there is no
      episode with this key.
    """
    self._chat = chat
    self._stop = stop
    self._submit = submit
    answer = functools.partial(answering, only_loopback=True)
    routes = chat_routes(Answers(NAME, chat), _fields, self._start_job, answer)
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

  async def _start_job(self, request: Request, fields: dict[str, Any]) -> Job:
    read = checked(ChatRequest, fields)
    if read.n > 1:
      raise bad("n is 1 in training; send several requests", "n")
    if read.top:
      raise bad("top_logprobs is 0 in training; leave it out", "top_logprobs")
    stop = (*self._stop, *read.stop)
    job = Job(read.model_copy(update={"stop": stop}))
    job.choices.append(Choice([], self._chat, new_search(self._chat, stop)))
    job.left = 1
    self._submit(bearer(request), job)
    return job


async def _fields(request: Request) -> dict[str, Any]:
  fields = await read_fields(request, MAX_BODY)
  fields.pop("model", None)  # there is only one
  return fields
