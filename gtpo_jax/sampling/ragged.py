"""What queries see of their own cache, by kernels (one for TPU, one for GPU) that read each slot's live positions and no more."""

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

LANES = 128  # positions come in multiples of it
BLOCKS = (512, 256, 128)  # positions read at once: the largest that divides the cache
GPU_BLOCK = 64  # the same on GPU; it divides LANES
ROWS = 16  # queries of a head are filled up to a multiple of it: one bfloat16 tile on TPU, the least of a matrix unit on GPU


def look_back(
  model: Qwen2, q: jax.Array, kv: KV, written: jax.Array, attention: str
) -> PartialAttention:
  """As `look` at the first `written` i32[s] positions of each slot, for one query each, [s, 1, h, 1, e].

  A slot's blocks past its own length are neither fetched nor computed, so that the cost follows the live lengths, not the longest.
  `attention` names the kernel: "pallas", for TPU, or "triton", for GPU. On CPU both are interpreted.
  """
  heads = None if model.config.kv_heads % axis_size(model.mesh, "kv_heads") else "kv_heads"
  whole = partition_spec(("batch", None, heads))
  local = functools.partial(
    look_back_here, attention=attention, interpret=model.mesh.devices.flat[0].platform == "cpu"
  )
  spec = jax.tree.map(lambda _: whole, kv)
  return jax.shard_map(
    local,
    mesh=model.mesh,
    in_specs=(whole, spec, partition_spec(("batch",))),
    out_specs=PartialAttention(whole, whole, whole),
    check_vma=False,
  )(q, kv, written)


