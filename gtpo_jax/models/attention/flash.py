"""Blockwise causal attention over full sequences, without materialising the [s, s] scores.

Each block of queries attends to the prompt and to its own sequence. In the unrolled form the scores
above the diagonal block are never computed; in the loop form they are computed and masked. The
forward pass stores one log-sum-exp per query, and the backward pass recomputes the weights of each
block (FlashAttention, 2205.14135).

Under a causal mask a late query attends to more keys than an early one, so contiguous shards of
queries have unequal work and balanced shards have equal work. The logical axis "position" is the
positions of a sequence within a layer, split over the mesh axis context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gtpo_jax.models.attention.sources import MASKED, AttentionContext
from gtpo_jax.models.number_formats import matmul_float32
from gtpo_jax.runtime.mesh import mesh_axes, shard_index


class QueryShard(NamedTuple):
  """The positions in the sequence of the queries on this shard."""

  positions: np.ndarray  # i32[shards, s], the positions of the queries on every shard
  index: jax.Array  # i32[], the index of this shard


def contiguous_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: splits `length` positions into one contiguous run per context shard."""
  positions = np.arange(length, dtype=np.int32).reshape(shards, -1)
  return QueryShard(positions, shard_index("position"))


def balanced_queries(length: int, shards: int) -> QueryShard:
  """Within `shard_map`: gives each shard an early and a late run, so that all have equal work.

  The positions are cut into 2 * shards runs, and run i is paired with the i-th run from the end
  (2407.21783, section 3.3.2). `exchange_halves` moves queries from the positions of
  `contiguous_queries` to these.
  """
  runs = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
  positions = np.concatenate([runs[::2], runs[1::2][::-1]], axis=1)
  return QueryShard(positions, shard_index("position"))


def exchange_halves(x: jax.Array, shards: int) -> jax.Array:
  """Within `shard_map`: moves `x` [n, g, h, s, e] between contiguous and balanced positions.

  Shard i keeps the first half of its positions and exchanges the second half with shard
  `shards - 1 - i`. The exchange is its own inverse.
  """
  first, second = jnp.split(x, 2, axis=3)
  pairs = [(i, shards - 1 - i) for i in range(shards)]
  second = jax.lax.ppermute(second, mesh_axes("position"), pairs)
  return jnp.concatenate([first, second], axis=3)


# Checkpoint name of the arrays that remat="attention" stores: the attention output and the
# log-sum-exp of each query.
ATTENTION_RESIDUALS = "attention"
# Up to this many queries the blocks are unrolled. With more, a loop runs over the blocks.
MAX_UNROLLED_POSITIONS = 1024
UNROLLED_BLOCK = 64  # queries per block in the unrolled form
LOOP_BLOCK = 256  # queries per block in the loop form

Arrays = tuple[jax.Array, ...]
# own_mask, prompt_mask and segment of `AttentionContext`, the positions of the queries i32[s], and
# `AttentionContext.places`. The positions are None if the queries are a full sequence.
Masks = tuple[jax.Array | None, ...]


