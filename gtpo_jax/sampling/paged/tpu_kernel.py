"""The TPU kernel of paged attention.

Queries and results of all slots are in on-chip memory. Pages are copied to it block by block, the
next block while the current one is used. The kernel goes through all rows in one step of its grid
(one for each core), because a step takes a third of a microsecond whatever it does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gtpo_jax.models.attention.sources import MASKED
from gtpo_jax.sampling.paged.tables import PageRows, Pages

LANES = 128  # the width of a TPU vector register
SUBLANES = 8  # the r queries of a key/value head are padded to a multiple of this number of rows
BLOCK = 512  # positions per block: as many pages as that are copied together
VMEM_SPARE = 8 * 2**20  # bytes of on-chip memory for the compiler's own use


def attend_on_tpu(
  q: jax.Array,
  pages: Pages,
  chunk: jax.Array,
  prompts: PageRows,
  completions: PageRows,
  running: PageRows,
  behind: jax.Array | None,
  *,
  interpret: bool,
  cores: int,
) -> jax.Array:
  """Runs the kernel on one device's slots, pages and heads; every core has a part of the heads.

  The arguments are as in `attention.local_attention`.

  Args:
    behind: i32[s], the first position of each slot's window, counted from the end of its prompt;
      rows start at the first one of their slots. None if there are no windows.
  """
  s, _, h, _, e = q.shape
  _, kv_heads, page, features = pages.kv.shape
  r = h // kv_heads
  height = -(-r // SUBLANES) * SUBLANES
  # Where keys and values share a vector register, the query is 0 at the value's features, and the
  # result is taken from these.
  split = e % LANES == 0
  width = e if split else features
  queries = (q * e**-0.5).reshape(s, kv_heads, r, e).astype(jnp.float32)
  queries = jnp.pad(queries, [(0, 0), (0, 0), (0, height - r), (0, width - e)])
  splits = cores if kv_heads % cores == 0 else 1
  heads = kv_heads // splits
  most_pages = max(prompts.pages.shape[1], completions.pages.shape[1])
  block_pages = max(min(BLOCK // page, most_pages), 1)
  wide = prompts.slots.shape[1]
  sources = [pages.kv] if pages.scale is None else [pages.kv, pages.scale]
  if not interpret:
    # Only the pages in use are read. Without the constraint, the compiler may first copy the
    # complete pool to on-chip memory.
    sources = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sources]
  sources = [*sources, chunk]
  scalars = [x.reshape(-1) for x in (*prompts, *completions, *running)]
  scalars += [] if behind is None else [behind]
  of_slots = pl.BlockSpec((s, heads, height, width), lambda i, *_: (0, i, 0, 0))
  scratch, scratch_bytes = _scratch(sources, s, heads, height, wide, width, block_pages)
  buffered_twice = 4 * s * heads * height * 4 * width  # queries and results
  out = pl.pallas_call(
    functools.partial(
      _kernel,
      wide=wide,
      sources=len(sources),
      dtype=q.dtype,
      split=split,
      windowed=behind is not None,
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(splits,),
      in_specs=[of_slots, *[pl.BlockSpec(memory_space=pl.ANY)] * len(sources)],
      out_specs=of_slots,
      scratch_shapes=scratch,
    ),
    out_shape=jax.ShapeDtypeStruct((s, kv_heads, height, width), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",),
      vmem_limit_bytes=buffered_twice + scratch_bytes + VMEM_SPARE,
    ),
    interpret=interpret,
    name="paged_attention",
  )(*scalars, queries, *sources)
  return out[:, :, :r, width - e :].reshape(q.shape).astype(q.dtype)


def _scratch(
  sources: list[jax.Array], s: int, heads: int, height: int, wide: int, width: int, block_pages: int
) -> tuple[list[Any], int]:
  """Returns the arrays that the kernel has in on-chip memory, and a bound of their bytes.

  Args:
    sources: the pages, their scales if any, and the chunk.
    s: slots.
    heads: key/value heads of one core.
    height: rows of queries per head.
    wide: the most slots that share a prompt's row.
    width: features of a query.
    block_pages: pages per block.
  """
  counts = [block_pages] * (len(sources) - 1) + [1]
  buffers = [
    pltpu.VMEM((2, count, heads, *x.shape[2:]), x.dtype)
    for x, count in zip(sources, counts, strict=True)
  ]
  float32 = lambda rows, last: pltpu.VMEM((*rows, last), jnp.float32)
  running = [float32((s, heads, height), last) for last in (width, LANES)]
  tile = [float32((heads, wide * height), last) for last in (width, width, LANES, LANES)]
  in_slots = 4 * s * heads * height * (width + LANES)
  in_tile = 4 * heads * wide * height * 2 * (width + LANES)
  copied = sum(2 * block_pages * heads * 4 * math.prod(x.shape[2:]) for x in sources)
  semaphores = pltpu.SemaphoreType.DMA((2, len(buffers)))
  return [*buffers, *running, semaphores, *tile], in_slots + 2 * in_tile + copied


class _Refs(NamedTuple):
  """The arrays that the kernel uses for every row, of the heads of one core."""

  q: Any  # f32[s, k, r, e], queries, with r padded
  values: Any  # f32[s, k, r, e], the running softmax of each slot: its weighted values,
  statistics: Any  # f32[s, k, r, LANES], and in two lanes the maximum and the sum of its weights
  tile: tuple  # the row's queries, weighted values, maxima and sums, f32[k, w * r, ...]


class _Copies(NamedTuple):
  """Where pages are copied from and to."""

  first_head: Any  # i32[], of the heads of this core
  sources: tuple  # [pages, k, page, 2e], and scales if any, in the device's main memory
  buffers: tuple  # [2, pages, k, ...], the blocks in use and on their way, one for each source
  semaphores: tuple  # [2] for each source


def _kernel(*refs, wide: int, sources: int, dtype: jnp.dtype, split: bool, windowed: bool) -> None:
  """Goes through the rows of prompts, completions and chunks, for one part of the heads."""
  at = iter(refs)
  take = lambda count: tuple(itertools.islice(at, count))
  prompts, completions, running = (PageRows(*take(len(PageRows._fields))) for _ in range(3))
  behind = next(at) if windowed else None
  q = next(at)
  arrays = take(sources)
  out = next(at)
  buffers = take(sources)
  values, statistics, semaphores = take(3)
  refs = _Refs(q, values, statistics, tuple(at))
  semaphores = [semaphores.at[:, i] for i in range(sources)]
  first_head = pl.program_id(0) * q.shape[1]
  in_pages = _Copies(first_head, arrays[:-1], buffers[:-1], tuple(semaphores[:-1]))
  in_chunks = _Copies(first_head, arrays[-1:], buffers[-1:], tuple(semaphores[-1:]))
  lane = jax.lax.broadcasted_iota(jnp.int32, statistics.shape, 3)
  values[...] = jnp.zeros_like(values)
  statistics[...] = jnp.where(lane == 0, MASKED, 0.0)
  _Attention(prompts, wide, refs, in_pages, dtype, split, windowed, behind).attend_rows()
  _Attention(completions, 1, refs, in_pages, dtype, split, windowed).attend_rows()
  _Attention(running, 1, refs, in_chunks, dtype, split, windowed).attend_rows()
  total = statistics[..., 1:2]
  out[...] = values[...] / jnp.where(total > 0, total, 1.0)


@dataclasses.dataclass(frozen=True)
class _Attention:
  """Adds the attention over `rows` of w slots each to the slots' running softmax."""

  rows: PageRows
  w: int
  refs: _Refs
  copies: _Copies
  dtype: jnp.dtype
  split: bool  # whether keys and values have vector registers of their own
  windowed: bool  # whether rows may start after their first page
  # i32[s], the first position of each slot's window, counted from the end of the row; None if every
  # slot's is that of its row.
  behind: Any = None

  @property
  def block_pages(self) -> int:
    """Pages per block."""
    return self.copies.buffers[0].shape[1]

  @property
  def page(self) -> int:
    """Positions per page."""
    return self.copies.buffers[0].shape[3]

  @property
  def tile(self) -> list[Any]:
    """The row's queries, weighted values, maxima and sums of weights, f32[k, w * r, ...]."""
    return [ref.at[:, : self.w * self.refs.q.shape[2]] for ref in self.refs.tile]

  def attend_rows(self) -> None:
    """Goes through all rows; the next block is copied while one is used."""
    count = self.rows.count[0]

    @pl.when(count > 0)
    def _() -> None:
      first = jnp.int32(self._first_block(jnp.int32(0)))
      self._for_each_page(jnp.int32(0), first, jnp.int32(0), lambda copy: copy.start())

    jax.lax.fori_loop(0, count, self._attend_row, jnp.int32(0))

  def _first_block(self, row: jax.Array) -> int | jax.Array:
    """Returns the first block of a row with a position in use; its last one if there is none."""
    if not self.windowed:
      return 0
    block = self.block_pages * self.page
    return jnp.minimum(
      jax.lax.div(self.rows.start[row], block), pl.cdiv(self.rows.end[row], block) - 1
    )

  def _for_each_page(self, row: jax.Array, j: jax.Array, buffer: jax.Array, use: Any) -> None:
    """Calls `use` with the copy of each page of block j of a row, into `buffer` (0 or 1)."""
    rows = self.rows
    first_head, *copies = self.copies
    heads = self.refs.q.shape[1]
    most_pages = rows.pages.shape[0] // rows.start.shape[0]
    for i in range(self.block_pages):
      index = j * self.block_pages + i

      is_used = index * self.page < rows.end[row]
      if self.windowed:
        is_used &= (index + 1) * self.page > rows.start[row]

      @pl.when(is_used)
      def _(i=i, index=index) -> None:
        name = rows.pages[row * most_pages + index]
        for source, to, semaphore in zip(*copies, strict=True):
          part = source.at[name, pl.ds(first_head, heads)]
          use(pltpu.make_async_copy(part, to.at[buffer, i], semaphore.at[buffer]))

  def _attend_row(self, row: jax.Array, buffer: jax.Array) -> jax.Array:
    """Attends over one row, whose first block is being copied; returns the next buffer."""
    rows = self.rows
    _, values, statistics, _ = self.refs
    height = self.refs.q.shape[2]
    queries, sums, maxima, weights_sum = self.tile
    blocks = pl.cdiv(rows.end[row], self.block_pages * self.page)
    for i in range(self.w):
      slot = rows.slots[row * self.w + i]
      at = pl.ds(i * height, height)
      queries[:, at] = self.refs.q[slot]
      sums[:, at] = values[slot]
      old = statistics[slot]
      maxima[:, at] = jnp.broadcast_to(old[..., :1], old.shape)
      weights_sum[:, at] = jnp.broadcast_to(old[..., 1:2], old.shape)

    def next_block(j: jax.Array, buffer: jax.Array) -> jax.Array:
      is_last = j + 1 == blocks
      next_row = jnp.where(is_last, row + 1, row)

      @pl.when(next_row < rows.count[0])
      def _() -> None:
        following = jnp.where(is_last, self._first_block(next_row), j + 1)
        self._for_each_page(next_row, following, 1 - buffer, lambda copy: copy.start())

      self._for_each_page(row, j, buffer, lambda copy: copy.wait())
      self._attend_block(row, j, buffer)
      return 1 - buffer

    buffer = jax.lax.fori_loop(self._first_block(row), blocks, next_block, buffer)
    for i in range(self.w):
      slot = rows.slots[row * self.w + i]
      at = pl.ds(i * height, height)
      values[slot] = sums[:, at]
      lane = jax.lax.broadcasted_iota(jnp.int32, statistics.shape[1:], 2)
      statistics[slot] = jnp.where(lane == 0, maxima[:, at], weights_sum[:, at])
    return buffer

  def _attend_block(self, row: jax.Array, j: jax.Array, buffer: jax.Array) -> None:
    """Attends over block j of a row, which is in `buffer`."""
    start = self.rows.start[row]
    end = self.rows.end[row]
    kv = self.copies.buffers[0]
    block = self.block_pages * self.page
    is_valid = lambda position: (position >= start) & (position < end)

    @pl.when((j * block < start) | ((j + 1) * block > end))
    def _() -> None:
      # What lies between valid positions may be of other completions, or not a number.
      shape = (self.block_pages, 1, self.page, 1)
      position = (
        j * block
        + jax.lax.broadcasted_iota(jnp.int32, shape, 0) * self.page
        + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
      )
      kv[buffer] = jnp.where(is_valid(position), kv[buffer], jnp.zeros((), kv.dtype))

    shape = (self.w * self.refs.q.shape[2], block)
    position = j * block + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    valid = is_valid(position)
    if self.behind is not None:
      member = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 0), shape[0] // self.w)
      for i in range(self.w):
        begin = end + self.behind[self.rows.slots[row * self.w + i]]
        valid &= (member != i) | (position >= begin)
    for head in range(kv.shape[2]):
      self._attend_head(head, buffer, valid)

  def _attend_head(self, head: int, buffer: jax.Array, valid: jax.Array) -> None:
    """Attends over the block in `buffer` with one head; `valid` is bool[w * r, block]."""
    queries, sums, maxima, weights_sum = self.tile
    kv, *scales = self.copies.buffers
    features = kv.shape[-1]
    both = kv[buffer, :, head].reshape(-1, features).astype(self.dtype)
    k, v = (both[:, : features // 2], both[:, features // 2 :]) if self.split else (both, both)
    scale_of = lambda which: jnp.concatenate(
      [scales[0][buffer, i, head, which : which + 1, :] for i in range(self.block_pages)], axis=1
    )
    scores = jax.lax.dot_general(
      queries[head].astype(self.dtype),
      k,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    if scales:
      scores *= scale_of(0)
    scores = jnp.where(valid, scores, MASKED)
    old_max = maxima[head][:, :1]
    new_max = jnp.maximum(old_max, scores.max(-1, keepdims=True))
    weights = jnp.where(valid, jnp.exp(scores - new_max), 0.0)
    decay = jnp.exp(old_max - new_max)
    new_sum = weights_sum[head][:, :1] * decay + weights.sum(-1, keepdims=True)
    weights_sum[head] = jnp.broadcast_to(new_sum, weights_sum.shape[1:])
    maxima[head] = jnp.broadcast_to(new_max, maxima.shape[1:])
    if scales:
      weights = jnp.where(valid, weights * scale_of(1), 0.0)
    product = jnp.dot(weights.astype(self.dtype), v, preferred_element_type=jnp.float32)
    sums[head] = sums[head] * decay + product