def look_back_here(
  q: jax.Array, kv: KV, written: jax.Array, attention: str, interpret: bool
) -> PartialAttention:
  """`look_back` on one device's share."""
  s, _, h, _, e = q.shape
  heads = kv.v.shape[2]
  r = h // heads
  rows = -(-r // ROWS) * ROWS
  queries = jnp.pad((q * e**-0.5).reshape(s, heads, r, e), [(0, 0), (0, 0), (0, rows - r), (0, 0)])
  arrays = [queries, kv.k[:, 0], kv.v[:, 0]]
  if kv.k_scale is not None:
    arrays += [kv.k_scale[:, 0], kv.v_scale[:, 0]]
  mixed, peak, total = {"pallas": _on_tpu, "triton": _on_gpu}[attention](written, arrays, interpret)
  back = lambda x: x[:, :, :r].reshape(s, 1, h, 1, -1)
  return PartialAttention(back(mixed), back(peak[..., :1]), back(total[..., :1]))


def _on_tpu(written: jax.Array, arrays: list[jax.Array], interpret: bool) -> list[jax.Array]:
  """f32[s, k, rows, e], and twice f32[s, k, rows, LANES] of the same number; a block of positions is a step of the grid."""
  s, heads, rows, e = arrays[0].shape
  w = arrays[1].shape[-1]
  block = next(size for size in BLOCKS if w % size == 0)
  # A block past the end names the last live one again, which is then not fetched anew.
  live = lambda i, j, written: jnp.minimum(j, jnp.maximum(pl.cdiv(written[i], block) - 1, 0))
  of_slot = lambda *shape: pl.BlockSpec((1, *shape), lambda i, j, written: (i, *[0] * len(shape)))
  specs = [
    of_slot(heads, rows, e),
    pl.BlockSpec((1, heads, e, block), lambda i, j, written: (i, 0, 0, live(i, j, written))),
    pl.BlockSpec((1, heads, block, e), lambda i, j, written: (i, 0, live(i, j, written), 0)),
  ]
  specs += [pl.BlockSpec((1, heads, block), lambda i, j, written: (i, 0, live(i, j, written)))] * (
    len(arrays) - len(specs)
  )
  number = lambda last: jax.ShapeDtypeStruct((s, heads, rows, last), jnp.float32)
  return pl.pallas_call(
    functools.partial(_tpu_kernel, block=block),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(s, w // block),
      in_specs=specs,
      out_specs=[of_slot(heads, rows, e), of_slot(heads, rows, LANES), of_slot(heads, rows, LANES)],
    ),
    out_shape=[number(e), number(LANES), number(LANES)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=interpret,
  )(written, *arrays)


def _on_gpu(written: jax.Array, arrays: list[jax.Array], interpret: bool) -> list[jax.Array]:
  """f32[s, k, rows, e], and twice f32[s, k, rows, 1]; one program of the grid walks over the live positions of one head of one slot."""
  s, heads, rows, e = arrays[0].shape
  of_head = lambda x: pl.BlockSpec(
    (None, None, *x.shape[2:]), lambda i, j: (i, j, *[0] * (x.ndim - 2))
  )
  out = [jax.ShapeDtypeStruct((s, heads, rows, last), jnp.float32) for last in (e, 1, 1)]
  return pl.pallas_call(
    _gpu_kernel,
    grid=(s, heads),
    in_specs=[pl.BlockSpec((1,), lambda i, j: (i,)), *map(of_head, arrays)],
    out_specs=list(map(of_head, out)),
    out_shape=out,
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )(written, *arrays)


def _gpu_kernel(written, q, k, v, *rest) -> None:
  """One head of one slot, GPU_BLOCK positions at a time, up to what the slot has written."""
  *scales, mixed, peak, total = rest
  queries = q[...]
  end = written[0]
  rows, e = queries.shape

  def look_at(
    j: jax.Array, so_far: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    before, weight, values = so_far
    at = pl.ds(j * GPU_BLOCK, GPU_BLOCK)
    live = (j * GPU_BLOCK + jnp.arange(GPU_BLOCK) < end)[None]
    scores = jnp.dot(queries, k[:, at].astype(queries.dtype), preferred_element_type=jnp.float32)
    if scales:
      scores *= scales[0][at][None]
    scores = jnp.where(live, scores, MASKED)
    now = jnp.maximum(before, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - now)
    fade = jnp.exp(before - now)
    weight = weight * fade + weights.sum(-1, keepdims=True)
    if scales:
      weights *= scales[1][at][None]
    here = jnp.dot(
      weights.astype(queries.dtype),
      v[at, :].astype(queries.dtype),
      preferred_element_type=jnp.float32,
    )
    return now, weight, values * fade + here

  nothing = (
    jnp.full((rows, 1), MASKED, jnp.float32),
    jnp.zeros((rows, 1), jnp.float32),
    jnp.zeros((rows, e), jnp.float32),
  )
  peak[...], total[...], mixed[...] = jax.lax.fori_loop(
    0, pl.cdiv(end, GPU_BLOCK), look_at, nothing
  )


def _tpu_kernel(written, q, k, v, *rest, block: int) -> None:
  """One block of one slot; running maximum, sum and weighted values stay in the outputs, whose block is the slot's."""
  *scales, mixed, peak, total = rest
  i = pl.program_id(0)
  j = pl.program_id(1)

  @pl.when(j == 0)
  def _() -> None:
    mixed[...] = jnp.zeros_like(mixed)
    total[...] = jnp.zeros_like(total)
    peak[...] = jnp.full_like(peak, MASKED)

  @pl.when(j * block < written[i])
  def _() -> None:
    for head in range(q.shape[1]):
      queries = q[0, head]
      scores = jnp.dot(
        queries, k[0, head].astype(queries.dtype), preferred_element_type=jnp.float32
      )
      if scales:
        scores *= scales[0][0, head][None]
      position = j * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
      scores = jnp.where(position < written[i], scores, MASKED)
      before = peak[0, head][:, :1]
      now = jnp.maximum(before, scores.max(-1, keepdims=True))
      weights = jnp.exp(scores - now)
      fade = jnp.exp(before - now)
      total[0, head] = jnp.broadcast_to(
        total[0, head][:, :1] * fade + weights.sum(-1, keepdims=True), total.shape[2:]
      )
      peak[0, head] = jnp.broadcast_to(now, peak.shape[2:])
      if scales:
        weights *= scales[1][0, head][None]
      values = v[0, head].astype(queries.dtype)
      mixed[0, head] = mixed[0, head] * fade + jnp.dot(
        weights.astype(queries.dtype), values, preferred_element_type=jnp.float32
      )
