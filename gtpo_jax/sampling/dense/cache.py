"""The dense cache: an array for the prompts and one for the slots, for XLA's attention.

A CPU reads its arrays without a copy. The slots' arrays grow with the longest running completion.
In shapes, p is the length of the prompts' arrays, and w of the slots'.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.rope import rotate_new
from gtpo_jax.models.attention.sources import (
  KV,
  MaskedKV,
  PartialAttention,
  merge_partials,
  partial_attention,
)
from gtpo_jax.models.attention.streams import Ropes, rope_of
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.sampling.cache import (
  CachedAttention,
  Part,
  computed_zeros,
  constrain_kv,
  from_position,
  gather_rows,
  position_axes,
  quantise,
  take_rows,
  within_shards,
)
from gtpo_jax.sampling.dense.tables import DenseTables


class DenseKV(NamedTuple):
  """Keys and values, per layer with attention."""

  prompts: list[KV]  # [m, 1, k, ...] with p positions; a prompt's last token is at p - 1
  slots: list[KV]  # [s, 1, k, ...] with w positions; a completion's first token is at 0


@dataclasses.dataclass(frozen=True)
class DenseCache:
  """The device functions of the dense cache; see `Cache`."""

  model: Transformer  # the architecture, on the sampling mesh
  dtype: str  # format of keys and values: float32, bfloat16, float16 or int8

  def zeros(self, rows: int, positions: int) -> list[KV]:
    """Returns zeroed keys and values of `rows` rows over all shards, per layer."""
    c = self.model.config
    dtype = jnp.int8 if self.dtype == "int8" else DTYPES[self.dtype]
    scale = None
    if self.dtype == "int8":
      scale = jnp.zeros((rows, 1, c.kv_heads, positions), jnp.float32)
    kv = KV(
      jnp.zeros((rows, 1, c.kv_heads, c.head_dim, positions), dtype),
      jnp.zeros((rows, 1, c.kv_heads, positions, c.head_dim), dtype),
      scale,
      scale,
    )
    return [constrain_kv(self.model, kv) for _ in c.attention_kinds]

  def part(self, kv: DenseKV, name: Part) -> list[KV]:
    """Returns the prompts' arrays, or the slots'."""
    return getattr(kv, name)

  def with_part(self, kv: DenseKV, name: Part, part: list[KV]) -> DenseKV:
    """Returns `kv` with other arrays of the prompts or slots."""
    return kv._replace(**{name: part})

  def insert(self, prompts: list[KV], new: list[KV], source: jax.Array) -> list[KV]:
    """Writes prompts of up to p positions into entries.

    They end at the last position. What precedes them is not read (`DenseTables.entry_lengths`).

    Args:
      prompts: the keys and values.
      new: of the prompts, padded on the left.
      source: i32[shards, entries of a shard], the prompt that each entry gets; below 0, none.
    """

    def insert(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
      new = pad_axis(new, axis, old.shape[axis], at_end=False)
      return take_rows(self.model, old, new, source.reshape(-1))

    return [self._changed(insert, old, new) for old, new in zip(prompts, new, strict=True)]

  def insert_completions(
    self, slots: list[KV], new: list[KV], places: tuple[jax.Array, jax.Array]
  ) -> list[KV]:
    """Writes the completions of b sequences into slots, from position 0 on.

    Args:
      slots: the keys and values.
      new: of the sequences, padded on the left.
      places: the sequence that each slot gets, i32[shards, slots of a shard], below 0 for none; and
        i32[shards, b / shards], the position of each completion's first token.
    """
    source, first = places

    def insert(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
      w = old.shape[axis]
      new = jax.lax.slice_in_dim(new, 0, min(w, new.shape[axis]), axis=axis)
      return take_rows(self.model, old, pad_axis(new, axis, w), source.reshape(-1))

    return [
      self._changed(insert, old, from_position(self.model, new, first))
      for old, new in zip(slots, new, strict=True)
    ]

  def _changed(self, change: Callable[..., jax.Array], old: KV, new: KV) -> KV:
    """Returns change(old, new, position axis) for each array, with `new` in the cache's format."""
    return constrain_kv(self.model, jax.tree.map(change, old, _cast(new, old), position_axes(old)))

  def zero_chunk(self, slots: int, positions: int) -> list[KV]:
    """Returns a zeroed buffer for a chunk, per layer [s, 1, k, ...]."""
    return computed_zeros(self.model, slots, positions)

  def attention(
    self, kv: DenseKV, tables: DenseTables, generated: jax.Array, ropes: Ropes
  ) -> CachedAttention:
    """Returns how slots attend to their prompts, their generated positions and the chunk."""
    p = kv.prompts[0].v.shape[3]
    w = kv.slots[0].v.shape[3]
    prompt_mask = (jnp.arange(p) >= p - tables.entry_lengths[:, None])[:, None, None]
    slot_mask = (jnp.arange(w) < generated[:, None])[:, None, None]
    kinds = self.model.config.attention_kinds
    precision = self.model.config.matmul_precision
    own_mask = jnp.ones((1, 1, 1, 1), bool)

    def attend(
      layer: int, q: jax.Array, new: KV, chunk: KV, step: jax.Array
    ) -> tuple[jax.Array, KV]:
      kind = kinds[layer]
      q, new = rotate_new(q, new, rope_of(kind, ropes), step)
      # The new position is a source of its own: if the chunk were read after it is written, XLA
      # would copy the chunk once more.
      chunk_mask = (jnp.arange(chunk.v.shape[3]) < step)[None, None, None]
      masks = (prompt_mask, slot_mask, chunk_mask)
      if kind.window:
        masks = self._within_window(masks, tables, generated, step, kind.window)
      parts = [
        _attend_prompts(self.model, q, MaskedKV(kv.prompts[layer], masks[0]), tables),
        partial_attention(q, MaskedKV(kv.slots[layer], masks[1]), precision),
        partial_attention(q, MaskedKV(chunk, masks[2]), precision),
        partial_attention(q, MaskedKV(new, own_mask), precision),
      ]
      write = lambda old, new, axis: jax.lax.dynamic_update_slice_in_dim(old, new, step, axis)
      chunk = jax.tree.map(write, chunk, new, position_axes(chunk))
      return merge_partials(parts).astype(q.dtype), chunk

    return attend

  def _within_window(
    self,
    masks: tuple[jax.Array, jax.Array, jax.Array],
    tables: DenseTables,
    generated: jax.Array,
    step: jax.Array,
    window: int,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Masks what is `window` positions or more before the new one, of prompts, slots and chunk."""
    place = generated + step  # i32[s], of the new position in its completion
    seen = lambda size, place: jnp.arange(size) > place - window
    prompts, slots, chunk = (mask.shape[-1] for mask in masks)
    of_slots = gather_rows(self.model, place, tables.slot_table.reshape(-1))
    after_prompt = prompts + of_slots.reshape(*tables.slot_table.shape, 1, 1)
    return (
      masks[0] & seen(prompts, after_prompt),
      masks[1] & seen(slots, place[:, None, None, None]),
      masks[2] & seen(chunk, step),
    )

  def append(
    self, kv: DenseKV, chunk: list[KV], tables: DenseTables, generated: jax.Array
  ) -> DenseKV:
    """Writes a chunk's keys and values into the slots' arrays, from `generated` on."""
    on_cpu = self.model.mesh.devices.flat[0].platform == "cpu"

    def append(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
      # For an update at an offset of each row, XLA converts arrays of 16-bit floats on a CPU.
      write = _select_positions if on_cpu and old.dtype.itemsize == 2 else _update_positions
      return within_shards(self.model, functools.partial(write, axis), old, new, generated)

    slots = [self._changed(append, old, new) for old, new in zip(kv.slots, chunk, strict=True)]
    return kv._replace(slots=slots)


def _attend_prompts(
  model: Transformer, q: jax.Array, prompts: MaskedKV, tables: DenseTables
) -> PartialAttention:
  """Attends to each slot's prompt, with the queries of all its slots together."""
  m, slots_per_entry = tables.slot_table.shape
  at_entries = gather_rows(model, q[:, 0], tables.slot_table.reshape(-1))
  at_entries = at_entries.reshape(m, slots_per_entry, *q.shape[2:])
  partial = partial_attention(at_entries, prompts, model.config.matmul_precision)

  def to_slots(x: jax.Array) -> jax.Array:
    flat = x.reshape(m * slots_per_entry, *x.shape[2:])
    return gather_rows(model, flat, tables.table_index)[:, None]

  return PartialAttention(*map(to_slots, partial))


def pad_axis(x: jax.Array, axis: int, length: int, at_end: bool = True) -> jax.Array:
  """Pads an axis of `x` to `length`."""
  missing = length - x.shape[axis]
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, missing) if at_end else (missing, 0)
  return jnp.pad(x, widths)


def _update_positions(axis: int, old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Returns `old` with `new` from position `start` i32[rows] of each row on."""
  update = lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis - 1)
  return jax.vmap(update)(old, new, start)


def _select_positions(axis: int, old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Does what `_update_positions` does by choosing for each position; nothing is past the end."""
  source = jnp.arange(old.shape[axis]) - start[:, None]
  source = source.reshape(len(old), *(-1 if i == axis else 1 for i in range(1, old.ndim)))
  is_new = (source >= 0) & (source < new.shape[axis])
  taken = jnp.take_along_axis(new, jnp.clip(source, 0, new.shape[axis] - 1), axis)
  return jnp.where(is_new, taken, old)


def _cast(kv: KV, like: KV) -> KV:
  """Converts keys and values to the dtype of `like`; int8 has one scale per head and position."""
  if like.k_scale is None:
    return KV(kv.k.astype(like.k.dtype), kv.v.astype(like.v.dtype))
  k, k_scale = quantise(kv.k, -2)
  v, v_scale = quantise(kv.v, -1)
  return KV(k, v, k_scale, v_scale)
