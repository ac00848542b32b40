"""Grouped-query attention over several sources of keys and values, under one softmax.

A completion looks at its prompt and at itself. The prompt's keys and values stand once for the whole group, so they are a
source of their own, with group axis 1, and are never copied g times. The same function serves a training pass (all
positions of a completion at once) and a decode step (one position against a cache).
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.presets import Yarn

MASKED = -1e30  # a finite "minus infinity": rows that see nothing stay finite


class KV(NamedTuple):
  """Keys and values of one layer; the group axis is 1 where a whole group shares them."""

  k: jax.Array  # [n, g | 1, k, s, e]
  v: jax.Array  # [n, g | 1, k, s, e]


class Source(NamedTuple):
  """Keys and values that may be looked at, and from where."""

  kv: KV
  visible: jax.Array  # bool, broadcastable to [n, g, query s, key s]


def rope_angles(positions: jax.Array, head_dim: int, theta: float, yarn: Yarn | None = None) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines f32[..., s, e/2] of the rotary angles at integer `positions` [..., s]."""
  frequency, scale = theta ** (-np.arange(0, head_dim, 2) / head_dim), 1.0
  if yarn is not None:
    frequency, scale = _yarn(frequency, head_dim, theta, yarn)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _yarn(frequency: np.ndarray, head_dim: int, theta: float, yarn: Yarn) -> tuple[np.ndarray, float]:
  """YaRN's frequencies f64[e/2] and the factor of cosines and sines (2309.00071, section 3.2 and eq. 22).

  Features that turn often over the original context keep their frequency, those that turn less than once have it divided by
  the factor, those between are blended.
  """
  feature = lambda turns: head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
  first = max(math.floor(feature(yarn.beta_fast)), 0)
  last = min(math.ceil(feature(yarn.beta_slow)), head_dim - 1)
  blend = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
  scale = 0.1 * math.log(yarn.factor) + 1.0 if yarn.attention_factor is None else yarn.attention_factor
  return frequency * (1 - blend) + frequency / yarn.factor * blend, scale


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotary position embedding of `x` [..., heads, s, e], halves as the pair (Qwen's and Llama's layout)."""
  cos, sin = (jnp.expand_dims(a, -3) for a in rope)  # one head axis
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, sources: tuple[Source, ...], precision: str = "default") -> jax.Array:
  """Softmax attention of `q` [n, g, h, s, e] over all `sources` together.

  Scores and sums are float32. A query that sees nothing (padding) gets a finite, meaningless row.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  n, g, h, s, e = q.shape
  kv_heads = sources[0].kv.k.shape[2]
  q = q.reshape(n, g, kv_heads, h // kv_heads, s, e) * e**-0.5
  scores = [jnp.where(jnp.expand_dims(visible, (-4, -3)), _scores(q, kv.k, precision), MASKED) for kv, visible in sources]
  peak = jax.lax.stop_gradient(_maximum([x.max(-1, keepdims=True) for x in scores]))
  weights = [jnp.exp(x - peak) for x in scores]  # each f32[n, g, k, r, s, key s]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  mixed = sum(_mix(w.astype(q.dtype), kv.v, precision) for w, (kv, _) in zip(weights, sources, strict=True))
  return (mixed / total).astype(q.dtype).reshape(n, g, h, s, e)


def _maximum(parts: list[jax.Array]) -> jax.Array:
  peak = parts[0]
  for part in parts[1:]:
    peak = jnp.maximum(peak, part)
  return peak


def _scores(q: jax.Array, k: jax.Array, precision: str) -> jax.Array:
  """q [n,g,k,r,s,e] against keys [n,g|1,k,z,e] -> f32[n,g,k,r,s,z]."""
  return _batched_product(q, jnp.swapaxes(k, -1, -2), precision)


def _mix(weights: jax.Array, v: jax.Array, precision: str) -> jax.Array:
  """weights [n,g,k,r,s,z] on values [n,g|1,k,z,e] -> f32[n,g,k,r,s,e]."""
  return _batched_product(weights, v, precision)


def _batched_product(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """x [n,g,k,r,s,a] @ y [n,g|1,k,a,c] -> f32[n,g,k,r,s,c], rows merged so that each head is one matrix product.

  A source shared by the group (g = 1 in y) multiplies all g x r x s rows at once.
  """
  n, g, k, r, s, a = x.shape
  product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32, precision=precision)
  if y.shape[1] == 1 and g > 1:
    rows = jnp.swapaxes(x, 1, 2).reshape(n, k, g * r * s, a)
    return jnp.swapaxes(product(rows, y[:, 0]).reshape(n, k, g, r, s, -1), 1, 2)
  return product(x.reshape(n, g, k, r * s, a), y).reshape(n, g, k, r, s, -1)
