"""Rotary position embeddings, and their scalings for long contexts: YaRN, Llama 3.1, Gemma 3."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.attention.sources import KV
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (2309.00071): rotary angles for contexts longer than in pre-training.

  Qwen's documentation recommends it for long inputs.
  """

  factor: float  # ratio of the new context length to the original one
  original: int  # context length of pre-training, in positions
  # features with more rotations over `original` positions keep their frequency
  beta_fast: float = 32.0
  beta_slow: float = 1.0  # features with fewer rotations have their frequency divided by `factor`
  # scale of the cosines and sines; None for 0.1 ln(factor) + 1
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
  """The scaling of Llama 3.1, 3.2 and 3.3 (`rope_type` "llama3" in Transformers)."""

  factor: float  # the divisor of low frequencies
  original: int  # context length of pre-training, in positions
  # features with fewer rotations over `original` positions are divided by `factor`
  low_freq_factor: float
  high_freq_factor: float  # features with more rotations keep their frequency

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
  """All frequencies divided by a factor (`rope_type` "linear" in Transformers)."""

  factor: float  # the divisor

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


Rope = tuple[jax.Array, jax.Array]  # cosines and sines, f32[..., s, e/2] each


def rope_angles(
  positions: jax.Array,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
  rotated: int | None = None,
) -> Rope:
  """Returns cosines and sines f32[..., s, e/2] of the rotary angles at `positions` i32[..., s].

  Args:
    positions: i32[..., s].
    head_dim: e, the features of a head.
    theta: base of the angles.
    scaling: changes them; None for plain angles.
    rotated: the features that are rotated; None for all. The angles of others are 0; see
      `in_pairs`.
  """
  rotated = rotated or head_dim
  frequency = theta ** (-np.arange(0, rotated, 2) / rotated)
  scale = 1.0
  if scaling is not None:
    frequency, scale = scaling.scale(frequency, theta)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  rope = jnp.cos(angles) * scale, jnp.sin(angles) * scale
  if rotated == head_dim:
    return rope
  shape = (*angles.shape[:-1], (head_dim - rotated) // 2)
  rest = (jnp.ones(shape), jnp.zeros(shape))
  return tuple(jnp.concatenate(both, -1) for both in zip(rope, rest, strict=True))


def in_pairs(x: jax.Array, rotated: int) -> jax.Array:
  """Orders the features of `x` [..., e], of which the first `rotated` are rotated, for `rotate`.

  Features i and i + rotated/2 become i and i + e/2. Products of queries and keys do not depend on
  the order.
  """
  e = x.shape[-1]
  if rotated == e:
    return x
  cuts = (rotated // 2, rotated, (e + rotated) // 2)
  first, second, rest, others = jnp.split(x, cuts, -1)
  return jnp.concatenate([first, rest, second, others], -1)


def rotate_new(q: jax.Array, new: KV, rope: Rope | None, step: jax.Array) -> tuple[jax.Array, KV]:
  """Rotates the queries [n, g, h, 1, e] and the keys of one position, `step` of those of `rope`."""
  if rope is None:
    return q, new
  rope = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, step, 1, 2), rope)
  k = rotate(jnp.swapaxes(new.k, -1, -2), rope)
  return rotate(q, rope), new._replace(k=jnp.swapaxes(k, -1, -2))


def rotate(x: jax.Array, rope: Rope | None) -> jax.Array:
  """Rotates `x` [..., heads, s, e]. Features i and i + e/2 form a pair, as in Transformers."""
  if rope is None:
    return x
  cos, sin = (jnp.expand_dims(a, -3) for a in rope)  # broadcast over the heads
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
