"""The GPU kernel of paged attention, for the Triton compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gtpo_jax.models.attention.sources import MASKED, PartialAttention
from gtpo_jax.sampling.paged.tables import PageRows, Pages

BLOCK = 64  # the most positions per block
MIN_ROWS = 16  # rows of the smallest matrix that a tensor core multiplies


def attend_rows_on_gpu(
  q: jax.Array, pages: Pages, rows: PageRows, precision: str, interpret: bool
) -> PartialAttention:
  """Runs the kernel on a grid of (row, head).

  Args:
    q: queries [s, 1, h, 1, e].
    pages: pages of a power of two positions.
    rows: the rows; a slot is in at most one of them.
    precision: that of the products, as `ModelConfig.matmul_precision`; float32 is multiplied in
      TF32 unless it is "highest".
    interpret: whether to interpret the kernel.

  Returns:
    The attention of each slot to its row, to be merged with that to other rows. The weight_sum of a
    slot is 0 where no row names it.
  """
  s, _, h, _, e = q.shape
  kv_heads = pages.kv.shape[1]
  r = h // kv_heads
  w = rows.slots.shape[1]
  height = max(pl.next_power_of_2(r), -(-MIN_ROWS // w))
  queries = (q * e**-0.5).reshape(s, kv_heads, r, e)
  queries = jnp.pad(queries, [(0, 0), (0, 0), (0, height - r), (0, 0)])
  whole = lambda x: pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)
  per_row = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, j: (i, *[0] * (x.ndim - 1)))
  one = pl.BlockSpec((1,), lambda i, j: (i,))
  arrays = [queries, pages.kv] + ([] if pages.scale is None else [pages.scale])
  out = [jax.ShapeDtypeStruct((s, kv_heads, height, last), jnp.float32) for last in (e, 1, 1)]
  weighted_values, max_score, weight_sum = pl.pallas_call(
    functools.partial(_kernel, precision),
    grid=(len(rows.start), kv_heads),
    in_specs=[
      whole(rows.count),
      per_row(rows.slots),
      per_row(rows.pages),
      one,
      one,
      *map(whole, arrays),
    ],
    out_specs=list(map(whole, out)),
    out_shape=out,
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="paged_attention",
  )(*rows, *arrays)
  in_use = jnp.arange(len(rows.start)) < rows.count
  named = jnp.zeros(s, bool).at[rows.slots].max(in_use[:, None])
  unpad = lambda x: x[:, :, :r].reshape(s, 1, h, 1, -1)
  only_named = lambda x, other: jnp.where(named[:, None, None, None, None], unpad(x), other)
  return PartialAttention(
    only_named(weighted_values, 0.0), only_named(max_score, MASKED), only_named(weight_sum, 0.0)
  )


def _kernel(precision: str, count, slots, pages, start, end, q, kv, *rest) -> None:
  """Computes one head of one row, a block of positions at a time."""
  *scales, weighted_values, max_score, weight_sum = rest
  head = pl.program_id(1)
  _, _, page, features = kv.shape
  e = features // 2
  w = slots.shape[0]
  height = q.shape[2]
  block = min(BLOCK, page)
  blocks_per_page = jnp.int32(page // block)
  multiply = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

  @pl.when(pl.program_id(0) < count[0])
  def _() -> None:
    members = slots[...]
    queries = q[members, head].reshape(w * height, e)

    def add_block(
      j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
      old_max, old_sum, old_values = carry
      name = pages[jax.lax.div(j, blocks_per_page)]
      at = pl.ds(jax.lax.rem(j, blocks_per_page) * block, block)
      position = j * block + jnp.arange(block)
      valid = (position >= start[0]) & (position < end[0])
      k = kv[name, head, at, pl.ds(0, e)].astype(queries.dtype)
      v = kv[name, head, at, pl.ds(e, e)].astype(queries.dtype)
      v = jnp.where(valid[:, None], v, jnp.zeros_like(v))
      scores = multiply(queries, k.T)
      if scales:
        scores *= scales[0][name, head, 0, at][None]
      scores = jnp.where(valid[None], scores, MASKED)
      new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
      weights = jnp.where(valid[None], jnp.exp(scores - new_max), 0.0)
      decay = jnp.exp(old_max - new_max)
      new_sum = old_sum * decay + weights.sum(-1, keepdims=True)
      if scales:
        weights = jnp.where(valid[None], weights * scales[0][name, head, 1, at][None], 0.0)
      block_values = multiply(weights.astype(queries.dtype), v)
      return new_max, new_sum, old_values * decay + block_values

    empty = (
      jnp.full((w * height, 1), MASKED, jnp.float32),
      jnp.zeros((w * height, 1), jnp.float32),
      jnp.zeros((w * height, e), jnp.float32),
    )
    end_max, end_sum, end_values = jax.lax.fori_loop(0, pl.cdiv(end[0], block), add_block, empty)
    max_score[members, head] = end_max.reshape(w, height, 1)
    weight_sum[members, head] = end_sum.reshape(w, height, 1)
    weighted_values[members, head] = end_values.reshape(w, height, e)
