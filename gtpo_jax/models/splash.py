"""Attention of whole streams by JAX's splash kernel, for TPU."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from gtpo_jax.models.attention import Context
from gtpo_jax.models.flash import SAVED

TILE = 128                 # positions are filled up to a multiple of it
BLOCKS = (512, 256, 128)   # positions that a kernel step takes: the largest that divides them


def attend_by_splash(q: jax.Array, context: Context, interpret: bool = False) -> jax.Array:
  """As `attend_in_blocks`, but that products are of the kernel's own precision: that of the arrays.

  Prompt and stream stand one behind the other as keys, so that one causal mask, moved by the prompt's length, is right for both; what is
  not to be looked at is another segment, and each segment has the prompt to itself. Each key/value head is a multi-query attention.

  Args:
    q: [n, g, h, s, e].
    context: what they look at.
    interpret: the kernel is interpreted, for tests where there is no TPU.
  """
  n, g, h, s, e = q.shape
  k, v, places = context.joined(g)
  heads, length = k.shape[2:4]
  fill = lambda x, axis: jnp.pad(x, [(0, -x.shape[i] % TILE if i == axis else 0) for i in range(x.ndim)])
  queries = fill((q * e**-0.5).astype(q.dtype).reshape(n * g, heads, h // heads, s, e), 3)
  keys, values = (fill(x.reshape(n * g, heads, length, e), 2) for x in (k, v))
  segments = splash_attention.SegmentIds(*(fill(x.reshape(n * g, -1), 1) for x in (places[..., -s:], places)))
  sizes = queries.shape[3], keys.shape[2]
  mask = splash_attention.MultiHeadMask([splash_attention.CausalMask(sizes, offset=length - s)] * (h // heads))
  kernel = splash_attention.make_splash_mqa_single_device(mask, block_sizes=_block_sizes(*sizes), residual_checkpoint_name=SAVED,
                                                          interpret=interpret)
  of_row = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  return jax.vmap(of_row)(queries, keys, values, segments)[..., :s, :].reshape(q.shape)


def _block_sizes(queries: int, keys: int) -> splash_attention.BlockSizes:
  q, kv = (next(size for size in BLOCKS if length % size == 0) for length in (queries, keys))
  return splash_attention.BlockSizes(block_q=q, block_kv=kv, block_kv_compute=kv, block_q_dkv=q, block_kv_dkv=kv,
                                     block_kv_dkv_compute=kv, block_q_dq=q, block_kv_dq=kv)
