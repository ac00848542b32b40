"""Causal attention of complete streams in blocks, without a buffer of [positions, positions].

Each block of queries attends to its prompt and to its own stream up to the block's last position:
keys above the diagonal are not computed. The forward pass stores one log-sum-exp per query, and
the backward pass recomputes the weights of each block (FlashAttention, 2205.14135).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gtpo_jax.models.attention import MASKED, AttentionContext
from gtpo_jax.models.context_parallel import QueryShard

# Checkpoint name of what remat="attention" stores: the result and one number per query.
ATTENTION_RESIDUALS = "attention"
# Up to this many positions the blocks are unrolled, each with only the keys up to its last
# position. Longer streams loop over the blocks, each with all keys.
MAX_UNROLLED_POSITIONS = 1024
UNROLLED_BLOCK = 64  # queries of an unrolled block
LOOP_BLOCK = 256  # queries of a block in the loop

Arrays = tuple[jax.Array, ...]
# own_mask, the prompt's mask, segment (see `AttentionContext`), and the queries' positions i32[s]
Masks = tuple[jax.Array | None, ...]


def attend_in_blocks(
  q: jax.Array,
  context: AttentionContext,
  precision: str = "default",
  query_shard: QueryShard | None = None,
) -> jax.Array:
  """Softmax attention of `q` over `context`; scores and sums are float32.

  A query without a visible key (padding) gets a finite, meaningless row.

  Args:
    q: [n, g, h, s, e].
    context: keys and values.
    precision: of the matrix products.
    query_shard: the positions of `q` in its stream; None if `q` has all of them.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  own = context.own
  prompt = context.prompt
  n, g, h, s, e = q.shape
  kv_heads = own.v.shape[2]
  # With the group axis after the heads, a prompt's keys multiply the queries of its group in place.
  heads_first = lambda x: jnp.swapaxes(x, 1, 2)
  rows = heads_first((q * e**-0.5).astype(q.dtype).reshape(n, g, kv_heads, h // kv_heads, s, e))
  keys = tuple(heads_first(x) for kv in (own, prompt) if kv is not None for x in (kv.k, kv.v))
  prompt_mask = None if prompt is None else context.prompt_mask[:, :1]  # equal for all segments
  positions = None
  if query_shard is not None:
    positions = jnp.asarray(query_shard.positions)[query_shard.index]
  masks = (context.own_mask, prompt_mask, context.segment, positions)
  return heads_first(_attend(rows, keys, masks, precision)).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q: jax.Array, keys: Arrays, masks: Masks, precision: str) -> jax.Array:
  """Attention of scaled queries [n,k,g,r,s,e] -> [n,k,g,r,s,e].

  `keys` are the stream's k [n,k,g,e,s] and v [n,k,g,s,e], then the prompt's with group axis 1.
  """
  return _forward(q, keys, masks, precision)[0]


def _forward(q: jax.Array, keys: Arrays, masks: Masks, precision: str) -> tuple[jax.Array, tuple]:
  def forward_block(
    _: None, block: tuple[jax.Array], positions: jax.Array, key_count: int
  ) -> tuple[None, tuple[jax.Array, jax.Array]]:
    scores = _scores(block[0], keys, masks, positions, key_count, precision)
    peak = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scores])
    weights = [jnp.exp(x - peak) for x in scores]
    total = sum(x.sum(-1, keepdims=True) for x in weights)
    values = (keys[1][..., :key_count, :], *keys[3:])
    weighted = [
      _product(w.astype(q.dtype), v, precision) for w, v in zip(weights, values, strict=True)
    ]
    return None, ((sum(weighted) / total).astype(q.dtype), peak + jnp.log(total))

  _, (out, lse) = _over_blocks(forward_block, None, (q,), keys, masks)
  out = checkpoint_name(out, ATTENTION_RESIDUALS)
  lse = checkpoint_name(lse, ATTENTION_RESIDUALS)
  return out, (q, keys, masks, out, lse)


def _backward(precision: str, residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, Arrays, None]:
  q, keys, masks, out, lse = residuals
  transposed = [jnp.swapaxes(x, -1, -2) for x in keys]
  shift = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

  def backward_block(
    d_keys: Arrays, block: Arrays, positions: jax.Array, key_count: int
  ) -> tuple[Arrays, tuple[jax.Array]]:
    queries, d_block, lse, shift = block
    d_keys = list(d_keys)
    d_queries = 0.0
    scores_by_source = _scores(queries, keys, masks, positions, key_count, precision)
    for i, scores in enumerate(scores_by_source):
      k = 2 * i  # each source has its keys, then its values
      v = k + 1
      cut = slice(0, scores.shape[-1])
      weights = jnp.exp(scores - lse)
      d_weights = _product(d_block, transposed[v][..., cut], precision)
      d_scores = (weights * (d_weights - shift)).astype(q.dtype)
      d_queries += _product(d_scores, transposed[k][..., cut, :], precision)
      d_k = _transposed_product(queries, d_scores, keys[k], precision)
      d_keys[k] = d_keys[k].at[..., cut].add(d_k)
      d_v = _transposed_product(d_block, weights.astype(q.dtype), keys[k], precision)
      d_keys[v] = d_keys[v].at[..., cut, :].add(jnp.swapaxes(d_v, -1, -2))
    return tuple(d_keys), (d_queries.astype(q.dtype),)

  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys)
  d_keys, (d_q,) = _over_blocks(backward_block, start, (q, d_out, lse, shift), keys, masks)
  return d_q, tuple(d.astype(x.dtype) for d, x in zip(d_keys, keys, strict=True)), None


