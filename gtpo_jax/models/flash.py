"""Causal attention of whole streams, with no buffer of [positions, positions].

Queries pass in blocks. Each block looks at its prompt and at its own stream up to its last position, so that what is above the diagonal
is not computed. The forward pass keeps one log-sum-exp a query; the backward pass makes each block's weights again (2205.14135).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gtpo_jax.models.attention import MASKED, Context
from gtpo_jax.models.parts import Part

SAVED = "attention"  # what the remat policy of that name keeps: the result and one number a query
WRITTEN_OUT = 1024  # up to so many positions the blocks are written out one by one, each with the keys up to its end and no more
FEW, MANY = 64, 256  # queries of a block, written out and in a loop


def attend_in_blocks(
  q: jax.Array, context: Context, precision: str = "default", part: Part | None = None
) -> jax.Array:
  """Softmax attention of queries over their context, scores and sums in float32.

  A query that sees nothing (padding) gets a finite, meaningless row.

  Args:
    q: [n, g, h, s, e].
    context: what they look at.
    precision: of the matrix products.
    part: which queries of their stream `q` has; None where it has them all.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  own = context.own
  prompt = context.prompt
  n, g, h, s, e = q.shape
  kv_heads = own.v.shape[2]
  heads_first = lambda x: jnp.swapaxes(
    x, 1, 2
  )  # so that a prompt's keys multiply the queries of all its group as they lie
  rows = heads_first((q * e**-0.5).astype(q.dtype).reshape(n, g, kv_heads, h // kv_heads, s, e))
  keys = tuple(heads_first(x) for kv in (own, prompt) if kv is not None for x in (kv.k, kv.v))
  of_prompt = None if prompt is None else context.prompt_mask[:, :1]  # the same for all segments
  places = None if part is None else jnp.asarray(part.places)[part.number]
  return heads_first(
    _attend(rows, keys, (context.own_mask, of_prompt, context.segment, places), precision)
  ).reshape(q.shape)


Arrays = tuple[jax.Array, ...]
Masks = tuple[
  jax.Array | None, ...
]  # own, the prompt's, and segments, as of `Context`; and i32[s], where queries stand


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q: jax.Array, keys: Arrays, masks: Masks, precision: str) -> jax.Array:
  """q [n,k,g,r,s,e], scaled; keys: own k [n,k,g,e,s], own v [n,k,g,s,e], and the prompt's, with 1 for g -> [n,k,g,r,s,e]."""
  return _forward(q, keys, masks, precision)[0]


def _forward(q: jax.Array, keys: Arrays, masks: Masks, precision: str) -> tuple[jax.Array, tuple]:
  def one(
    _: None, block: tuple[jax.Array], places: jax.Array, span: int
  ) -> tuple[None, tuple[jax.Array, jax.Array]]:
    scores = _scores(block[0], keys, masks, places, span, precision)
    peak = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scores])
    weights = [jnp.exp(x - peak) for x in scores]
    total = sum(x.sum(-1, keepdims=True) for x in weights)
    values = (keys[1][..., :span, :], *keys[3:])
    out = (
      sum(_product(w.astype(q.dtype), v, precision) for w, v in zip(weights, values, strict=True))
      / total
    )
    return None, (out.astype(q.dtype), peak + jnp.log(total))

  _, (out, lse) = _over_blocks(one, None, (q,), keys, masks)
  out = checkpoint_name(out, SAVED)
  lse = checkpoint_name(lse, SAVED)
  return out, (q, keys, masks, out, lse)


def _backward(precision: str, residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, Arrays, None]:
  q, keys, masks, out, lse = residuals
  head_transposed = [jnp.swapaxes(x, -1, -2) for x in keys]
  shift = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

  def one(
    d_keys: Arrays, block: Arrays, places: jax.Array, span: int
  ) -> tuple[Arrays, tuple[jax.Array]]:
    (queries, grads, lse, shift) = block
    d_keys = list(d_keys)
    d_queries = 0.0
    for i, scores in enumerate(_scores(queries, keys, masks, places, span, precision)):
      cut = slice(0, scores.shape[-1])
      weights = jnp.exp(scores - lse)
      d_weights = _product(grads, head_transposed[2 * i + 1][..., cut], precision)
      d_scores = (weights * (d_weights - shift)).astype(q.dtype)
      d_queries += _product(d_scores, head_transposed[2 * i][..., cut, :], precision)
      d_keys[2 * i] = (
        d_keys[2 * i].at[..., cut].add(_turned_product(queries, d_scores, keys[2 * i], precision))
      )
      d_values = _turned_product(grads, weights.astype(q.dtype), keys[2 * i], precision)
      d_keys[2 * i + 1] = d_keys[2 * i + 1].at[..., cut, :].add(jnp.swapaxes(d_values, -1, -2))
    return tuple(d_keys), (d_queries.astype(q.dtype),)

  d_keys, (d_q,) = _over_blocks(
    one, tuple(jnp.zeros(x.shape, jnp.float32) for x in keys), (q, d_out, lse, shift), keys, masks
  )
  return d_q, tuple(d.astype(x.dtype) for d, x in zip(d_keys, keys, strict=True)), None


