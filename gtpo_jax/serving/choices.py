"""The tokens and choices of a request as they arrive, from a server's engine or from training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.text_stream import REPLACEMENT
from gtpo_jax.sampling.stop_strings import StopStrings
from gtpo_jax.serving.requests import ApiError, ChatRequest, CompletionRequest


class Part(NamedTuple):
  """The next tokens of a completion."""

  tokens: list[int]  # their ids
  log_probs: list[float]  # nats, under softmax(logits)
  # for each token, the ids and log-probs of the most probable ones; empty unless the completion
  # wants them
  alternatives: list[tuple[list[int], list[float]]]
  # "stop" or "length" if these are the last, "error" if there are no more; else ""
  finish: str = ""
  # nats, of the policy at each of them; empty for a text that was scored
  entropy: Sequence[float] = ()


NOTHING = Part([], [], [])
FAILED = Part([], [], [], "error")
Parts = AsyncIterator[tuple[int, Part]]  # (index of the choice, its next tokens)


def joined(first: Part, second: Part) -> Part:
  """Returns two parts as one."""
  return Part(
    first.tokens + second.tokens,
    first.log_probs + second.log_probs,
    first.alternatives + second.alternatives,
    second.finish,
    [*first.entropy, *second.entropy],
  )


def new_search(chat: Chat, strings: Sequence[str]) -> StopStrings | None:
  """Returns what finds the stop strings of a request; None if it has none."""
  if not strings:
    return None
  return StopStrings(strings, lambda: chat.text_stream().add, chat.decode)


class Choice:
  """One choice of a request while it is generated.

  Attributes:
    prompt: the ids of its prompt.
    prefix: the log-probs of its prompt, if they were asked for.
    output: all that has arrived; its `finish` is "stop" or "length" once the choice has ended.
  """

  def __init__(self, prompt: Sequence[int], chat: Chat, stop: StopStrings | None):
    self.prompt = prompt
    self.prefix: Part | None = None
    self.output = Part([], [], [])
    self._chat = chat
    self._stop = stop
    self._sent = 0  # characters that `new_text` has returned

  def add(self, part: Part) -> None:
    """Adds the next tokens."""
    self.output = joined(self.output, part)

  def text(self, part: Part = NOTHING) -> str:
    """Returns the text so far, without stop strings and what may become one or another character.

    With a part, it is the text that there would be with these next tokens, which are not added.
    """
    (text,) = self._chat.decode([self.output.tokens + part.tokens])
    if self._stop:
      text = self._stop.cut(text)
    if part.finish or self.output.finish:
      return text
    text = text.rstrip(REPLACEMENT)
    return self._stop.without_begun(text) if self._stop else text

  def new_text(self) -> str:
    """Returns the text that was not returned yet. All pieces together are the whole text."""
    text = self.text()
    new = text[self._sent :]
    self._sent = max(self._sent, len(text))
    return new


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
    """Yields what is generated until all choices have ended."""
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
      self.choices[index].add(part)
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
