"""Changes of the rotary frequencies for long contexts: YaRN, Llama 3.1's and Gemma 3's."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (2309.00071): rotary angles for contexts longer than in pre-training.

  Qwen's documentation recommends it for long inputs.

  Attributes:
    factor: ratio of the new context length to the original one.
    original: context length of pre-training, in positions.
    beta_fast: features with more rotations over `original` positions keep their frequency.
    beta_slow: features with fewer rotations have their frequency divided by `factor`.
    attention_factor: scale of the cosines and sines; None for 0.1 ln(factor) + 1.
  """

  factor: float
  original: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None

  def __post_init__(self):
    attention = 1.0 if self.attention_factor is None else self.attention_factor
    finite = all(math.isfinite(x) for x in (self.factor, self.beta_fast, attention))
    ordered = (
      self.factor >= 1
      and self.original >= 1
      and self.beta_fast > self.beta_slow > 0
      and attention > 0
    )
    if not (finite and ordered):
      raise UserError(
        "YaRN needs factor >= 1, original >= 1, beta_fast > beta_slow > 0, attention_factor > 0, "
        f"all finite; got {self}"
      )

  def max_length(self, context: int) -> int:
    """Returns the most positions of a sequence, where the model's config names `context`."""
    return max(context, int(self.factor * self.original))

  def scale(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """Scales the rotary frequencies f64[e/2] of base `theta`.

    Features with more than `beta_fast` rotations over the original context keep their frequency.
    Features with fewer than `beta_slow` rotations have it divided by `factor`. Frequencies in
    between are blended (2309.00071, section 3.2; the second result is eq. 22).

    Returns:
      The frequencies f64[e/2], and the factor of cosines and sines.
    """
    head_dim = 2 * len(frequency)
    feature = lambda rotations: (
      head_dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    )
    first = max(math.floor(feature(self.beta_fast)), 0)
    last = min(math.ceil(feature(self.beta_slow)), head_dim - 1)
    blend = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    factor = self.attention_factor
    if factor is None:
      factor = 0.1 * math.log(self.factor) + 1.0
    return frequency * (1 - blend) + frequency / self.factor * blend, factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """The scaling of Llama 3.1, 3.2 and 3.3 (`rope_type` "llama3" in Transformers).

  Attributes:
    factor: the divisor of low frequencies.
    original: context length of pre-training, in positions.
    low_freq_factor: features with fewer rotations over `original` positions are divided by
      `factor`.
    high_freq_factor: features with more rotations keep their frequency.
  """

  factor: float
  original: int
  low_freq_factor: float
  high_freq_factor: float

  def __post_init__(self):
    finite = math.isfinite(self.factor) and math.isfinite(self.high_freq_factor)
    ordered = (
      self.factor >= 1 and self.original >= 1 and self.high_freq_factor > self.low_freq_factor > 0
    )
    if not (finite and ordered):
      raise UserError(
        "the llama3 RoPE scaling needs factor >= 1, original >= 1, "
        f"high_freq_factor > low_freq_factor > 0, all finite; got {self}"
      )

  def max_length(self, context: int) -> int:
    """Returns the most positions of a sequence, where the model's config names `context`."""
    return context

  def scale(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """Scales the rotary frequencies f64[e/2], linearly in the number of rotations.

    Returns:
      The frequencies f64[e/2], and 1, the factor of cosines and sines.
    """
    rotations = self.original * frequency / (2 * math.pi)
    width = self.high_freq_factor - self.low_freq_factor
    kept = np.clip((rotations - self.low_freq_factor) / width, 0.0, 1.0)
    return frequency * kept + frequency / self.factor * (1 - kept), 1.0


@dataclasses.dataclass(frozen=True)
class Linear:
  """All frequencies divided by a factor (`rope_type` "linear" in Transformers).

  Attributes:
    factor: the divisor.
  """

  factor: float

  def __post_init__(self):
    if not (math.isfinite(self.factor) and self.factor >= 1):
      raise UserError(f"the linear RoPE scaling needs a finite factor >= 1; got {self}")

  def max_length(self, context: int) -> int:
    """Returns the most positions of a sequence, where the model's config names `context`."""
    return context

  def scale(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """Returns the frequencies f64[e/2], and 1, the factor of cosines and sines."""
    return frequency / self.factor, 1.0


RopeScaling = Yarn | Llama3Scaling | Linear
