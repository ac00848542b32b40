"""Rotary position embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.attention.rope_scaling import RopeScaling
from gtpo_jax.models.attention.sources import KV

Rope = tuple[jax.Array, jax.Array]  # cosines and sines, f32[..., s, e/2] each


def rope_angles(
  positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rope:
  """Returns cosines and sines f32[..., s, e/2] of the rotary angles at `positions` i32[..., s]."""
  frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  scale = 1.0
  if scaling is not None:
    frequency, scale = scaling.scale(frequency, theta)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


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
