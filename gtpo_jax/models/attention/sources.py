"""Grouped-query attention over several sources of keys and values under one softmax.

A completion attends to its prompt and to itself. The prompt's keys and values are a separate source
with a group axis of size 1, so that a group shares one copy of them. They are repeated only for
kernels that take a single source (`AttentionContext.concatenate`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.number_formats import matmul_float32

MASKED = -1e30  # the score of a masked key; finite, so that a query without any key has no NaN


class KV(NamedTuple):
  """Keys and values of one layer. The group axis has size 1 if the group shares them.

  Keys are stored as [e, s], the layout that their product with the queries reads, so that a decode
  step does not transpose its cache.
  """

  k: jax.Array  # [n, g | 1, k, e, s]
  v: jax.Array  # [n, g | 1, k, s, e]
  k_scale: jax.Array | None = None  # f32[n, g | 1, k, s], scales of int8 keys; else None
  v_scale: jax.Array | None = None  # f32[n, g | 1, k, s], scales of int8 values; else None


class MaskedKV(NamedTuple):
  """Keys and values, and a mask of the queries that may attend to them."""

  kv: KV
  mask: jax.Array  # bool, broadcastable to [n, g, queries, keys]


class RowRanges(NamedTuple):
  """Where each of g completions is in rows [n, w, s], which completions may share."""

  start: jax.Array  # i32[n, g], the flat index of its first position in [w, s]
  length: jax.Array  # i32[n, g], its positions, which are contiguous
  owner: jax.Array  # i32[n, w, s], the completion that a position belongs to; -1 on padding


class AttentionContext(NamedTuple):
  """The keys and values that the queries of a full sequence attend to.

  A query attends causally to its own sequence, and to the prompt of its group.
  """

  own: KV  # [n, g, k, ...], one position per query
  own_mask: jax.Array | None = (
    None  # bool[n, 1, s], True on real tokens; None if there is no padding
  )
  prompt: KV | None = None  # [n, 1, k, ...]
  # bool[n, m, p], one row per segment; False on the prompt's left padding and on its last token,
  # which is the first input of the completion's sequence.
  prompt_mask: jax.Array | None = None
  # i32[n, g, s] in 0 .. m - 1; m marks padding. A position attends only to positions of its own
  # segment. None if each sequence is one segment.
  segment: jax.Array | None = None
  # For kernels that take a row per completion; None if each sequence is one completion.
  ranges: RowRanges | None = None
  # i32[n, g, s], how many positions each query is after the prompt's last token; for windows. None
  # if these are the indices in the sequence.
  places: jax.Array | None = None

  def concatenate(self, g: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Concatenates the prompt and the sequence, for kernels that take a single source.

    The prompt's keys and values are repeated for each segment of each completion.

    Args:
      g: completions per prompt.

    Returns:
      Keys and values [n, g, k, m (p - 1) + s, e], and for each key i32[n, g, m (p - 1) + s]:
      1 + its segment, or 0 where `own_mask` or `prompt_mask` is False.
    """
    over_group = lambda x: jnp.broadcast_to(x, (x.shape[0], g, *x.shape[2:]))
    n = self.own.v.shape[0]
    s = self.own.v.shape[3]
    own = jnp.ones((n, 1, s), jnp.int32) if self.segment is None else 1 + self.segment
    sources = [(self.own, own if self.own_mask is None else own * self.own_mask)]
    if self.prompt is not None:
      prompt = KV(self.prompt.k[..., :-1], self.prompt.v[..., :-1, :])
      masks = jnp.unstack(self.prompt_mask, axis=1)
      copies = [(prompt, mask[:, None, :-1] * (1 + i)) for i, mask in enumerate(masks)]
      sources = copies + sources
    concatenate = lambda arrays, axis: jnp.concatenate([over_group(x) for x in arrays], axis)
    return (
      concatenate([jnp.swapaxes(kv.k, -1, -2) for kv, _ in sources], 3),
      concatenate([kv.v for kv, _ in sources], 3),
      concatenate([segment for _, segment in sources], 2),
    )


class PartialAttention(NamedTuple):
  """Attention over one source before normalisation; `merge_partials` combines several."""

  weighted_values: jax.Array  # f32[n, g, h, s, e], sum of exp(score - max_score) * value
  max_score: jax.Array  # f32[n, g, h, s, 1]
  weight_sum: jax.Array  # f32[n, g, h, s, 1], sum of exp(score - max_score)


def partial_attention(
  q: jax.Array, source: MaskedKV, precision: str = "default"
) -> PartialAttention:
  """Returns the attention of the queries `q` [n, g, h, s, e] over one source, not normalised.

  Scores and sums are float32. The result of a query that may attend to no key (padding) is finite
  but meaningless.
  """
  n, g, h, s, e = q.shape
  kv, mask = source
  queries = q.reshape(n, g, kv.k.shape[2], -1, s, e) * e**-0.5
  scores = _batched_product(queries, kv.k.astype(q.dtype), precision)  # [n, g, k, r, s, keys]
  if kv.k_scale is not None:
    scores *= jnp.expand_dims(kv.k_scale, (-2, -3))
  scores = jnp.where(jnp.expand_dims(mask, (-4, -3)), scores, MASKED)
  max_score = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.exp(scores - max_score)
  weight_sum = weights.sum(-1, keepdims=True)
  if kv.v_scale is not None:
    weights *= jnp.expand_dims(kv.v_scale, (-2, -3))
  values = _batched_product(weights.astype(q.dtype), kv.v.astype(q.dtype), precision)
  parts = (values, max_score, weight_sum)
  return PartialAttention(*(x.reshape(n, g, h, s, -1) for x in parts))


def merge_partials(partials: Sequence[PartialAttention]) -> jax.Array:
  """Returns the attention over several sources under one softmax, f32[n, g, h, s, e]."""
  max_score = functools.reduce(jnp.maximum, [part.max_score for part in partials])
  scales = [jnp.exp(part.max_score - max_score) for part in partials]
  pairs = list(zip(partials, scales, strict=True))
  weight_sum = sum(part.weight_sum * scale for part, scale in pairs)
  return sum(part.weighted_values * (scale / weight_sum) for part, scale in pairs)


def _batched_product(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """Multiplies x [n, g, k, r, s, a] by y [n, g | 1, k, a, c]; returns f32[n, g, k, r, s, c].

  One matrix product computes the r query heads of a key/value head, and the full group if `y` has a
  group axis of size 1.
  """
  n, g, k, r, s, a = x.shape
  if y.shape[1] == 1 and g > 1:
    rows = jnp.swapaxes(x, 1, 2).reshape(n, k, g * r * s, a)
    return jnp.swapaxes(matmul_float32(rows, y[:, 0], precision).reshape(n, k, g, r, s, -1), 1, 2)
  product = matmul_float32(x.reshape(n, g, k, r * s, a), y, precision)
  return product.reshape(n, g, k, r, s, -1)