_attend.defvjp(_forward, _backward)


def _over_blocks(
  one: Callable, carry: Any, arrays: Arrays, keys: Arrays, masks: Masks
) -> tuple[Any, Arrays]:
  """`one(carry, block of the arrays, i32[block] where its queries stand, keys that it may see)` -> (carry, its results), for all in turn.

  Many blocks are a loop, in which each has all keys, as has every block of a part of a stream: which part is not known before it runs.
  Arrays [..., s, e] are filled up with zeros, which see but are not seen.
  """
  s = arrays[0].shape[4]
  most = keys[0].shape[4]
  (*_, places) = masks
  size = min(FEW if s <= WRITTEN_OUT else MANY, s)
  if places is not None:
    places = jnp.pad(places, (0, -s % size), mode="edge")
  stand = lambda first: (
    first + jnp.arange(size)
    if places is None
    else jax.lax.dynamic_slice_in_dim(places, first, size)
  )
  arrays = [jnp.pad(x, [(0, 0)] * 4 + [(0, -s % size), (0, 0)]) for x in arrays]
  cut = lambda first: tuple(jax.lax.dynamic_slice_in_dim(x, first, size, 4) for x in arrays)
  if s <= WRITTEN_OUT:
    parts = []
    for first in range(0, s, size):
      carry, part = one(
        carry, cut(first), stand(first), min(first + size, s) if places is None else most
      )
      parts.append(part)
    whole = [jnp.concatenate(x, 4) for x in zip(*parts, strict=True)]
  else:
    carry, parts = jax.lax.scan(
      lambda carry, first: one(carry, cut(first), stand(first), most), carry, jnp.arange(0, s, size)
    )
    whole = [jnp.moveaxis(x, 0, 4).reshape(*x.shape[1:5], -1, x.shape[-1]) for x in parts]
  return carry, tuple(x[..., :s, :] for x in whole)


def _scores(
  queries: jax.Array, keys: Arrays, masks: Masks, places: jax.Array, span: int, precision: str
) -> list[jax.Array]:
  """Scores f32[n,k,g,r,block,...] of the queries at `places`: with `span` positions of their own stream, then with the prompt."""
  own, prompt, segment, _ = masks
  visible = jnp.arange(span) <= places[:, None]
  if own is not None:
    visible &= own[:, None, :, None, None, :span]
  if segment is not None:
    of_queries = jnp.take(segment, jnp.minimum(places, segment.shape[2] - 1), axis=2)
    visible &= (of_queries[..., None] == segment[..., None, :span])[:, None, :, None]
  scores = [jnp.where(visible, _product(queries, keys[0][..., :span], precision), MASKED)]
  if len(keys) > 2:
    scores.append(
      jnp.where(prompt[:, None, :, None, None], _product(queries, keys[2], precision), MASKED)
    )
  return scores


def _product(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """x [n,k,g,r,s,a] @ y [n,k,g|1,a,c] -> f32[n,k,g,r,s,c], rows merged so that each head is one matrix product."""
  return _matmul(_rows(x, y), y, precision).reshape(*x.shape[:5], -1)


def _turned_product(x: jax.Array, y: jax.Array, like: jax.Array, precision: str) -> jax.Array:
  """The sum over r and s of x [n,k,g,r,s,a] and y [n,k,g,r,s,c], and over g where `like` is shared -> f32[n,k,g|1,a,c]."""
  return _matmul(jnp.swapaxes(_rows(x, like), -1, -2), _rows(y, like), precision)


def _rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """[n,k,g,r,s,a] -> [n,k,g|1,rows,a], the group among the rows where `like` is shared by it."""
  return x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[-1])


def _matmul(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision=precision)
