"""The package's only record type: a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question with a verifiable answer.

  Attributes:
    id: stable, and unique within its source.
    messages: the conversation up to the assistant's turn; each has "role" and "content".
    answer: the gold answer as text.
    kind: selects the verifier of the completions from `rewards.VERIFIERS`.
    extra: additional data for the verifier.
  """

  id: str
  messages: tuple[dict[str, str], ...]
  answer: str
  kind: str
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Problems(Protocol):
  """A sequence of problems, such as a list."""

  def __len__(self) -> int:
    """Returns the number of problems."""

  def __getitem__(self, index: int) -> Problem:
    """Returns the problem with this index, from 0."""


def user(text: str) -> tuple[dict[str, str], ...]:
  """Returns a conversation that consists of one user message."""
  return ({"role": "user", "content": text},)