_attend.defvjp(_forward, _backward)


def _over_blocks(
  step: Callable, carry: Any, arrays: Arrays, keys: Arrays, masks: Masks
) -> tuple[Any, Arrays]:
  """Applies `step` to one block of queries after another.

  A loop gives every block all keys. So does a shard of a stream: its positions are known only at
  run time.

  Args:
    step: (carry, the block of each array, its positions i32[block], number of keys) -> (carry,
      results [..., block, e]).
    carry: initial value.
    arrays: [..., s, e]. They are padded with zeros: padding attends but is never attended to.
    keys, masks: as in `_attend`.

  Returns:
    The last carry and the concatenated results [..., s, e].
  """
  s = arrays[0].shape[4]
  key_count = keys[0].shape[4]
  *_, positions = masks
  size = min(UNROLLED_BLOCK if s <= MAX_UNROLLED_POSITIONS else LOOP_BLOCK, s)
  if positions is not None:
    positions = jnp.pad(positions, (0, -s % size), mode="edge")
  arrays = [jnp.pad(x, [(0, 0)] * 4 + [(0, -s % size), (0, 0)]) for x in arrays]
  block = lambda first: tuple(jax.lax.dynamic_slice_in_dim(x, first, size, 4) for x in arrays)

  def block_positions(first: int | jax.Array) -> jax.Array:
    if positions is None:
      return first + jnp.arange(size)
    return jax.lax.dynamic_slice_in_dim(positions, first, size)

  if s <= MAX_UNROLLED_POSITIONS:
    results = []
    for first in range(0, s, size):
      visible = min(first + size, s) if positions is None else key_count
      carry, result = step(carry, block(first), block_positions(first), visible)
      results.append(result)
    joined = [jnp.concatenate(x, 4) for x in zip(*results, strict=True)]
  else:
    carry, results = jax.lax.scan(
      lambda carry, first: step(carry, block(first), block_positions(first), key_count),
      carry,
      jnp.arange(0, s, size),
    )
    joined = [jnp.moveaxis(x, 0, 4).reshape(*x.shape[1:5], -1, x.shape[-1]) for x in results]
  return carry, tuple(x[..., :s, :] for x in joined)


def _scores(
  queries: jax.Array,
  keys: Arrays,
  masks: Masks,
  positions: jax.Array,
  key_count: int,
  precision: str,
) -> list[jax.Array]:
  """Returns masked scores f32[n,k,g,r,block,keys] of the queries at `positions`.

  The first entry is with the first `key_count` positions of their own stream, the second with the
  prompt if there is one.
  """
  own_mask, prompt_mask, segment, _ = masks
  visible = jnp.arange(key_count) <= positions[:, None]
  if own_mask is not None:
    visible &= own_mask[:, None, :, None, None, :key_count]
  if segment is not None:
    query_segment = jnp.take(segment, jnp.minimum(positions, segment.shape[2] - 1), axis=2)
    same = query_segment[..., None] == segment[..., None, :key_count]
    visible &= same[:, None, :, None]
  own_scores = _product(queries, keys[0][..., :key_count], precision)
  scores = [jnp.where(visible, own_scores, MASKED)]
  if len(keys) > 2:
    prompt_scores = _product(queries, keys[2], precision)
    scores.append(jnp.where(prompt_mask[:, None, :, None, None], prompt_scores, MASKED))
  return scores


def _product(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """x [n,k,g,r,s,a] @ y [n,k,g|1,a,c] -> f32[n,k,g,r,s,c], with one matrix product per head."""
  return _matmul(_rows(x, y), y, precision).reshape(*x.shape[:5], -1)


def _transposed_product(x: jax.Array, y: jax.Array, like: jax.Array, precision: str) -> jax.Array:
  """Contracts x [n,k,g,r,s,a] and y [n,k,g,r,s,c] over r and s -> f32[n,k,g|1,a,c].

  Contracts over g too if `like` has group axis 1.
  """
  return _matmul(jnp.swapaxes(_rows(x, like), -1, -2), _rows(y, like), precision)


def _rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """[n,k,g,r,s,a] -> [n,k,g|1,rows,a]; the group is among the rows if `like` has group axis 1."""
  return x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[-1])


def _matmul(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision=precision)
