"""The one record type of the package: a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question whose answer can be verified.

  Attributes:
    id: stable and unique within its source.
    messages: the conversation up to the assistant's turn, {"role", "content"} each.
    answer: the gold answer as text.
    kind: which verifier judges a completion.
    extra: what else that verifier reads.
  """

  id: str
  messages: tuple[dict[str, str], ...]
  answer: str
  kind: str
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Problems(Protocol):
  """Problems by number; a list of them is one."""

  def __len__(self) -> int:
    """How many there are."""

  def __getitem__(self, index: int) -> Problem:
    """Number `index`, from 0."""


def user(text: str) -> tuple[dict[str, str], ...]:
  """A conversation of one user message."""
  return ({"role": "user", "content": text},)
