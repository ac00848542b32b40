"""The package's only record type: a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

# The roles of messages. Templates build control tokens of them, such as <|user|>, so a role from a
# file could otherwise become any control token.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_ROLE = f"which is none of {', '.join(ROLES)}"


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
    """What an environment gets: the fields of `extra`, `id`, `messages` and `answer`."""
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
