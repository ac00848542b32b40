"""Attention over caches of ragged length, by kernels that read only each slot's own positions.

There is one kernel for TPU and one for GPU. Both compute a running softmax over blocks of
positions. Blocks past a slot's length are neither fetched nor computed, so the cost depends on the
length of each slot, not on the longest.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from gtpo_jax.models.attention import KV, MASKED, PartialAttention
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.mesh import axis_size, partition_spec

LANES = 128  # cache lengths are multiples of this, the width of a TPU vector register
TPU_BLOCKS = (
  512,
  256,
  128,
)  # positions per block; the largest that divides the cache length is used
GPU_BLOCK = 64  # positions per block on GPU; it divides LANES
# The r queries of a key/value head are padded to a multiple of this number of rows, which is one
# bfloat16 tile on TPU and the smallest matrix of a tensor core on GPU.
QUERY_ROWS = 16


def ragged_attention(
  model: Qwen2, q: jax.Array, kv: KV, lengths: jax.Array, kernel: str
) -> PartialAttention:
  """Attends with one query position per slot to the valid positions of the slot's cache.

  Args:
    model: the architecture, on the sampling mesh.
    q: queries [s, 1, h, 1, e].
    kv: the caches of s slots.
    lengths: i32[s], the number of valid positions, which come first.
    kernel: "pallas" (TPU) or "triton" (GPU). On CPU both are interpreted.

  Returns:
    The same as `partial_attention` with the equivalent mask, except that a slot of length 0 has
    weight_sum 0.
  """
  heads = None if model.config.kv_heads % axis_size(model.mesh, "kv_heads") else "kv_heads"
  by_heads = partition_spec(("batch", None, heads))
  interpret = model.mesh.devices.flat[0].platform == "cpu"
  return jax.shard_map(
    functools.partial(local_ragged_attention, kernel=kernel, interpret=interpret),
    mesh=model.mesh,
    in_specs=(by_heads, jax.tree.map(lambda _: by_heads, kv), partition_spec(("batch",))),
    out_specs=PartialAttention(by_heads, by_heads, by_heads),
    check_vma=False,
  )(q, kv, lengths)


def local_ragged_attention(
  q: jax.Array, kv: KV, lengths: jax.Array, kernel: str, interpret: bool
) -> PartialAttention:
  """Runs `ragged_attention` on one device's slots and heads."""
  s, _, h, _, e = q.shape
  kv_heads = kv.v.shape[2]
  r = h // kv_heads
  rows = -(-r // QUERY_ROWS) * QUERY_ROWS
  queries = (q * e**-0.5).reshape(s, kv_heads, r, e)
  queries = jnp.pad(queries, [(0, 0), (0, 0), (0, rows - r), (0, 0)])
  arrays = [queries, kv.k[:, 0], kv.v[:, 0]]
  if kv.k_scale is not None:
    arrays += [kv.k_scale[:, 0], kv.v_scale[:, 0]]
  run = {"pallas": _run_tpu_kernel, "triton": _run_gpu_kernel}[kernel]
  weighted_values, max_score, weight_sum = run(lengths, arrays, interpret)
  unpad = lambda x: x[:, :, :r].reshape(s, 1, h, 1, -1)
  return PartialAttention(
    unpad(weighted_values), unpad(max_score[..., :1]), unpad(weight_sum[..., :1])
  )


def _run_tpu_kernel(
  lengths: jax.Array, arrays: list[jax.Array], interpret: bool
) -> list[jax.Array]:
  """Runs the TPU kernel on a grid of (slot, block of positions).

  Args:
    lengths: i32[s].
    arrays: queries [s, k, rows, e], padded from r to `rows` per head, keys [s, k, e, w] and values
      [s, k, w, e]; for int8 also the scales of keys and values f32[s, k, w].
    interpret: whether to interpret the kernel.

  Returns:
    weighted_values f32[s, k, rows, e]; max_score and weight_sum f32[s, k, rows, LANES], with
    the same value in every lane.
  """
  s, heads, rows, e = arrays[0].shape
  w = arrays[1].shape[-1]
  block = next(size for size in TPU_BLOCKS if w % size == 0)

  def last_needed(i: jax.Array, j: jax.Array, lengths: jax.Array) -> jax.Array:
    # Blocks past the slot's end repeat the last needed block, which is not fetched again.
    return jnp.minimum(j, jnp.maximum(pl.cdiv(lengths[i], block) - 1, 0))

  per_slot = lambda *shape: pl.BlockSpec((1, *shape), lambda i, j, lengths: (i, *[0] * len(shape)))
  key_spec = pl.BlockSpec(
    (1, heads, e, block), lambda i, j, lengths: (i, 0, 0, last_needed(i, j, lengths))
  )
  value_spec = pl.BlockSpec(
    (1, heads, block, e), lambda i, j, lengths: (i, 0, last_needed(i, j, lengths), 0)
  )
  scale_spec = pl.BlockSpec(
    (1, heads, block), lambda i, j, lengths: (i, 0, last_needed(i, j, lengths))
  )
  scale_specs = [scale_spec] * (len(arrays) - 3)
  out_shape = lambda last: jax.ShapeDtypeStruct((s, heads, rows, last), jnp.float32)
  return pl.pallas_call(
    functools.partial(_tpu_kernel, block=block),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(s, w // block),
      in_specs=[per_slot(heads, rows, e), key_spec, value_spec, *scale_specs],
      out_specs=[per_slot(heads, rows, last) for last in (e, LANES, LANES)],
    ),
    out_shape=[out_shape(e), out_shape(LANES), out_shape(LANES)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=interpret,
  )(lengths, *arrays)


def _tpu_kernel(lengths, q, k, v, *rest, block: int) -> None:
  """Adds one block of positions to the softmax of one slot.

  The running maximum, sum and weighted values are kept in the outputs: all grid steps of a slot map
  to the same output block.
  """
  *scales, weighted_values, max_score, weight_sum = rest
  i = pl.program_id(0)
  j = pl.program_id(1)

  @pl.when(j == 0)
  def _() -> None:
    weighted_values[...] = jnp.zeros_like(weighted_values)
    weight_sum[...] = jnp.zeros_like(weight_sum)
    max_score[...] = jnp.full_like(max_score, MASKED)

  @pl.when(j * block < lengths[i])
  def _() -> None:
    for head in range(q.shape[1]):
      queries = q[0, head]
      scores = jnp.dot(
        queries, k[0, head].astype(queries.dtype), preferred_element_type=jnp.float32
      )
      if scales:
        scores *= scales[0][0, head][None]
      position = j * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
      scores = jnp.where(position < lengths[i], scores, MASKED)
      old_max = max_score[0, head][:, :1]
      new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
      weights = jnp.exp(scores - new_max)
      decay = jnp.exp(old_max - new_max)
      weight_sum[0, head] = jnp.broadcast_to(
        weight_sum[0, head][:, :1] * decay + weights.sum(-1, keepdims=True), weight_sum.shape[2:]
      )
      max_score[0, head] = jnp.broadcast_to(new_max, max_score.shape[2:])
      if scales:
        weights *= scales[1][0, head][None]
      values = v[0, head].astype(queries.dtype)
      weighted_values[0, head] = weighted_values[0, head] * decay + jnp.dot(
        weights.astype(queries.dtype), values, preferred_element_type=jnp.float32
      )


def _run_gpu_kernel(
  lengths: jax.Array, arrays: list[jax.Array], interpret: bool
) -> list[jax.Array]:
  """Runs the GPU kernel on a grid of (slot, head), which loops over the slot's valid positions.

  Args:
    lengths: i32[s].
    arrays: as for `_run_tpu_kernel`.
    interpret: whether to interpret the kernel.

  Returns:
    weighted_values f32[s, k, rows, e]; max_score and weight_sum f32[s, k, rows, 1].
  """
  s, heads, rows, e = arrays[0].shape
  per_head = lambda x: pl.BlockSpec(
    (None, None, *x.shape[2:]), lambda i, j: (i, j, *[0] * (x.ndim - 2))
  )
  out = [jax.ShapeDtypeStruct((s, heads, rows, last), jnp.float32) for last in (e, 1, 1)]
  return pl.pallas_call(
    _gpu_kernel,
    grid=(s, heads),
    in_specs=[pl.BlockSpec((1,), lambda i, j: (i,)), *map(per_head, arrays)],
    out_specs=list(map(per_head, out)),
    out_shape=out,
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )(lengths, *arrays)


def _gpu_kernel(lengths, q, k, v, *rest) -> None:
  """Computes one head of one slot, GPU_BLOCK positions at a time, up to the slot's length."""
  *scales, weighted_values, max_score, weight_sum = rest
  queries = q[...]
  end = lengths[0]
  rows, e = queries.shape

  def add_block(
    j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    old_max, old_sum, old_values = carry
    at = pl.ds(j * GPU_BLOCK, GPU_BLOCK)
    valid = (j * GPU_BLOCK + jnp.arange(GPU_BLOCK) < end)[None]
    scores = jnp.dot(queries, k[:, at].astype(queries.dtype), preferred_element_type=jnp.float32)
    if scales:
      scores *= scales[0][at][None]
    scores = jnp.where(valid, scores, MASKED)
    new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - new_max)
    decay = jnp.exp(old_max - new_max)
    new_sum = old_sum * decay + weights.sum(-1, keepdims=True)
    if scales:
      weights *= scales[1][at][None]
    block_values = jnp.dot(
      weights.astype(queries.dtype),
      v[at, :].astype(queries.dtype),
      preferred_element_type=jnp.float32,
    )
    return new_max, new_sum, old_values * decay + block_values

  empty = (
    jnp.full((rows, 1), MASKED, jnp.float32),
    jnp.zeros((rows, 1), jnp.float32),
    jnp.zeros((rows, e), jnp.float32),
  )
  blocks = pl.cdiv(end, GPU_BLOCK)
  max_score[...], weight_sum[...], weighted_values[...] = jax.lax.fori_loop(
    0, blocks, add_block, empty
  )
