"""The paged cache: keys and values in a pool of pages, for the kernels of TPUs and GPUs.

A prompt and each of its completions have pages of their own. Pages are given out and taken back by
the host (`pool.py`), so memory follows the tokens in use, and nothing is copied to grow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.attention.streams import Ropes, rope_of
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import constrain, partition_spec
from gtpo_jax.sampling.cache import CachedAttention, Part, from_position, head_axis, quantise
from gtpo_jax.sampling.paged.attention import paged_attention
from gtpo_jax.sampling.paged.tables import NewPosition, Pages, PageTables

SMALLEST_CHUNK = 16  # positions


@dataclasses.dataclass(frozen=True)
class PagedCache:
  """The device functions of the paged cache; see `Cache`. Its `kv` is one `Pages` per layer with
  attention.
  """

  model: Transformer  # the architecture, on the sampling mesh
  dtype: str  # format of keys and values: float32, bfloat16, float16 or int8
  page: int  # positions of a page
  kernel: str  # "pallas" (TPU) or "triton" (GPU)

  def zeros(self, pages: int) -> list[Pages]:
    """Returns a zeroed pool of `pages` pages over all shards, per layer."""
    c = self.model.config
    is_int8 = self.dtype == "int8"
    shape = (pages, c.kv_heads, self.page, 2 * c.head_dim)
    kv = jnp.zeros(shape, jnp.int8 if is_int8 else DTYPES[self.dtype])
    scale = jnp.zeros((pages, c.kv_heads, 2, self.page), jnp.float32) if is_int8 else None
    axes = ("batch", head_axis(self.model))
    split = lambda x: constrain(x, self.model.mesh, *axes)
    return [jax.tree.map(split, Pages(kv, scale)) for _ in c.attention_kinds]

  def part(self, kv: list[Pages], name: Part) -> list[Pages]:
    """Returns the pool: prompts and completions may be in any page."""
    return kv

  def with_part(self, kv: list[Pages], name: Part, part: list[Pages]) -> list[Pages]:
    """Returns the pool that prompts or completions were written to."""
    return part

  def insert(self, kv: list[Pages], new: list[KV], places: jax.Array) -> list[Pages]:
    """Writes b prompts of p positions into the pages `places` i32[shards, b / shards, p / page].

    Pages past the pool's last one are dropped.
    """

    def insert(pages: Pages, new: KV, places: jax.Array) -> Pages:
      rows = self._in_format(_side_by_side(new))

      def set_pages(pool: jax.Array, x: jax.Array, axis: int) -> jax.Array:
        return pool.at[places.reshape(-1)].set(
          _split_positions(x, axis, self.page), mode="drop", unique_indices=True
        )

      return _map_pages(set_pages, pages, rows)

    return [
      self._within_shards(insert, pages, layer, places)
      for pages, layer in zip(kv, new, strict=True)
    ]

  def insert_completions(
    self, kv: list[Pages], new: list[KV], places: tuple[jax.Array, jax.Array]
  ) -> list[Pages]:
    """Writes the completions of b sequences of p positions into pages.

    Args:
      kv: the pool, per layer.
      new: of the sequences, padded on the left.
      places: the pages i32[shards, b / shards, p / page] of each completion, and the position
        i32[shards, b / shards] of its first token. Pages past the pool's last one are dropped.
    """
    pages, first = places
    return self.insert(kv, [from_position(self.model, layer, first) for layer in new], pages)

  def zero_chunk(self, slots: int, positions: int) -> list[jax.Array]:
    """Returns a zeroed buffer for a chunk, per layer [s, k, c, 2e] with at least `positions`."""
    c = self.model.config
    positions = max(pl.next_power_of_2(positions), SMALLEST_CHUNK)  # as the GPU kernel needs it
    buffer = jnp.zeros((slots, c.kv_heads, positions, 2 * c.head_dim), DTYPES[c.compute_dtype])
    buffer = constrain(buffer, self.model.mesh, "batch", head_axis(self.model))
    return [buffer] * len(c.attention_kinds)

  def attention(
    self, kv: list[Pages], tables: PageTables, generated: jax.Array, ropes: Ropes
  ) -> CachedAttention:
    """Returns how slots attend to their prompts, their generated positions and the chunk."""

    def attend(
      layer: int, q: jax.Array, new: KV, chunk: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      kind = self.model.config.attention_kinds[layer]
      position = NewPosition(q, new, rope_of(kind, ropes), step)
      return paged_attention(
        self.model, position, kv[layer], chunk, tables, self.kernel, kind.window
      )

    return attend

  def append(
    self, kv: list[Pages], chunk: list[jax.Array], tables: PageTables, generated: jax.Array
  ) -> list[Pages]:
    """Writes a chunk's keys and values into the slots' pages, from `generated` on.

    The pages that a chunk touches are read, changed and written as a whole. A matrix product with
    zeros and ones moves the new positions to their place, which no serial loop over slots does.
    """

    def append(pages: Pages, new: jax.Array, written: jax.Array, generated: jax.Array) -> Pages:
      rows = self._in_format(new)
      s, touched = written.shape
      c = new.shape[2]
      source = jnp.arange(touched * self.page) - jax.lax.rem(generated, self.page)[:, None]
      is_new = ((source >= 0) & (source < c)).reshape(s * touched, 1, self.page, 1)

      def write(pool: jax.Array, x: jax.Array, axis: int) -> jax.Array:
        # Integers up to 127 are exact in bfloat16.
        dtype = jnp.bfloat16 if x.dtype == jnp.int8 else x.dtype
        at = (source[:, :, None] == jnp.arange(c)).astype(dtype)
        subscripts = "stc,skcf->sktf" if axis == 2 else "stc,skfc->skft"
        moved = jnp.einsum(subscripts, at, x.astype(dtype), precision="highest").astype(x.dtype)
        placed = _split_positions(moved, axis, self.page)
        old = pool.at[written.reshape(-1)].get(mode="clip")
        mask = is_new if axis == 2 else jnp.swapaxes(is_new, 2, 3)
        return pool.at[written.reshape(-1)].set(
          jnp.where(mask, placed, old), mode="drop", unique_indices=True
        )

      return _map_pages(write, pages, rows)

    appended: list[Pages] = []
    written = tables.written
    for pages, layer in zip(kv, chunk, strict=True):
      if appended:  # one layer after another, so that only one has its pages in temporaries
        layer, written, _ = jax.lax.optimization_barrier(
          (layer, written, appended[-1].kv[:1, 0, 0])
        )
      appended.append(self._within_shards(append, pages, layer, written, generated))
    return appended

  def _in_format(self, both: jax.Array) -> Pages:
    """Returns keys and values [b, k, positions, 2e] in the cache's format."""
    if self.dtype != "int8":
      return Pages(both.astype(DTYPES[self.dtype]), None)
    (k, k_scale), (v, v_scale) = (quantise(x, -1) for x in jnp.split(both, 2, -1))
    return Pages(jnp.concatenate([k, v], -1), jnp.stack([k_scale, v_scale], 2))

  def _within_shards(self, function: Any, pages: Pages, kv: Any, *tables: Any) -> Pages:
    """Applies `function` to each device's pages, rows and heads."""
    heads = head_axis(self.model)
    by_heads = partition_spec(("batch", None, heads) if isinstance(kv, KV) else ("batch", heads))
    of_pages = jax.tree.map(lambda _: partition_spec(("batch", heads)), pages)
    return jax.shard_map(
      function,
      mesh=self.model.mesh,
      in_specs=(
        of_pages,
        jax.tree.map(lambda _: by_heads, kv),
        *[partition_spec(("batch",))] * len(tables),
      ),
      out_specs=of_pages,
      check_vma=False,
    )(pages, kv, *tables)


def _side_by_side(kv: KV) -> jax.Array:
  """Returns keys and values [b, 1, k, ...] as one array [b, k, positions, 2e]."""
  return jnp.concatenate([jnp.swapaxes(kv.k[:, 0], -1, -2), kv.v[:, 0]], -1)


def _map_pages(function: Any, pages: Pages, rows: Pages) -> Pages:
  """Applies `function` to the pool, the rows and their position axis: of values, then of scales."""
  scale = None if pages.scale is None else function(pages.scale, rows.scale, 3)
  return Pages(function(pages.kv, rows.kv, 2), scale)


def _split_positions(x: jax.Array, axis: int, page: int) -> jax.Array:
  """Splits the positions of `x` [b, k, ...] into pages, [b * pages, k, ...]."""
  shape = x.shape
  x = x.reshape(*shape[:axis], shape[axis] // page, page, *shape[axis + 1 :])
  x = jnp.moveaxis(x, axis, 1)
  return x.reshape(-1, *x.shape[2:])
