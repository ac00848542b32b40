"""What the generator is asked to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from gtpo_jax.models.decode import DecodeParams
from gtpo_jax.sampling.completion import Completion
from gtpo_jax.serving.outputs import Part


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedCompletion(Completion):
  """A completion that somebody waits for.

  Attributes:
    deliver: receives the parts, on the generator's thread.
    params: the policy, in the engine's layout; None for the generator's own.
    cancelled: whether nobody waits for it any more.
  """

  deliver: Callable[[Part], None]
  params: DecodeParams | None = None
  cancelled: bool = False


@dataclasses.dataclass(eq=False)
class ScoreJob:
  """A text to score.

  Attributes:
    tokens: its ids.
    deliver: receives a `Part` with the log-probs of all tokens but the first, on the generator's
      thread; one with the finish "error" if scoring failed.
    params: as in `ServedCompletion`.
    cancelled: whether nobody waits for it any more.
  """

  tokens: Sequence[int]
  deliver: Callable[[Part], None]
  params: DecodeParams | None = None
  cancelled: bool = False
