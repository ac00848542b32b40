"""What the generator is asked to do, and what it delivers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gtpo_jax.sampling.stop_strings import StopSearch


class Part(NamedTuple):
  """The next tokens of a completion.

  Attributes:
    tokens: their ids.
    log_probs: nats, under softmax(logits).
    alternatives: for each token, the ids and log-probs of the most probable ones; empty unless the
      completion wants them.
    finish: "stop" or "length" if these are the last, "error" if there are no more; else "".
  """

  tokens: list[int]
  log_probs: list[float]
  alternatives: list[tuple[list[int], list[float]]]
  finish: str = ""


FAILED = Part([], [], [], "error")


@dataclasses.dataclass(eq=False)
class Completion:
  """A completion that is to be generated.

  Attributes:
    prompt: token ids.
    key: u32[2], PRNG key data.
    limit: the most tokens.
    sampling: temperature, top-k, top-p and min-p.
    wants_alternatives: whether `Part.alternatives` is filled in.
    search: finds its stop strings; None for none.
    deliver: receives the parts, on the generator's thread.
    tokens: those so far.
    cancelled: whether nobody waits for it any more.
  """

  prompt: Sequence[int]
  key: np.ndarray
  limit: int
  sampling: tuple[float, int, float, float]
  wants_alternatives: bool
  search: StopSearch | None
  deliver: Callable[[Part], None]
  tokens: list[int] = dataclasses.field(default_factory=list)
  cancelled: bool = False


@dataclasses.dataclass(eq=False)
class ScoreJob:
  """A text to score.

  Attributes:
    tokens: its ids.
    deliver: receives a `Part` with the log-probs of all tokens but the first, on the generator's
      thread; one with the finish "error" if scoring failed.
    cancelled: whether nobody waits for it any more.
  """

  tokens: Sequence[int]
  deliver: Callable[[Part], None]
  cancelled: bool = False
