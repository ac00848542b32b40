"""The turns that the episodes of a buffer ask for, until they are sampled.

Each turn is a request. When it has ended, its episode resumes, and later asks for the next turn;
other completions are sampled meanwhile. With several processes, only the first has the episodes.
After each chunk it sends what they ask for to the others, so that all continue in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.environments.episodes import Episodes
from gtpo_jax.environments.turns import Episode, Stop
from gtpo_jax.environments.writers import Ask, Drawn
from gtpo_jax.runtime.distributed import broadcast_from_first
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.buffer import CompletionBuffer, Pair, Tokens
from gtpo_jax.sampling.engine import BufferSession
from gtpo_jax.sampling.session import Request
from gtpo_jax.serving.outputs import new_search

# Turns that have just ended wait so long for what follows before other completions are sampled.
# Without it, a tool that takes no time would delay its turn by a chunk of tokens.
GRACE_S = 0.003
POLL_S = 0.5  # between two checks for a stop request while everything waits for environments


class TurnQueue:
  """The turns of the completions of one buffer.

  Attributes:
    waiting: the completions whose turns have ended, but not their episodes.
    idle_s: seconds in which no completion was sampled because all were waiting.
    read_again: the number of tokens of completions that were read again before a turn.
  """

  def __init__(
    self, episodes: Episodes | None, chat: Chat, sampling: BufferSession, groups: Sequence[Hashable]
  ):
    """Args:
    episodes: plays them; None if each completion is one turn.
    chat: the tokenizer.
    sampling: samples the buffer.
    groups: names the episodes of each row of the buffer.
    """
    self.waiting: set[Pair] = set()
    self.idle_s = 0.0
    self.read_again = 0
    self._episodes = episodes
    self._chat = chat
    self._sampling = sampling
    self._buffer = buffer = sampling.buffer
    self._groups = list(groups)
    self._rows = {group: row for row, group in enumerate(groups)}
    self._playing: set[Pair] = set()  # completions whose episodes have not ended
    self._agent_rows: dict[Pair, _AgentRow] = {}
    if not episodes:
      return
    results = lambda: [[x is None for x in episodes.results(group)] for group in groups]
    playing = np.asarray(broadcast_from_first(results), bool).reshape(buffer.finished.shape)
    self._playing = {(i, j) for i, j in np.argwhere(playing).tolist()}
    if episodes.rules.start:  # of agents, whose first requests are waited for
      self._agent_rows = {pair: _AgentRow(buffer, *pair) for pair in np.ndindex(playing.shape)}
      most = episodes.rules.limits.max_conversations
      buffer.limits[:] = 0
      buffer.begins = np.full((*playing.shape, most), buffer.tokens.shape[2], np.int32)
      buffer.begins[..., 0] = 0
    else:
      buffer.limits[~playing & ~buffer.ended()] = 0  # their environments failed before a turn

  def step(self) -> list[Pair]:
    """Samples a chunk of tokens, passes turns on that have ended, and submits the next ones.

    If no completion can be sampled, it waits for a turn, about half a second at most.

    Returns:
      The completions that have ended.
    """
    turned = self._sampling.step(more_may_come=bool(self.waiting))
    ended = [pair for pair in turned if pair not in self._playing]
    new = [pair for pair in turned if pair in self._playing and pair not in self.waiting]
    self.waiting.update(new)
    if not self.waiting:
      return ended
    idle = len(self.waiting) == len(self._playing)
    began = time.perf_counter()
    ended += self._take(lambda: self._news(new, idle))
    if idle:
      self.idle_s += time.perf_counter() - began
    return ended

  def settle(self, stopping: Callable[[], bool]) -> list[Pair]:
    """Waits until no completion waits any more; returns the completions that have ended.

    Raises:
      Stopped: `stopping`, which is called about twice a second, returned True.
    """
    ended: list[Pair] = []
    while self.waiting:
      ended += self._take(lambda: self._news([], True))
      if self.waiting and stopping():
        raise Stopped
    return ended

  def _news(self, turned: Sequence[Pair], idle: bool) -> dict[str, Any]:
    """Ends turns, and returns what episodes soon ask for, and which end; on the first process.

    Args:
      turned: the completions whose turns end.
      idle: whether there is nothing to sample.
    """
    for pair in turned:
      self._answer(*pair)
    events = self._events()
    if idle and not events:
      self._episodes.wait(POLL_S)
      events = self._events()
    until = time.perf_counter() + GRACE_S
    while (missing := set(turned) - events.keys()) and (left := until - time.perf_counter()) > 0:
      self._episodes.wait(left)
      more = self._events()
      if missing & more.keys():
        until = time.perf_counter() + GRACE_S
      events |= more
    asked = {pair: event for pair, event in events.items() if isinstance(event, Ask)}
    return {
      "asked": [[*pair, *ask[:-1], list(ask.stop)] for pair, ask in asked.items()],
      "ended": [[*pair, str(x.stop)] for pair, x in events.items() if isinstance(x, Episode)],
    }

  def _answer(self, i: int, j: int) -> None:
    """Passes the turn of a completion on to its episode."""
    if self._agent_rows and not self._agent_rows[i, j]:  # it waits for the first request
      return
    completion = self._buffer.at(i, j)
    turn = {name: x[completion.turn_begin :] for name, x in completion.tokens.items()}
    left = int(self._buffer.limits[i, j]) - completion.length
    finished = bool(self._buffer.finished[i, j])
    log_probs = turn["plain_log_probs"].tolist()
    self._episodes.answer(
      self._groups[i], j, Drawn(turn["tokens"].tolist(), finished, left, log_probs)
    )

  def _events(self) -> dict[Pair, Ask | Episode]:
    """Returns what has happened to completions since the last call."""
    events = {(self._rows.get(group), j): event for group, j, event in self._episodes.poll()}
    return {pair: event for pair, event in events.items() if pair in self._playing}

  def _take(self, make: Callable[[], dict[str, Any]]) -> list[Pair]:
    """Submits the turns that episodes ask for; returns the completions that have ended."""
    news = broadcast_from_first(make)
    requests = [self._request(*ask) for ask in news["asked"]]
    self._sampling.join(requests)
    self.read_again += sum(len(request.tokens) for request in requests)
    ended = [(i, j) for i, j, _ in news["ended"]]
    for i, j, stop in news["ended"]:
      if self._agent_rows:
        self._agent_rows.pop((i, j)).end(stop != Stop.MAX_TOKENS)
    self.waiting -= {*ended, *(request.name for request in requests)}
    self._playing -= set(ended)
    return ended

  def _request(
    self, i: int, j: int, tokens: list[int], number: int, limit: int | None, stop: Sequence[str]
  ) -> Request:
    """Returns the request for the next turn of a completion; for the arguments, see `Ask`."""
    completion = self._buffer.at(i, j)
    if limit is None:  # of an environment
      completion.read(tokens)
      return completion.request()
    key = self._agent_rows[i, j].turn_to(number, tokens)
    self._buffer.limits[i, j] = completion.length + len(tokens) + limit
    completion.read(tokens)
    strings = new_search(self._chat, stop)
    search = strings.search() if strings else None
    return dataclasses.replace(completion.request(), key=key, search=search)


@dataclasses.dataclass
class _Conversation:
  """A conversation of an agent.

  Attributes:
    begin: the tokens that it begins with.
    key: u32[2], the PRNG key data that its tokens are drawn with.
    tokens: all of them; None while they are in the row of the completion.
  """

  begin: list[int]
  key: np.ndarray
  tokens: Tokens | None


class _AgentRow(list[_Conversation]):
  """The conversations of an agent's completion, one of which is in its row of the buffer."""

  def __init__(self, buffer: CompletionBuffer, i: int, j: int):
    super().__init__()
    self._buffer = buffer
    self._at = (i, j)

  def turn_to(self, number: int, tokens: list[int]) -> np.ndarray:
    """Puts a conversation into the row, which begins if there is none; returns its key u32[2].

    Args:
      number: its number.
      tokens: what it reads next.
    """
    self._put_away()
    if number == len(self):
      twins = sum(conversation.begin == tokens for conversation in self)
      key = conversation_key(self._buffer.keys[self._at], tokens, twins)
      nothing = {name: getattr(self._buffer, name)[0, 0, :0] for name in self._buffer.of_tokens}
      self.append(_Conversation(tokens, key, nothing))
    self._buffer.at(*self._at).replace(self[number].tokens, finished=False)
    self[number].tokens = None
    return self[number].key

  def end(self, finished: bool) -> None:
    """Puts all into the row, the longest first, without regard to when their requests came."""
    self._put_away()
    order = lambda x: (-len(x.tokens["tokens"]), x.key.tobytes())
    parts = [conversation.tokens for conversation in sorted(self, key=order)]
    if parts:
      joined = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
      ends = np.cumsum([len(x["tokens"]) for x in parts])
      self._buffer.begins[(*self._at, slice(1, len(parts)))] = ends[:-1]
      self._buffer.limits[self._at] = ends[-1]
      self._buffer.at(*self._at).replace(joined, finished)

  def _put_away(self) -> None:
    """Takes the conversation out of the row."""
    for conversation in self:
      if conversation.tokens is None:
        conversation.tokens = self._buffer.at(*self._at).tokens


def conversation_key(episode: np.ndarray, tokens: Sequence[int], twins: int) -> np.ndarray:
  """Returns the PRNG key data u32[2] of a conversation.

  It depends on what the conversation begins with, and not on when its request came.

  Args:
    episode: u32[2], the key of the episode.
    tokens: what the conversation begins with.
    twins: how many earlier conversations of the episode begin with the same.
  """
  content = episode.tobytes() + np.asarray([twins, *tokens], np.int64).tobytes()
  return np.frombuffer(hashlib.blake2b(content, digest_size=8).digest(), np.uint32)
