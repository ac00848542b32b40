"""The one record type of the package: a problem."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


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


def user(text: str) -> tuple[dict[str, str], ...]:
  """A conversation of one user message."""
  return ({"role": "user", "content": text},)
