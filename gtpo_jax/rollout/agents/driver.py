"""Connects agents with the completions that the engine samples.

A completion of the buffer is an episode, which may have several conversations. Each turn is a
request; what it draws is in the buffer until it ends, and then here. When the episode ends, the
completion gets the tokens of all conversations, one after another.
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
from gtpo_jax.rollout.episodes.driver import EpisodeDriver, Key
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.sampling.buffer import OF_TOKENS, CompletionBuffer, Pair, Tokens
from gtpo_jax.sampling.session import Request
from gtpo_jax.serving.outputs import new_search


@dataclasses.dataclass
class _Conversation:
  """The tokens of a conversation so far, and the PRNG key data u32[2] that they are drawn with."""

  key: np.ndarray
  tokens: Tokens

  @property
  def order(self) -> tuple[int, bytes]:
    """Sorts conversations, the longest first, without regard to when their requests came."""
    return -len(self.tokens["tokens"]), self.key.tobytes()

  def add(self, tokens: Tokens) -> None:
    """Adds tokens that were drawn or read."""
    self.tokens = {name: np.concatenate([x, tokens[name]]) for name, x in self.tokens.items()}


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
    self._current: dict[Pair, _Conversation] = {}  # those whose turns were asked for last

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
    self._conversations = {pair: [] for pair in np.ndindex(n, g)}
    self._current = {}
    if is_first_process():
      self._runner.play(keys)

  def _keep(self, turned: Sequence[Pair]) -> None:
    for pair in turned:
      if pair in self._current:
        self._current[pair].add(self._buffer.tokens_of(*pair))

  def _end_turn(self, i: int, j: int) -> None:
    if (i, j) not in self._current:  # it waits for the first request
      return
    turn = self._buffer.tokens_of(i, j)
    tokens, log_probs = turn["tokens"].tolist(), turn["plain_log_probs"].tolist()
    self._runner.end_turn(self._keys[i], j, tokens, bool(self._buffer.finished[i, j]), log_probs)

  def _plain(self, event: Asked) -> list[Any]:
    return [event.conversation, event.tokens, event.limit, list(event.stop)]

  def _request(
    self, i: int, j: int, number: int, tokens: Sequence[int], limit: int, strings: Sequence[str]
  ) -> Request:
    """Returns the request for the next turn of a conversation, whose tokens get the row alone."""
    conversations = self._conversations[i, j]
    if number == len(conversations):
      twins = sum(_begins_with(x.tokens, tokens) for x in conversations)
      key = conversation_key(self._buffer.keys[i, j], tokens, twins)
      conversations.append(_Conversation(key, self._nothing))
    conversation = conversations[number]
    read = {name: np.zeros(len(tokens), x.dtype) for name, x in self._nothing.items()}
    conversation.add(read | {"tokens": np.asarray(tokens, np.int32)})
    self._buffer.replace(i, j, self._nothing, finished=False)
    self._current[i, j] = conversation
    stop = new_search(self._worker.chat, strings)
    so_far = conversation.tokens["tokens"]
    search = stop.search() if stop else None
    return Request(conversation.key, len(so_far) + limit, so_far, search, name=(i, j))

  @property
  def _nothing(self) -> Tokens:
    return {name: getattr(self._buffer, name)[0, 0, :0] for name in OF_TOKENS}

  def _end(self, i: int, j: int, stop: str) -> None:
    """Puts all conversations of an episode into the buffer."""
    buffer = self._buffer
    conversations = sorted(self._conversations.pop((i, j)), key=lambda x: x.order)
    if conversations:
      parts = [x.tokens for x in conversations]
      joined = {name: np.concatenate([x[name] for x in parts]) for name in OF_TOKENS}
      ends = np.cumsum([len(x["tokens"]) for x in parts])
      buffer.begins[i, j, 1 : len(parts)] = ends[:-1]
      buffer.limits[i, j] = ends[-1]
      buffer.replace(i, j, joined, stop != Stop.MAX_TOKENS)


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
