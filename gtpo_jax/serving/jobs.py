"""What the generator is asked to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from gtpo_jax.sampling.stop_strings import StopSearch
from gtpo_jax.serving.outputs import Part


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
    cancelled: whether nobody waits for it any more.
  """

  prompt: Sequence[int]
  key: np.ndarray
  limit: int
  sampling: tuple[float, int, float, float]
  wants_alternatives: bool
  search: StopSearch | None
  deliver: Callable[[Part], None]
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
