"""Rotary position embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.attention.rope_scaling import RopeScaling
from gtpo_jax.models.attention.sources import KV

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
