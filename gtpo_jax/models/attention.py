"""Grouped-query attention over several sources of keys and values, under one softmax.

A completion looks at its prompt and at itself. The prompt's keys and values stand once for the whole group, so they are a
source of their own, with group axis 1, and are never copied g times. The same function serves a training pass (all
positions of a completion at once) and a decode step (one position against a cache).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.models.presets import Yarn

MASKED = -1e30  # a finite "minus infinity": rows that see nothing stay finite


class KV(NamedTuple):
  """Keys and values of one layer; the group axis is 1 where a whole group shares them.

  Keys lie transposed, as the product with the queries wants them: a cache is then read at every step without being turned.
  """

  k: jax.Array  # [n, g | 1, k, e, s]
  v: jax.Array  # [n, g | 1, k, s, e]
  k_scale: jax.Array | None = (
    None  # f32[n, g | 1, k, s], by which int8 keys are multiplied; None for other types
  )
  v_scale: jax.Array | None = None


class Source(NamedTuple):
  """Keys and values that may be looked at, and from where."""

  kv: KV
  visible: jax.Array  # bool, broadcastable to [n, g, query s, key s]


class Context(NamedTuple):
  """What the queries of a whole stream look at: the stream itself, causally, and the prompt of their group."""

  own: KV  # [n, g, k, ...], as many positions as there are queries
  own_mask: jax.Array | None = None  # bool[n, 1, s], real tokens; None where all may be looked at
  prompt: KV | None = None  # [n, 1, k, ...]
  prompt_mask: jax.Array | None = (
    None  # bool[n, m, p], once for each segment; False on the padding on the prompt's left, and on its
  )
  #                                       last token, which begins the stream
  segment: jax.Array | None = (
    None  # i32[n, g, s], 0 .. m - 1: what a position sees alone of its stream; m on padding; None for one
  )

  def joined(self, g: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The prompt and behind it the stream, for kernels that know one source: k, v [n, g, k, m (p - 1) + s, e], and what each place is of.

    That is i32[n, g, m (p - 1) + s]: 1 + its segment, 0 where nothing stands. Every segment has the prompt to itself.
    """
    residual_layout = lambda x: jnp.broadcast_to(x, (x.shape[0], g, *x.shape[2:]))
    n = self.own.v.shape[0]
    s = self.own.v.shape[3]
    own = jnp.ones((n, 1, s), jnp.int32) if self.segment is None else 1 + self.segment
    parts = [(self.own, own if self.own_mask is None else own * self.own_mask)]
    if self.prompt is not None:
      prompt = KV(self.prompt.k[..., :-1], self.prompt.v[..., :-1, :])
      parts = [
        (prompt, mask[:, None, :-1] * (1 + i))
        for i, mask in enumerate(jnp.unstack(self.prompt_mask, axis=1))
      ] + parts
    join = lambda arrays, axis: jnp.concatenate([residual_layout(x) for x in arrays], axis)
    return (
      join([jnp.swapaxes(kv.k, -1, -2) for kv, _ in parts], 3),
      join([kv.v for kv, _ in parts], 3),
      join([place for _, place in parts], 2),
    )


def rope_angles(
  positions: jax.Array, head_dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines f32[..., s, e/2] of the rotary angles at integer `positions` [..., s]."""
  frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  scale = 1.0
  if yarn is not None:
    frequency, scale = _yarn(frequency, head_dim, theta, yarn)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _yarn(
  frequency: np.ndarray, head_dim: int, theta: float, yarn: Yarn
) -> tuple[np.ndarray, float]:
  """YaRN's frequencies f64[e/2] and the factor of cosines and sines (2309.00071, section 3.2 and eq. 22).

  Features that turn often over the original context keep their frequency, those that turn less than once have it divided by
  the factor, those between are blended.
  """
  feature = lambda turns: (
    head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
  )
  first = max(math.floor(feature(yarn.beta_fast)), 0)
  last = min(math.ceil(feature(yarn.beta_slow)), head_dim - 1)
  blend = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
  scale = (
    0.1 * math.log(yarn.factor) + 1.0 if yarn.attention_factor is None else yarn.attention_factor
  )
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
  return join([look(q, source, precision) for source in sources]).astype(q.dtype)


class PartialAttention(NamedTuple):
  """What queries found in one source, for `join` to put together with the rest."""

  mixed: jax.Array  # f32[n, g, h, s, e], values weighted with exp(score - peak), not normalised
  peak: jax.Array  # f32[n, g, h, s, 1], the highest score
  total: jax.Array  # f32[n, g, h, s, 1], the weights' sum


def look(q: jax.Array, source: Source, precision: str = "default") -> PartialAttention:
  """What the queries `q` [n, g, h, s, e] find in one source."""
  n, g, h, s, e = q.shape
  kv, visible = source
  rows = q.reshape(n, g, kv.k.shape[2], -1, s, e) * e**-0.5
  scores = _batched_product(rows, kv.k.astype(q.dtype), precision)  # [n, g, k, r, s, key s]
  if kv.k_scale is not None:
    scores *= jnp.expand_dims(kv.k_scale, (-2, -3))
  scores = jnp.where(jnp.expand_dims(visible, (-4, -3)), scores, MASKED)
  peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.exp(scores - peak)
  total = weights.sum(-1, keepdims=True)
  if kv.v_scale is not None:
    weights *= jnp.expand_dims(kv.v_scale, (-2, -3))
  mixed = _batched_product(weights.astype(q.dtype), kv.v.astype(q.dtype), precision)
  return PartialAttention(*(x.reshape(n, g, h, s, -1) for x in (mixed, peak, total)))


def join(parts: Sequence[PartialAttention]) -> jax.Array:
  """The attention over several sources under one softmax, f32[n, g, h, s, e]."""
  peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
  scales = [jnp.exp(part.peak - peak) for part in parts]
  total = sum(part.total * scale for part, scale in zip(parts, scales, strict=True))
  return sum(part.mixed * (scale / total) for part, scale in zip(parts, scales, strict=True))


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
