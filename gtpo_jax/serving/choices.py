"""The choices of a request while they are generated, by a server's engine or by training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.serving.outputs import Output, Part
from gtpo_jax.serving.requests import ChatRequest, CompletionRequest

Parts = AsyncIterator[tuple[int, Part]]  # (index of the choice, its next tokens)


class Choice:
  """One choice of a request while it is generated.

  Attributes:
    prompt: the ids of its prompt.
    output: what has arrived of it.
    prefix: the log-probs of its prompt, if they were asked for.
  """

  def __init__(self, prompt: Sequence[int], output: Output):
    self.prompt = prompt
    self.output = output
    self.prefix: Part | None = None


class Job:
  """A request that is being answered, on an event loop.

  Attributes:
    request: what was asked.
    choices: what has arrived of each choice.
    left: how many last parts have not arrived, of choices and of log-probs of prompts.
    cancelled: whether nobody waits for the answer any more.
  """

  def __init__(
    self,
    request: ChatRequest | CompletionRequest,
    cancel: Callable[[], None] = lambda: None,
    loop: asyncio.AbstractEventLoop | None = None,
  ):
    """Args:
    request: what was asked.
    cancel: called if nobody waits any more and something has not ended.
    loop: the event loop that reads the answer; None for the one that runs.
    """
    self.request = request
    self.choices: list[Choice] = []
    self.left = 0
    self.cancelled = False
    self._cancel = cancel
    self._loop = loop or asyncio.get_running_loop()
    self._queue: asyncio.Queue[tuple[int, bool, Part] | ApiError] = asyncio.Queue()

  def deliver(self, part: Part, index: int = 0, prefix: bool = False) -> None:
    """Takes the next tokens of a choice, or the log-probs of its prompt, on any thread."""
    self._put((index, prefix, part))

  def fail(self, error: ApiError) -> None:
    """Takes an error instead of the rest of the answer, on any thread."""
    self._put(error)

  async def parts(self) -> Parts:
    """Yields what is generated until all choices have ended.

    Raises:
      ApiError: generation has failed.
    """
    while self.left:
      arrived = await self._queue.get()
      if isinstance(arrived, ApiError):
        raise arrived
      index, prefix, part = arrived
      if part.finish == "error":
        raise ApiError(500, "generation has failed; try again")
      self.left -= bool(part.finish)
      if prefix:
        self.choices[index].prefix = part
        continue
      self.choices[index].output.add(part)
      yield index, part

  def close(self) -> None:
    """Cancels what has not ended."""
    self.cancelled = True
    if self.left:
      self._cancel()

  def _put(self, arrived: tuple[int, bool, Part] | ApiError) -> None:
    try:
      self._loop.call_soon_threadsafe(self._queue.put_nowait, arrived)
    except RuntimeError:  # the loop is closed: the server ends
      return
