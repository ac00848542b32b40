"""Credit from values: where completions are cut, and what each segment between two cuts gains.

The value of a prefix is the mean reward of its continuations, which `rollout.continuations` samples
and scores. Functions here take NumPy arrays of one completion, of m tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gtpo_jax.runtime.fields import SHARE, Checked, at_least, setting


@dataclasses.dataclass(frozen=True)
class NoContinuations(Checked):
  """Nothing is continued."""

  prefix: ClassVar[str] = "algorithm."

  def __bool__(self) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class LineContinuations(NoContinuations):
  """Completions are cut at the ends of their lines (VinePPO, 2410.01679)."""

  continuations: int = setting(
    9, "continuations of a prefix, whose mean reward is its value.", at_least(1)
  )

  def __bool__(self) -> bool:
    return True

  def cuts(self, log_probs: np.ndarray, pieces: Sequence[str]) -> list[int]:
    """Returns the tokens before which a completion is cut, ascending; the first is above 0.

    Args:
      log_probs: f32[m], nats, at the sampling temperature.
      pieces: m texts, one for each token.
    """
    ends = ["\n" in piece for piece in pieces]
    return [
      i for i in range(1, len(pieces)) if ends[i - 1] and pieces[i] and not pieces[i].isspace()
    ]

  def learned(self, log_probs: np.ndarray) -> np.ndarray:
    """Returns the tokens that enter the loss, bool[m]."""
    return np.ones(len(log_probs), bool)


@dataclasses.dataclass(frozen=True)
class UncertainContinuations(LineContinuations):
  """Completions are cut where the policy was uncertain (SPO-chain, 2505.23564)."""

  cut_probability: float = setting(
    0.9,
    "a token that the policy drew with a smaller probability is a cut point, and only cut points "
    "enter the loss.",
    SHARE,
  )
  cut_interval: int = setting(5, "cut points of a segment.", at_least(1))

  def cuts(self, log_probs: np.ndarray, pieces: Sequence[str]) -> list[int]:
    """Returns every `cut_interval`-th cut point after the first segment; see the base class."""
    points = np.flatnonzero(self.learned(log_probs))
    return points[self.cut_interval :: self.cut_interval].tolist()

  def learned(self, log_probs: np.ndarray) -> np.ndarray:
    """Returns the tokens that enter the loss, the cut points, bool[m]."""
    return np.exp(log_probs) < self.cut_probability


def segment_gains(values: Sequence[float], cuts: Sequence[int], m: int) -> np.ndarray:
  """Returns the value after the segment of each token minus the value before it, f32[m].

  Args:
    values: of the prompt, of the prefixes that end at `cuts`, and of the whole completion; NaN if
      unknown, and then the gains on both sides of it are NaN.
    cuts: the tokens before which the completion is cut, ascending.
    m: its tokens.
  """
  lengths = np.diff([0, *cuts, m])
  return np.repeat(np.diff(values), lengths).astype(np.float32)
