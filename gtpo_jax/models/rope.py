"""Rotary position embeddings, with YaRN for long contexts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.config import Yarn

Rope = tuple[jax.Array, jax.Array]  # cosines and sines, f32[..., s, e/2] each


def rope_angles(
  positions: jax.Array, head_dim: int, theta: float, yarn: Yarn | None = None
) -> Rope:
  """Returns cosines and sines f32[..., s, e/2] of the rotary angles at `positions` i32[..., s]."""
  frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  scale = 1.0
  if yarn is not None:
    frequency, scale = _yarn(frequency, head_dim, theta, yarn)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
  """Rotates `x` [..., heads, s, e]. Features i and i + e/2 form a pair, as in Qwen and Llama."""
  cos, sin = (jnp.expand_dims(a, -3) for a in rope)  # broadcast over the heads
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _yarn(
  frequency: np.ndarray, head_dim: int, theta: float, yarn: Yarn
) -> tuple[np.ndarray, float]:
  """Returns YaRN's frequencies f64[e/2] and the scale of cosines and sines.

  Features with more than `beta_fast` rotations over the original context keep their frequency.
  Features with fewer than `beta_slow` rotations have it divided by `factor`. Frequencies in between
  are blended (2309.00071, section 3.2; the scale is eq. 22).
  """
  feature = lambda rotations: (
    head_dim * math.log(yarn.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
  )
  first = max(math.floor(feature(yarn.beta_fast)), 0)
  last = min(math.ceil(feature(yarn.beta_slow)), head_dim - 1)
  blend = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
  scale = yarn.attention_factor
  if scale is None:
    scale = 0.1 * math.log(yarn.factor) + 1.0
  return frequency * (1 - blend) + frequency / yarn.factor * blend, scale
