"""Calls an agent: on a thread with an event loop of its own, so that it can only block itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import openai

from gtpo_jax.environments.turns import Result, checked_flag, checked_info, checked_number
from gtpo_jax.runtime.errors import described

# (row, client, seed) -> a number, a `Result`, or None; `async` or not
Agent = Callable[[Mapping[str, Any], openai.AsyncOpenAI, int], Awaitable[Any] | Any]
CORRECT_ABOVE = 0.5
CONNECTIONS = 8  # of an agent's client; further requests wait for one
# What the client sends requests with: httpx, or httpx2 from version 3 on.
HTTP = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__)


class AgentFailed(Exception):
  """Raised for what an agent has raised; the message is one line and says where."""


class AgentCall:
  """One call of an agent.

  Attributes:
    key: names its episode at the endpoint.
  """

  def __init__(self, agent: Agent, row: Mapping[str, Any], seed: int, url: str, key: str):
    """Args:
    agent: the user's function.
    row: the row of the data; the agent gets a copy.
    seed: the seed of the prompt.
    url: the address of the endpoint.
    key: names the episode there.
    """
    self._agent = agent
    self._row = row
    self._seed = seed
    self._url = url
    self.key = key
    self._loop: asyncio.AbstractEventLoop | None = None
    self._task: asyncio.Task[Any] | None = None
    self._cancelled = False

  def run(self) -> Result:
    """Calls the agent, and returns what it says.

    Raises:
      AgentFailed: the agent has raised an exception.
      TypeError, ValueError: what it returned is no result.
    """
    if self._cancelled:
      raise AgentFailed("it was cancelled before it began")
    return asyncio.run(self._play())

  def cancel(self) -> None:
    """Cancels the agent where it waits; called on any thread."""
    self._cancelled = True
    if self._loop and self._task:
      with contextlib.suppress(RuntimeError):  # the loop is closed
        self._loop.call_soon_threadsafe(self._task.cancel)

  async def _play(self) -> Result:
    self._loop = asyncio.get_running_loop()
    self._loop.set_exception_handler(lambda *_: None)  # tasks that the agent has left behind
    self._task = asyncio.current_task()
    http = openai.DefaultAsyncHttpxClient(
      limits=HTTP.Limits(max_connections=CONNECTIONS),
      verify=False,  # the endpoint has no certificate, and reading the system's takes long
    )
    client = openai.AsyncOpenAI(
      base_url=self._url, api_key=self.key, max_retries=0, timeout=None, http_client=http
    )
    async with client:
      try:
        value = self._agent(copy.deepcopy(dict(self._row)), client, self._seed)
        if inspect.isawaitable(value):
          value = await value
      except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if "site-packages" not in frame.filename]
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise AgentFailed(f"{described(error)}{place}") from None
    return checked_result(value)


def checked_result(value: Any) -> Result:
  """Returns what an agent has returned as a result whose fields are numbers."""
  if value is None:
    return Result()
  if not isinstance(value, Result):
    value = Result(checked_number(value, "it returned"))
  reward, correct = value.reward, value.correct
  if reward is not None:
    reward = checked_number(reward, "it returned the reward")
  if correct is not None:
    correct = checked_flag(correct, "it returned correct =")
  elif reward is not None:
    correct = reward > CORRECT_ABOVE
  return Result(reward, correct, checked_info(value.info, "it returned"))
