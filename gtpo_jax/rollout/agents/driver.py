"""Connects agents with the completions that the engine samples.

A completion of the buffer is an episode, which may have several conversations. While a request is
answered, the completion has the tokens of its conversation alone; the others are kept here. When
the episode ends, it gets the tokens of all conversations, one after another.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.turns import Stop
from gtpo_jax.rollout.agents.runner import AgentRunner
from gtpo_jax.rollout.agents.session import Asked
from gtpo_jax.rollout.episodes.driver import EpisodeDriver, Key, Pair
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.sampling.buffer import OF_TOKENS, CompletionBuffer
from gtpo_jax.sampling.stop_strings import StopSearch, StopStrings

Tokens = dict[str, np.ndarray]  # from `CompletionBuffer.take`


@dataclasses.dataclass
class _Conversation:
  """The tokens of a conversation so far, and the PRNG key data u32[2] that they are drawn with."""

  key: np.ndarray
  tokens: Tokens

  @property
  def order(self) -> tuple[int, bytes]:
    """Sorts conversations, the longest first, without regard to when their requests came."""
    return -len(self.tokens["tokens"]), self.key.tobytes()


class AgentDriver(EpisodeDriver):
  """The episodes of agents for the completions of one buffer; see `EpisodeDriver`."""

  def __init__(self, worker: RolloutWorker, size: int):
    """Args:
    worker: has the runner.
    size: completions of a group.
    """
    super().__init__(worker.runner, size)
    self._worker = worker
    self._runner: AgentRunner = worker.runner
    self._conversations: dict[Pair, list[_Conversation]] = {}
    self._current: dict[Pair, int] = {}  # the number of the conversation that is in the buffer

  def prompt(self, worker: RolloutWorker, problem: Problem, added: Any) -> list[int]:
    """Returns the beginning that all conversations share; the agent says what follows."""
    return list(self._runner.start)

  def attach(self, buffer: CompletionBuffer, keys: Sequence[Key]) -> None:
    """Takes the buffer, and calls the agents, for whose first requests its completions wait."""
    super().attach(buffer, keys)
    n, g, t = buffer.tokens.shape
    buffer.limits[:] = 0
    buffer.begins = np.full((n, g, self._runner.limits.max_conversations), t, np.int32)
    buffer.begins[..., 0] = 0
    buffer.stop_search = _Searches(self._worker)
    self._keys_of_episodes = buffer.keys.copy()
    self._conversations = {pair: [] for pair in np.ndindex(n, g)}
    self._current = {}
    if is_first_process():
      self._runner.play(keys)

  def _keep(self, turned: Sequence[Pair]) -> None:
    for pair in turned:
      if pair in self._current:
        conversation = self._conversations[pair][self._current[pair]]
        conversation.tokens = self._buffer.take(*pair)

  def _end_turn(self, i: int, j: int) -> None:
    if (i, j) not in self._current:  # it waits for the first request
      return
    buffer = self._buffer
    turn = (i, j, slice(buffer.turn_begin(i, j), buffer.length(i, j)))
    tokens, log_probs = (x[turn].tolist() for x in (buffer.tokens, buffer.plain_log_probs))
    self._runner.end_turn(self._keys[i], j, tokens, bool(buffer.finished[i, j]), log_probs)

  def _plain(self, event: Asked) -> list[Any]:
    return [event.conversation, event.tokens, event.limit, list(event.stop)]

  def _go_on(
    self, i: int, j: int, number: int, tokens: Sequence[int], limit: int, stop: Sequence[str]
  ) -> None:
    """Puts a conversation with the messages of a request into the buffer, to be sampled."""
    conversations = self._conversations[i, j]
    if number == len(conversations):
      twins = sum(_begins_with(x.tokens, tokens) for x in conversations)
      key = conversation_key(self._keys_of_episodes[i, j], tokens, twins)
      empty = {name: getattr(self._buffer, name)[i, j, :0] for name in OF_TOKENS}
      conversations.append(_Conversation(key, empty))
    conversation = conversations[number]
    conversation.tokens = _with_read(conversation.tokens, tokens)
    length = len(conversation.tokens["tokens"])
    self._buffer.put(i, j, conversation.tokens, length + limit)
    self._buffer.keys[i, j] = conversation.key
    self._buffer.stop_search.begin((i, j), stop)
    self._current[i, j] = number

  def _end(self, i: int, j: int, stop: str) -> None:
    """Puts all conversations of an episode into the buffer."""
    buffer = self._buffer
    conversations = sorted(self._conversations.pop((i, j)), key=lambda x: x.order)
    if conversations:
      parts = [x.tokens for x in conversations]
      joined = {name: np.concatenate([x[name] for x in parts]) for name in OF_TOKENS}
      ends = np.cumsum([len(x["tokens"]) for x in parts])
      buffer.begins[i, j, 1 : len(parts)] = ends[:-1]
      buffer.put(i, j, joined, int(ends[-1]), stop != Stop.MAX_TOKENS)
    buffer.close(i, j)


class _Searches:
  """Finds the stop strings that each request has; see `StopSearch`."""

  def __init__(self, worker: RolloutWorker):
    self._chat = worker.chat
    self._of: dict[Pair, StopSearch] = {}

  def begin(self, pair: Pair, strings: Sequence[str]) -> None:
    """Begins to search in a turn of a completion."""
    self._of.pop(pair, None)
    if strings:
      chat = self._chat
      stop = StopStrings(strings, lambda: chat.text_stream().add, chat.decode)
      self._of[pair] = stop.search()

  def end(self, completion: Pair, tokens: np.ndarray, turn: int = 0) -> int | None:
    """Returns where a turn ends; see `StopSearch.end`."""
    search = self._of.get(completion)
    return search.end(completion, tokens, turn) if search else None


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


def _begins_with(conversation: Tokens, tokens: Sequence[int]) -> bool:
  """Whether the tokens before the first turn of a conversation are these."""
  read = int(conversation["mask"].argmax())
  return conversation["tokens"][:read].tolist() == list(tokens)


def _with_read(tokens: Tokens, read: Sequence[int]) -> Tokens:
  """Returns tokens with others that were not drawn after them."""
  added = {name: np.zeros(len(read), values.dtype) for name, values in tokens.items()}
  added["tokens"] = np.asarray(read, np.int32)
  return {name: np.concatenate([values, added[name]]) for name, values in tokens.items()}
