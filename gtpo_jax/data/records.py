"""The package's only record type: a problem, and the messages of its prompt."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

# The roles of messages. Templates build control tokens of them, such as <|user|>, so a role from a
# file could otherwise become any control token.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_ROLE = f"which is none of {', '.join(ROLES)}"
# Parts of a message, and columns of a row, that no prompt can have.
MEDIA = ("image", "images", "pixel_values", "video", "videos", "audio")
# Parts of an assistant's message that the prompt of a problem cannot have.
UNREAD_PARTS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question with a verifiable answer.

  Attributes:
    id: stable, and unique within its source.
    messages: the conversation up to the assistant's turn; each has "role", which is one of `ROLES`,
      and "content".
    answer: the gold answer as text.
    kind: selects the verifier of the completions from `rewards.VERIFIERS`.
    extra: additional data for the verifier.
    location: names the row in messages, such as `train.jsonl:7`.
    source: the label of its source in metrics, if a run has several; "" if not. Problems that
      differ only in location and source are equal.
  """

  id: str
  messages: tuple[dict[str, str], ...]
  answer: str
  kind: str
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  location: str = dataclasses.field(default="", compare=False)
  source: str = dataclasses.field(default="", compare=False)

  @property
  def row(self) -> dict[str, Any]:
    """What an environment or a reward function gets: `extra`, `id`, `messages` and `answer`."""
    messages = [dict(message) for message in self.messages]
    return {**self.extra, "id": self.id, "messages": messages, "answer": self.answer}


class Problems(Protocol):
  """A sequence of problems, such as a list."""

  def __len__(self) -> int:
    """Returns the number of problems."""

  def __getitem__(self, index: int) -> Problem:
    """Returns the problem with this index, from 0."""


def user(text: str) -> tuple[dict[str, str], ...]:
  """Returns a conversation that consists of one user message."""
  return ({"role": "user", "content": text},)


def to_messages(prompt: Any) -> tuple[dict[str, str], ...]:
  """Returns the conversation in a value of a row: a text, or messages.

  Raises:
    ValueError: it is neither, a message is malformed or empty, or it has a part that no chat
      template would get.
  """
  if isinstance(prompt, str):
    messages = user(prompt)
    parsed = None
    if prompt.lstrip()[:1] in ("[", "{") and "role" in prompt:
      for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
          parsed = parse(prompt)
          break
    if _is_conversation(parsed) or _is_conversation([parsed]):
      raise ValueError("has a conversation that is JSON text; write it as a list of messages")
  elif _is_conversation(prompt):
    messages = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    for message in prompt:
      if lost := next((name for name in MEDIA if message.get(name)), None):
        raise ValueError(f"has a message with {lost}, which would be lost: models read text only")
      if lost := next((name for name in UNREAD_PARTS if message.get(name)), None):
        raise ValueError(
          f"has a message with {lost}, which would be lost: write it into the content as the "
          "model writes it, such as <think>...</think>, or leave it out"
        )
    if messages[-1]["role"] == "assistant":
      raise ValueError(
        "has a prompt that ends with a turn of the assistant, which the model is to write; leave "
        f"it out: {shown(messages[-1]['content'])}"
      )
  else:
    raise ValueError(f"has a prompt that is neither text nor messages: {shown(prompt)}")
  for message in messages:
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
      raise ValueError(f"has a message with the role {shown(role)}, {NO_ROLE}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
      raise ValueError(f"has a {role} message that is not text: {shown(content)}")
    if content is None or not content.strip():
      raise ValueError(f"has an empty {role} message")
    encodable(content, f"{role} message")
  return messages


def encodable(text: str, what: str) -> str:
  """Returns the text of a row, or raises ValueError if it is not valid Unicode."""
  try:
    text.encode()
  except UnicodeEncodeError as error:  # half of a surrogate pair
    raise ValueError(f"has a character in its {what} that is not valid Unicode: {error}") from None
  return text


def _is_conversation(prompt: Any) -> bool:
  if not isinstance(prompt, list | tuple) or not prompt:
    return False
  return all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)


def shown(value: object) -> str:
  """Returns a value for a message: its start, however long or deep it is."""
  return _SHORT.repr(value)
