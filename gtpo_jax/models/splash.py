"""Attention of whole streams by JAX's splash kernel, for TPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from gtpo_jax.models.attention import Context
from gtpo_jax.models.flash import SAVED
from gtpo_jax.models.parts import Part

TILE = 128  # positions are filled up to a multiple of it
BLOCKS = (512, 256, 128)  # positions that a kernel step takes: the largest that divides them


def attend_by_splash(
  q: jax.Array, context: Context, interpret: bool = False, part: Part | None = None
) -> jax.Array:
  """As `attend_in_blocks`, but that products are of the kernel's own precision: that of the arrays.

  Prompt and stream stand one behind the other as keys, so that one causal mask, moved by the prompt's length, is right for both; what is
  not to be looked at is another segment, and each segment has the prompt to itself. Each key/value head is a multi-query attention.

  Args:
    q: [n, g, h, s, e].
    context: what they look at.
    interpret: the kernel is interpreted, for tests where there is no TPU.
    part: which queries of their stream `q` has; None where it has them all.
  """
  n, g, h, s, e = q.shape
  k, v, places = context.joined(g)
  heads, length, own = *k.shape[2:4], context.own.v.shape[3]
  fill = lambda x, axis: jnp.pad(
    x, [(0, -x.shape[i] % TILE if i == axis else 0) for i in range(x.ndim)]
  )
  queries = fill((q * e**-0.5).astype(q.dtype).reshape(n * g, heads, h // heads, s, e), 3)
  keys, values = (fill(x.reshape(n * g, heads, length, e), 2) for x in (k, v))
  of_queries = (
    places[..., -own:]
    if part is None
    else jnp.take(places, jnp.asarray(length - own + part.places)[part.number], axis=2)
  )
  segments = splash_attention.SegmentIds(
    *(fill(x.reshape(n * g, -1), 1) for x in (of_queries, places))
  )
  sizes = (queries.shape[3], keys.shape[2])
  parts = own // s
  mask = splash_attention.CausalMask((parts * sizes[0], sizes[1]), offset=length - own)
  if part is not None:
    mask.q_sequence = np.pad(part.places, [(0, 0), (0, sizes[0] - s)], mode="edge").reshape(-1)
  kernel = splash_attention.make_splash_mqa(
    splash_attention.MultiHeadMask([mask] * (h // heads)),
    block_sizes=_block_sizes(*sizes),
    residual_checkpoint_name=SAVED,
    interpret=interpret,
    head_shards=1,
    q_seq_shards=parts,
  )
  if part is not None:
    kernel = _of_part(kernel, part.number, parts)
  of_row = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  return jax.vmap(of_row)(queries, keys, values, segments)[..., :s, :].reshape(q.shape)


def _of_part(kernel: Callable, part: jax.Array, parts: int) -> Callable:
  """The kernel of one part's queries: what it knows of its mask are arrays [1, blocks of queries, blocks of keys] and [queries]."""

  def cut(x: jax.Array) -> jax.Array:
    axis = min(x.ndim - 1, 1)
    size = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, part * size, size, axis)

  return jax.tree.map(cut, kernel)


def _block_sizes(queries: int, keys: int) -> splash_attention.BlockSizes:
  q, kv = (next(size for size in BLOCKS if length % size == 0) for length in (queries, keys))
  return splash_attention.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_kv_compute=kv,
    block_q_dkv=q,
    block_kv_dkv=kv,
    block_kv_dkv_compute=kv,
    block_q_dq=q,
    block_kv_dq=kv,
  )
