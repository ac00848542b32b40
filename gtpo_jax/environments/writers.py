"""What the coroutine of an episode waits for, and what writes its turns."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from gtpo_jax.environments.turns import Message, Stop


class Ask(NamedTuple):
  """A turn that the policy is to draw.

  Attributes:
    tokens: what it reads first; [] if its completion has them already.
    conversation: which conversation of the episode continues; an environment has only 0.
    limit: the most tokens of the turn; None for as many as the completion has left.
    stop: strings that end it, where `limit` is set; otherwise the run's do.
  """

  tokens: list[int]
  conversation: int = 0
  limit: int | None = None
  stop: tuple[str, ...] = ()


class Drawn(NamedTuple):
  """A turn that the policy has drawn.

  Attributes:
    tokens: as they were drawn, the end token included.
    finished: whether it ended by itself; False if it was cut off.
    tokens_left: how many tokens the completion may still have.
    log_probs: of the tokens, nats, under softmax(logits).
  """

  tokens: list[int]
  finished: bool
  tokens_left: int
  log_probs: Sequence[float] = ()


class Call(NamedTuple):
  """A call of the user's code on a thread; see `Workers.submit`."""

  work: Callable[[], Any]
  limit_s: float
  cleanup: Callable[[], Any] = lambda: None


@types.coroutine
def wait_for(awaited: Ask | Call | None) -> Generator[Ask | Call | None, Any, Any]:
  """Waits for a turn, for the outcome of a call, or (None) for any news; see `Episodes`."""
  return (yield awaited)


class End(Exception):
  """Ends an episode.

  Attributes:
    stop: why.
    reason: what went wrong, if the environment or the agent failed.
  """

  def __init__(self, stop: Stop, reason: str = ""):
    super().__init__(stop, reason)
    self.stop = stop
    self.reason = reason


class Differs(Exception):
  """Raised if an environment that was made again does not repeat what it did."""


class Writer:
  """What writes the turns of an episode: here the policy, which draws those of all together.

  Attributes:
    added: what `reset` adds to the prompt; None until it is known, and saved turns are repeated.
    repeats: whether the turns so far come from a snapshot.
  """

  added: str | Sequence[Message] | None = None
  repeats = False

  def begin(self, name: str, added: str | Sequence[Message]) -> None:
    """Takes the name of the environment, and what it adds to the prompt."""
    self.added = added

  async def turn(
    self,
    tokens: list[int],
    conversation: int = 0,
    limit: int | None = None,
    stop: tuple[str, ...] = (),
  ) -> Drawn:
    """Returns the next turn; for the arguments, see `Ask`."""
    return await wait_for(Ask(tokens, conversation, limit, stop))


class Recorded(Writer):
  """Keeps the turns of the policy, after it has repeated a snapshot's.

  Attributes:
    turns: of each turn its tokens, whether it finished, the tokens left, and what was read after
      it, or None.
  """

  def __init__(
    self, added: str | Sequence[Message] | None = None, saved: Sequence[Sequence[Any]] = ()
  ):
    """Args:
    added: what was added to the prompt before the snapshot; None without one.
    saved: the `turns` that there were then.
    """
    self.turns: list[list[Any]] = []
    self._name = ""
    self._adds = added
    self._saved = saved

  @property
  def repeats(self) -> bool:
    """Whether the turns so far come from the snapshot."""
    return bool(self._saved) and self.added is None

  def begin(self, name: str, added: str | Sequence[Message]) -> None:
    """See `Writer`.

    Raises:
      Differs: it was something else before the snapshot.
    """
    self._name = name
    if self._adds not in (None, added):
      raise Differs(f"{name}.reset returned something else")
    self._adds = added
    if not self._saved:
      self.added = added

  async def turn(self, tokens: list[int], *others: Any) -> Drawn:
    """See `Writer`.

    Raises:
      Differs: something else was read before the snapshot.
    """
    number = len(self.turns)
    saved = len(self._saved)
    read = self._saved[number - 1][-1] if 0 < number <= saved else None
    if read not in (None, tokens):
      raise Differs(f"{self._name}.step returned something else for turn {number - 1}")
    if number:
      self.turns[-1][-1] = tokens
    if number < saved:
      drawn = Drawn(*self._saved[number][:-1])
      if number == saved - 1 and self._saved[number][-1] is None:  # its answer was not known
        self.added = self._adds
    else:
      self.added = self._adds
      drawn = await super().turn([] if read else tokens, *others)
    self.turns.append([*drawn[:3], None])
    return drawn
