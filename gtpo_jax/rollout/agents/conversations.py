"""The conversations of an agent's episode, and which of them a request continues."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.environments.tokens import CHARS_PER_TOKEN, TurnTokens
from gtpo_jax.environments.turns import Stop, Turn
from gtpo_jax.environments.writers import End
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.requests import ChatRequest, bad

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class Conversation:
  """A conversation of which all tokens are kept as they were drawn or read."""

  number: int  # its place in the episode
  tools: Sequence[Mapping[str, Any]]  # the tools that its requests show
  # of the requests, and the answers to them
  messages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)  # all after the first of the prompt
  ended: bool = False  # whether the latest turn ended with an end token


class Transcript:
  """The conversations of one episode.

  Attributes:
    conversations: in the order in which they began.
    drawn: the number of tokens that the policy has drawn.
  """

  def __init__(
    self, codec: Conversations, turn_tokens: TurnTokens, start: Sequence[int], max_tokens: int
  ):
    """Args:
    codec: renders conversations, and reads turns.
    turn_tokens: encodes messages after a turn.
    start: the token with which every conversation begins.
    max_tokens: the most tokens of all conversations together.
    """
    self.conversations: list[Conversation] = []
    self.drawn = 0
    self._codec = codec
    self._turn_tokens = turn_tokens
    self._start = list(start)
    self._max_tokens = max_tokens

  @property
  def tokens_left(self) -> int:
    """How many tokens all conversations together may still have."""
    return self._max_tokens - sum(len(x.tokens) for x in self.conversations)

  def prompt(self, conversation: Conversation) -> list[int]:
    """Returns all token ids of a conversation."""
    return self._start + conversation.tokens

  def add(self, request: ChatRequest, most: int) -> tuple[Conversation, list[int]]:
    """Adds the messages of a request; returns its conversation, and the tokens to read.

    Args:
      request: the request.
      most: the most conversations.

    Raises:
      ApiError, UserError: the model cannot read these messages.
      End: there is no space for them, or for another conversation.
    """
    size = len(json.dumps([request.messages, request.tools], ensure_ascii=False))
    if size > CHARS_PER_TOKEN * self._max_tokens:
      raise End(Stop.CONTEXT)
    found = self._continued(request)
    if found is None:
      ids = self._codec.encode(request.messages, request.tools, request.chat_template_kwargs)
      if ids[: len(self._start)] != self._start:
        raise bad("the chat template begins this conversation with another token than others")
      ids = ids[len(self._start) :]
      if len(self.conversations) >= most:
        raise End(Stop.MAX_CONVERSATIONS)
      conversation = Conversation(len(self.conversations), request.tools)
    else:
      conversation, ids = found
    if len(ids) >= self.tokens_left:
      raise End(Stop.CONTEXT)
    if found is None:
      self.conversations.append(conversation)
    conversation.messages = list(request.messages)
    conversation.tokens += ids
    return conversation, ids

  def answer(self, conversation: Conversation, tokens: Sequence[int], text: str) -> Turn:
    """Adds a turn of the policy, and returns what it says."""
    conversation.tokens += tokens
    self.drawn += len(tokens)
    conversation.ended = bool(tokens) and tokens[-1] in self._codec.chat.stop
    message = self._codec.message(text, conversation.tools)
    conversation.messages.append(message)
    return self._codec.turn(text, conversation.tools)

  def _continued(self, request: ChatRequest) -> tuple[Conversation, list[int]] | None:
    """Returns the conversation that a request continues, and the tokens of its new messages."""
    longest = sorted(self.conversations, key=lambda x: len(x.messages), reverse=True)
    for conversation in longest:
      count = len(conversation.messages)
      new = request.messages[count:]
      if (
        new
        and conversation.messages[-1]["role"] == "assistant"
        and not any(message["role"] == "assistant" for message in new)
        and _plain(request.tools) == _plain(conversation.tools)
        and all(map(_same, request.messages[:count], conversation.messages))
      ):
        try:
          return conversation, self._turn_tokens.observation(new, conversation.ended)
        except UserError:  # the template rejects these messages there
          return None
    return None


def _same(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
  """Whether two messages say the same; ids of calls and white space around texts do not matter."""
  return _essence(message) == _essence(other)


def _essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
  calls = [
    (call["function"]["name"], _arguments(call["function"]["arguments"]))
    for call in message.get("tool_calls") or ()
  ]
  return message["role"], (message.get("content") or "").strip(), calls


def _arguments(value: Any) -> str:
  return _plain(json.loads(value) if isinstance(value, str) else value)


def _plain(value: Any) -> str:
  return json.dumps(value, sort_keys=True)