def attend_in_blocks(
  q: jax.Array,
  context: AttentionContext,
  precision: str = "default",
  query_shard: QueryShard | None = None,
  window: int | None = None,
) -> jax.Array:
  """Softmax attention of `q` over `context`; scores and sums are float32.

  The output of a query that may attend to no key (padding) is finite but meaningless.

  Args:
    q: [n, g, h, s, e].
    context: the keys, values and masks.
    precision: the precision of the matrix products.
    query_shard: the positions of the queries; None if `q` is a full sequence.
    window: the most positions that a query attends to, its own included; None for all.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  own = context.own
  prompt = context.prompt
  n, g, h, s, e = q.shape
  kv_heads = own.v.shape[2]
  # The heads come before the group, so that the queries of a group are adjacent: one matrix product
  # applies the prompt's keys to all of them, without transposing the queries or copying the keys.
  heads_first = lambda x: jnp.swapaxes(x, 1, 2)
  queries = heads_first((q * e**-0.5).astype(q.dtype).reshape(n, g, kv_heads, h // kv_heads, s, e))
  sources = (own,) if prompt is None else (own, prompt)
  kv = tuple(heads_first(x) for source in sources for x in (source.k, source.v))
  prompt_mask = None if prompt is None else context.prompt_mask[:, :1]  # the same for every segment
  positions = None
  if query_shard is not None:
    positions = jnp.asarray(query_shard.positions)[query_shard.index]
  masks = (context.own_mask, prompt_mask, context.segment, positions, context.places)
  return heads_first(_attend(queries, kv, masks, precision, window)).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(
  q: jax.Array, kv: Arrays, masks: Masks, precision: str, window: int | None
) -> jax.Array:
  """Returns the attention outputs [n, k, g, r, s, e] of scaled queries of the same shape.

  `kv` has the keys [n, k, g, e, s] and the values [n, k, g, s, e] of the sequences, and then, if
  there is a prompt, its keys and values with a group axis of size 1.
  """
  return _forward(q, kv, masks, precision, window)[0]


def _forward(
  q: jax.Array, kv: Arrays, masks: Masks, precision: str, window: int | None
) -> tuple[jax.Array, tuple]:
  def forward_block(
    _: None, block: tuple[jax.Array], positions: jax.Array, keys: slice
  ) -> tuple[None, tuple[jax.Array, jax.Array]]:
    scores = _scores(block[0], kv, masks, positions, keys, precision, window)
    max_score = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scores])
    weights = [jnp.exp(x - max_score) for x in scores]
    total = sum(x.sum(-1, keepdims=True) for x in weights)
    values = (kv[1][..., keys, :], *kv[3:])
    weighted = [
      _product(w.astype(q.dtype), v, precision) for w, v in zip(weights, values, strict=True)
    ]
    return None, ((sum(weighted) / total).astype(q.dtype), max_score + jnp.log(total))

  _, (out, lse) = _over_blocks(forward_block, None, (q,), kv, masks, window)
  out = checkpoint_name(out, ATTENTION_RESIDUALS)
  lse = checkpoint_name(lse, ATTENTION_RESIDUALS)
  return out, (q, kv, masks, out, lse)


def _backward(
  precision: str, window: int | None, residuals: tuple, d_out: jax.Array
) -> tuple[jax.Array, Arrays, None]:
  q, kv, masks, out, lse = residuals
  transposed = [jnp.swapaxes(x, -1, -2) for x in kv]
  # FlashAttention's delta: the sum over the features of d_out * out.
  delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

  def backward_block(
    d_kv: Arrays, block: Arrays, positions: jax.Array, keys: slice
  ) -> tuple[Arrays, tuple[jax.Array]]:
    queries, d_block, lse, delta = block
    d_kv = list(d_kv)
    d_queries = 0.0
    scores_by_source = _scores(queries, kv, masks, positions, keys, precision, window)
    for i, (scores, cut) in enumerate(zip(scores_by_source, (keys, slice(None)), strict=False)):
      k = 2 * i  # the index of this source's keys; its values come next
      v = k + 1
      weights = jnp.exp(scores - lse)
      d_weights = _product(d_block, transposed[v][..., cut], precision)
      d_scores = (weights * (d_weights - delta)).astype(q.dtype)
      d_queries += _product(d_scores, transposed[k][..., cut, :], precision)
      d_k = _transposed_product(queries, d_scores, kv[k], precision)
      d_kv[k] = d_kv[k].at[..., cut].add(d_k)
      d_v = _transposed_product(d_block, weights.astype(q.dtype), kv[k], precision)
      d_kv[v] = d_kv[v].at[..., cut, :].add(jnp.swapaxes(d_v, -1, -2))
    return tuple(d_kv), (d_queries.astype(q.dtype),)

  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in kv)
  d_kv, (d_q,) = _over_blocks(backward_block, start, (q, d_out, lse, delta), kv, masks, window)
  return d_q, tuple(d.astype(x.dtype) for d, x in zip(d_kv, kv, strict=True)), None


_attend.defvjp(_forward, _backward)


def _over_blocks(
  step: Callable, carry: Any, arrays: Arrays, kv: Arrays, masks: Masks, window: int | None
) -> tuple[Any, Arrays]:
  """Applies `step` to one block of queries after another.

  In the unrolled form a block uses the keys up to its last position, from the window of its first
  one on. It uses all keys in the loop form, and also if the queries are one shard of a sequence,
  because their positions are then known only at run time.

  Args:
    step: (carry, the block of each array, the block's positions i32[block], the keys of the
      sequence to use) -> (carry, results [..., block, e]).
    carry: the initial carry.
    arrays: [..., s, e], one entry per query. They are padded with zeros to full blocks; the results
      of the padding are dropped.
    kv, masks, window: as in `_attend`.

  Returns:
    The last carry, and the concatenated results [..., s, e].
  """
  s = arrays[0].shape[4]
  key_count = kv[0].shape[4]
  *_, positions, _ = masks
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
      keys = slice(0, key_count)
      if positions is None:
        keys = slice(max(first + 1 - window, 0) if window else 0, min(first + size, s))
      carry, result = step(carry, block(first), block_positions(first), keys)
      results.append(result)
    joined = [jnp.concatenate(x, 4) for x in zip(*results, strict=True)]
  else:
    carry, results = jax.lax.scan(
      lambda carry, first: step(carry, block(first), block_positions(first), slice(0, key_count)),
      carry,
      jnp.arange(0, s, size),
    )
    joined = [jnp.moveaxis(x, 0, 4).reshape(*x.shape[1:5], -1, x.shape[-1]) for x in results]
  return carry, tuple(x[..., :s, :] for x in joined)


def _scores(
  queries: jax.Array,
  kv: Arrays,
  masks: Masks,
  positions: jax.Array,
  keys: slice,
  precision: str,
  window: int | None,
) -> list[jax.Array]:
  """Returns the masked scores f32[n, k, g, r, block, keys] of a block of queries, one per source.

  The first source is the positions `keys` of the queries' own sequence; the second is the prompt,
  if there is one.
  """
  own_mask, prompt_mask, segment, _, places = masks
  key_positions = jnp.arange(keys.start, keys.stop)
  visible = key_positions <= positions[:, None]
  if window:
    visible &= key_positions > positions[:, None] - window
  if own_mask is not None:
    visible &= own_mask[:, None, :, None, None, keys]
  of_queries = lambda x: jnp.take(x, jnp.minimum(positions, x.shape[2] - 1), axis=2)
  if segment is not None:
    same = of_queries(segment)[..., None] == segment[..., None, keys]
    visible &= same[:, None, :, None]
  own_scores = _product(queries, kv[0][..., keys], precision)
  scores = [jnp.where(visible, own_scores, MASKED)]
  if len(kv) > 2:
    prompt_scores = _product(queries, kv[2], precision)
    visible = prompt_mask[:, None, :, None, None]
    if window:
      # The prompt's last position, which its mask leaves out, is that of the query at place 0.
      behind = prompt_mask.shape[-1] - 1 - jnp.arange(prompt_mask.shape[-1])
      place = positions[None, None] if places is None else of_queries(places)
      visible &= (place[..., None] + behind < window)[:, None, :, None]
    scores.append(jnp.where(visible, prompt_scores, MASKED))
  return scores


def _product(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """Multiplies x [n, k, g, r, s, a] by y [n, k, g | 1, a, c]; returns f32[n, k, g, r, s, c].

  One matrix product computes the r query heads of a key/value head, and the full group if `y` has a
  group axis of size 1.
  """
  return matmul_float32(_merge_rows(x, y), y, precision).reshape(*x.shape[:5], -1)


def _transposed_product(x: jax.Array, y: jax.Array, like: jax.Array, precision: str) -> jax.Array:
  """Contracts x [n, k, g, r, s, a] and y [n, k, g, r, s, c] over r and s.

  Returns f32[n, k, g, a, c]; or f32[n, k, 1, a, c], contracted over g too, if `like` has a group
  axis of size 1.
  """
  return matmul_float32(jnp.swapaxes(_merge_rows(x, like), -1, -2), _merge_rows(y, like), precision)


def _merge_rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """Flattens x [n, k, g, r, s, a] to the rows of matrices, [n, k, g, r s, a].

  If `like` has a group axis of size 1, the group is merged into the rows: [n, k, 1, g r s, a].
  """
  return x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[-1])
