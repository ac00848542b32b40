"""Attention over full sequences with the kernels of others: splash on TPUs, cuDNN on GPUs.

cuDNN treats a mask as a bias of [s, s], but skips the padding of rows whose lengths it knows. Each
completion therefore gets a row of its own (`own_rows.py`): causal masking, a window and a length
per row then suffice.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from gtpo_jax.models.attention.flash import ATTENTION_RESIDUALS, QueryShard
from gtpo_jax.models.attention.own_rows import in_own_rows
from gtpo_jax.models.attention.sources import KV, AttentionContext

TILE = 128  # the positions of a block are a multiple of this
# The most positions of a block. Of 2,048, the scores do not fit in the memory that the compiler
# gives a kernel on a chip; from 1,024 on, products take far longer than reading their operands.
LARGEST_BLOCK = 1024
# The fused backward kernel computes the scores once instead of twice, but its gradient of the
# queries has a copy for each block of keys. It is used for at most so many blocks.
FUSED_BLOCKS = 4


def attend_with_splash(
  q: jax.Array,
  context: AttentionContext,
  interpret: bool = False,
  query_shard: QueryShard | None = None,
  window: int | None = None,
) -> jax.Array:
  """Softmax attention of `q` over `context`, with products in the precision of the arrays' dtype.

  The keys are the prompt followed by the sequence, so that one causal mask, offset by the prompt's
  length, covers both. A key that a query must not attend to has another segment id, and each
  segment has its own copy of the prompt. Each key/value head is computed as multi-query attention.
  A window is a distance between positions, so completions that share rows get rows of their own.

  Args:
    q: [n, g, h, s, e].
    context: the keys, values and masks.
    interpret: whether to interpret the kernel, for tests without a TPU.
    query_shard: the positions of the queries; None if `q` is a full sequence.
    window: the most positions that a query attends to, its own included; None for all.

  Returns:
    [n, g, h, s, e] in q's dtype.
  """
  if window and context.segment is not None:
    own = in_own_rows(q, context, TILE)
    k, queries, v = (jnp.swapaxes(x, 2, 3) for x in (own.keys, own.queries, own.values))
    real = jnp.arange(k.shape[3]) < own.lengths[..., None]
    alone = AttentionContext(KV(jnp.swapaxes(k, -1, -2), v), real)
    attended = attend_with_splash(queries, alone, interpret, window=window)
    return own.move_back(jnp.swapaxes(attended, 2, 3))
  n, g, h, s, e = q.shape
  k, v, segment = context.concatenate(g)
  kv_heads, length = k.shape[2:4]
  own_length = context.own.v.shape[3]
  prompt_length = length - own_length
  queries = (q * e**-0.5).astype(q.dtype).reshape(n * g, kv_heads, h // kv_heads, s, e)
  blocks = (_block(s), _block(length))
  queries = _pad(queries, 3, blocks[0])
  keys, values = (_pad(x.reshape(n * g, kv_heads, length, e), 2, blocks[1]) for x in (k, v))
  if query_shard is None:
    query_segment = segment[..., -own_length:]
  else:
    positions = jnp.asarray(prompt_length + query_shard.positions)[query_shard.index]
    query_segment = jnp.take(segment, positions, axis=2)
  segments = zip((query_segment, segment), blocks, strict=True)
  segment_ids = splash_attention.SegmentIds(
    *(_pad(x.reshape(n * g, -1), 1, block) for x, block in segments)
  )
  sizes = (queries.shape[3], keys.shape[2])
  shards = own_length // s
  shape = (shards * sizes[0], sizes[1])
  mask = splash_attention.CausalMask(shape, offset=prompt_length)
  if window:
    mask = splash_attention.LocalMask(shape, (window - 1, 0), offset=prompt_length)
  if query_shard is not None or window:
    every = np.arange(s, dtype=np.int32)[None] if query_shard is None else query_shard.positions
    padded = np.pad(every, [(0, 0), (0, sizes[0] - s)], mode="edge")  # so that each sees a key
    mask.q_sequence = padded.reshape(-1)
  block_q, block_kv = blocks
  fused = sizes[1] <= FUSED_BLOCKS * block_kv
  kernel = splash_attention.make_splash_mqa(
    splash_attention.MultiHeadMask([mask] * (h // kv_heads)),
    block_sizes=splash_attention.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=block_kv,
      block_q_dkv=block_q,
      block_kv_dkv=block_kv,
      block_kv_dkv_compute=block_kv,
      block_q_dq=None if fused else block_q,
      block_kv_dq=None if fused else block_kv,
      use_fused_bwd_kernel=fused,
    ),
    residual_checkpoint_name=ATTENTION_RESIDUALS,
    interpret=interpret,
    head_shards=1,
    q_seq_shards=shards,
  )
  if query_shard is not None:
    kernel = _kernel_of_shard(kernel, query_shard.index, shards)
  of_row = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  return jax.vmap(of_row)(queries, keys, values, segment_ids)[..., :s, :].reshape(q.shape)


def _block(length: int) -> int:
  """Returns the positions of a block: `length` is divided into the fewest, of almost equal size."""
  count = -(-length // LARGEST_BLOCK)
  return -(-length // (count * TILE)) * TILE


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
  """Pads `axis` with zeros to a multiple of `block`."""
  return jnp.pad(x, [(0, -x.shape[i] % block if i == axis else 0) for i in range(x.ndim)])


def _kernel_of_shard(kernel: Callable, index: jax.Array, shards: int) -> Callable:
  """Cuts the kernel's mask arrays to the queries of one shard.

  Their shapes are [1, blocks of queries, blocks of keys] and [queries].
  """

  def cut(x: jax.Array) -> jax.Array:
    axis = min(x.ndim - 1, 1)
    size = x.shape[axis] // shards
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

  return jax.tree.map(cut, kernel)


# Rows are padded to a multiple of this many positions. The kernel refuses odd lengths in training,
# and computes tiles of at least 64 positions in any case.
ROW_MULTIPLE = 64


def attend_with_cudnn(
  q: jax.Array, context: AttentionContext, implementation: str = "cudnn", window: int | None = None
) -> jax.Array:
  """Softmax attention of `q` over `context`, in 16 bits.

  Args:
    q: [n, w, h, s, e].
    context: the keys, values and masks.
    implementation: passed to `jax.nn.dot_product_attention`.
    window: the most positions that a query attends to, its own included; None for all.

  Returns:
    [n, w, h, s, e] in q's dtype; 0 on padding.
  """
  own = in_own_rows(q, context, ROW_MULTIPLE)
  rows = lambda x: x.reshape(-1, *x.shape[2:])
  lengths = own.lengths.reshape(-1)
  attended = jax.nn.dot_product_attention(
    rows(own.queries),
    rows(own.keys),
    rows(own.values),
    is_causal=True,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    local_window_size=(window - 1, 0) if window else None,
    implementation=implementation,
  )
  return own.move_back(attended)
