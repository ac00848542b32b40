"""The GPU kernel of a decode step's attention, for the Triton compiler.

It does all that a layer does between its projections: it rotates queries and keys, writes the new
position into the chunk, and attends to prompt, past and chunk under one softmax. A program of the
grid computes one key/value head of a row of slots that share a prompt. Short kernels in sequence
would cost a launch and a pass through memory each, which takes longer than what they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gtpo_jax.models.attention.sources import MASKED
from gtpo_jax.sampling.paged.tables import NewPosition, Pages, PageTables

BLOCK = 128  # the most positions per block
# The most bytes of a block's keys. Keys and values of a row's slots are in shared memory at once,
# of which some GPUs have 99 KiB.
BLOCK_BYTES = 2**14
SLOTS_PER_ROW = 2  # slots that share a prompt in a program
MIN_ROWS = 16  # rows of the smallest matrix that a tensor core multiplies
WARPS = 4
STAGES = 2


def attend_on_gpu(
  new: NewPosition,
  pages: Pages,
  chunk: jax.Array,
  tables: PageTables,
  *,
  precision: str,
  interpret: bool,
  window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel on one device's slots, pages and heads.

  Args:
    new: the queries, and the keys and values of the same position.
    pages: the layer's pages, of a power of two positions.
    chunk: [s, k, c, 2e], keys and values of the chunk as in a page, c a power of two.
    tables: the rows of each slot.
    precision: of the products, as `ModelConfig.matmul_precision`; float32 is multiplied in
      TF32 unless it is "highest".
    interpret: whether to interpret the kernel.
    window: the most positions that a query attends to, its own included; None for all before it.

  Returns:
    The attention [s, 1, h, 1, e], 0 where a slot is not running; and the chunk with the new
    position.
  """
  s, _, h, _, e = new.q.shape
  k = pages.kv.shape[1]
  prompts, completions = tables.prompts, tables.completions
  # The projections end in one array, which the compiler writes in one pass.
  projected = jnp.concatenate([x.reshape(s, -1, e) for x in (new.q, new.kv.k, new.kv.v)], axis=1)
  angles = [x.reshape(s, -1, e // 2) for x in new.rope or ()]
  sources = [pages.kv] if pages.scale is None else [pages.kv, pages.scale]
  row_of = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, j: (i, *[0] * (x.ndim - 1)))
  whole = lambda x: pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)
  by_row = [prompts.slots, prompts.pages, prompts.start[:, None], prompts.end[:, None]]
  past = [completions.pages, completions.end, tables.completion_rows]
  shared = [*past, new.step.reshape(1), *angles, projected, *sources, chunk]
  inputs = [prompts.count, *by_row, *shared]
  attended, chunk = pl.pallas_call(
    functools.partial(_kernel, precision, window, len(angles)),
    grid=(len(prompts.start), k),
    in_specs=[whole(prompts.count), *map(row_of, by_row), *map(whole, shared)],
    out_specs=[pl.BlockSpec((s, k, h // k, e), lambda i, j: (0, 0, 0, 0)), whole(chunk)],
    out_shape=[
      jax.ShapeDtypeStruct((s, k, h // k, e), new.q.dtype),
      jax.ShapeDtypeStruct(chunk.shape, chunk.dtype),
    ],
    input_output_aliases={len(inputs) - 1: 1},
    compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    interpret=interpret,
    name="paged_attention",
  )(*inputs)
  return attended.reshape(new.q.shape), chunk


class _Softmax(NamedTuple):
  """A running softmax of the queries of a row."""

  max_score: jax.Array  # f32[rows, 1]
  weight_sum: jax.Array  # f32[rows, 1], sum of exp(score - max_score)
  weighted_values: jax.Array  # f32[rows, e], sum of exp(score - max_score) * value


class _Queries(NamedTuple):
  """The queries of a row of slots, with one head of keys and values."""

  q: jax.Array  # [rows, e], rotated and scaled
  member: jax.Array  # i32[rows], the place in the row of each query's slot
  head: jax.Array  # i32[], the key/value head
  multiply: Callable[..., jax.Array]


class _Source(NamedTuple):
  """Keys and values that the slots of a row attend to: the same for all, or each slot its own."""

  kv: Any  # [names, k, positions, 2e]
  scale: list[Any]  # f32[names, k, 2, positions], of int8 keys and values
  name: Callable[[int, jax.Array], jax.Array]  # (member, page) -> the index in `kv`
  starts: list[Any]  # i32[] for each member of the row, or one for all: the first valid position
  ends: list[jax.Array]  # i32[] for each member of the row, or one for all
  begins: Sequence[jax.Array] = ()  # i32[] for each member of one for all, where its window begins


def _kernel(precision: str, window: int | None, angles: int, count, *refs) -> None:
  """Computes one key/value head of one row, or the result of slots that are not running."""
  slots, pages, start, end, past_pages, past_end, past_row, step, *arrays = refs
  cos_sin, arrays = arrays[:angles], arrays[angles:]
  projected, kv, *scale, chunk, attended, chunk_out = arrays
  kv_heads, r, e = attended.shape[1:]
  members = range(slots.shape[0])
  head = pl.program_id(1)
  feature = jnp.arange(e)
  height = max(pl.next_power_of_2(r), MIN_ROWS // len(members))  # queries of a slot, padded
  i = jnp.arange(len(members) * height)
  member = jax.lax.div(i, height)
  query = jax.lax.rem(i, height)[:, None]
  is_query = jnp.broadcast_to(query < r, (len(i), e))
  slot = slots.at[member][...][:, None]
  of_query = attended.at[slot, head, query, feature[None]]

  @pl.when(end[0] < 0)
  def _() -> None:
    triton.store(of_query, jnp.zeros(is_query.shape, attended.dtype), mask=is_query)

  @pl.when(pl.program_id(0) < count[0])
  def _() -> None:
    rotate = functools.partial(_rotate, cos_sin=cos_sin, step=step[0])
    load = lambda i, slot, x: projected.at[slot, i, x][...]
    q = lambda x: triton.load(projected.at[slot, head * r + query, x], mask=is_query, other=0.0)
    k = functools.partial(load, kv_heads * r + head)
    v = functools.partial(load, kv_heads * (r + 1) + head)
    rows = _Queries(
      (rotate(q, slot, feature[None]) * e**-0.5).astype(projected.dtype),
      member,
      head,
      functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32),
    )
    new_k = rotate(functools.partial(k, slot), slot, feature[None])
    new_v = v(slot, feature[None])
    for own in (slots[m] for m in members):
      to = lambda first, own=own: chunk_out.at[own, head, step[0], pl.ds(first, e)]
      to(0)[...] = rotate(functools.partial(k, own), own, feature).astype(chunk.dtype)
      to(e)[...] = v(own, feature).astype(chunk.dtype)

    float32 = lambda x: x.astype(jnp.float32)
    score = (float32(rows.q) * float32(new_k.astype(chunk.dtype))).sum(-1, keepdims=True)
    state = _Softmax(score, jnp.ones_like(score), float32(new_v))
    past = [past_row[slots[m]] for m in members]
    past_ends = [jnp.where(row < 0, 0, past_end[jnp.maximum(row, 0)]) for row in past]
    of_past = lambda m, page: past_pages[jnp.maximum(past[m], 0), page]
    starts, past_starts, chunk_start = [start[0]], [0], 0
    begins = ()
    if window:
      chunk_start = step[0] + 1 - window
      begins = [end[0] + x + chunk_start for x in past_ends]
      starts = [jnp.maximum(start[0], functools.reduce(jnp.minimum, begins))]
      past_starts = [jnp.maximum(x + chunk_start, 0) for x in past_ends]
      chunk_start = jnp.maximum(chunk_start, 0)
    for source in (
      _Source(kv, scale, lambda m, page: pages[page], starts, [end[0]], begins),
      _Source(kv, scale, of_past, past_starts, past_ends),
      _Source(chunk, [], lambda m, page: slots[m], [chunk_start], [step[0] for m in members]),
    ):
      state = _attend(rows, source, state)
    out = (state.weighted_values / state.weight_sum).astype(attended.dtype)
    triton.store(of_query, out, mask=is_query)


def _rotate(
  load: Callable[[jax.Array], jax.Array],
  slot: jax.Array,
  feature: jax.Array,
  *,
  cos_sin: Sequence[Any],
  step: jax.Array,
) -> jax.Array:
  """Returns what `load` reads at the features, rotated by its slot's angles; see `rope.rotate`."""
  e = feature.size
  x = load(feature)
  if not cos_sin:
    return x
  cos, sin = cos_sin
  partner = load(jax.lax.rem(feature + e // 2, e)).astype(jnp.float32)
  angle = jax.lax.rem(feature, e // 2)
  sign = jnp.where(feature < e // 2, -1.0, 1.0)
  cosine = cos.at[slot, step, angle][...]
  sine = sin.at[slot, step, angle][...]
  return (x.astype(jnp.float32) * cosine + partner * (sine * sign)).astype(x.dtype)


def _attend(rows: _Queries, source: _Source, state: _Softmax) -> _Softmax:
  """Adds a source to the softmax, a block of positions at a time."""
  kv, scale, name_of, starts, ends, begins = source
  dtype = rows.q.dtype
  page, features = kv.shape[2:]
  e = features // 2
  block = min(BLOCK, BLOCK_BYTES // (e * max(kv.dtype.itemsize, dtype.itemsize)), page)
  blocks_per_page = page // block
  is_shared = len(ends) == 1
  first = functools.reduce(jnp.minimum, starts)
  last = functools.reduce(jnp.maximum, ends)
  starts = starts * len(ends) if len(starts) == 1 else starts
  if begins:
    of_members = [jnp.where(rows.member == m, x, 0) for m, x in enumerate(begins)]
    begin = functools.reduce(jnp.add, of_members)[:, None]

  def add_block(j: jax.Array, state: _Softmax) -> _Softmax:
    at = pl.ds(jax.lax.rem(j, blocks_per_page) * block, block)
    position = j * block + jnp.arange(block)
    names = [name_of(m, jax.lax.div(j, blocks_per_page)) for m in range(len(ends))]
    valid = [(position >= x) & (position < end) for x, end in zip(starts, ends, strict=True)]
    mine = [
      x[None] if is_shared else x[None] & (rows.member == m)[:, None] for m, x in enumerate(valid)
    ]
    if begins:
      mine = [x & (position[None] >= begin) for x in mine]
    scores = jnp.full((len(rows.q), block), MASKED, jnp.float32)
    for name, at_rows in zip(names, mine, strict=True):
      keys = kv.at[name, rows.head, at, pl.ds(0, e)][...].astype(dtype)
      product = rows.multiply(rows.q, keys.T)
      for x in scale:
        product *= x.at[name, rows.head, 0, at][...][None]
      scores = jnp.where(at_rows, product, scores)
    max_score = jnp.maximum(state.max_score, scores.max(-1, keepdims=True))
    decay = jnp.exp(state.max_score - max_score)
    weights = jnp.exp(scores - max_score)  # 0 where the position is not valid
    weight_sum = state.weight_sum * decay + weights.sum(-1, keepdims=True)
    values = state.weighted_values * decay
    for name, is_valid, at_rows in zip(names, valid, mine, strict=True):
      v = kv.at[name, rows.head, at, pl.ds(e, e)][...].astype(dtype)
      v = jnp.where(is_valid[:, None], v, jnp.zeros_like(v))  # what is not valid may be NaN
      of_member = weights
      for x in scale:
        of_member = of_member * x.at[name, rows.head, 1, at][...][None]
      of_member = jnp.where(at_rows, of_member, 0.0)
      values += rows.multiply(of_member.astype(dtype), v)
    return _Softmax(max_score, weight_sum, values)

  return jax.lax.fori_loop(
    jax.lax.div(jnp.int32(first), block), pl.cdiv(last, block), add_block, state
  )
