"""The key/value caches of sampling: one for the prompts, one for the tokens that slots generate.

Slots and prompt cache entries are split over the batch axes of the mesh. Data moves between a slot
and its prompt's entry only within one shard, so that no device waits for another.

In shapes of `gtpo_jax.sampling`, s is the number of slots, m the number of prompt cache entries, w
the positions of a slot's cache and c the positions of a chunk. The other letters are those of
`gtpo_jax.arrays`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention import KV
from gtpo_jax.models.config import DTYPES
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain, named_sharding

INT8_MAX = 127


class PromptCache(NamedTuple):
  """Prefilled prompts, one per entry. The last token of each is at position p - 1."""

  kv: list[KV]  # per layer, [m, 1, k, ...] with p positions
  hidden: jax.Array  # [m, 1, 1, d], the states that predict the first token
  seen_tokens: (
    jax.Array | None
  )  # bool[m, v], the prompt's tokens; None if there is no repetition penalty


class SlotCache(NamedTuple):
  """Running completions, one per slot. The first token of each is at position 0."""

  kv: list[KV]  # per layer, [s, 1, k, ...] with w positions
  hidden: jax.Array  # [s, 1, 1, d], the states that predict the next token
  seen_tokens: jax.Array | None  # bool[s, v], tokens of prompt and completion, or None


CacheFields = tuple[list[KV], jax.Array, jax.Array | None]


def init_cache(model: Qwen2, rows: int, length: int, dtype: str, track_tokens: bool) -> CacheFields:
  """Returns the fields of a zeroed `PromptCache` or `SlotCache`.

  Args:
    model: the architecture, on the sampling mesh.
    rows: number of entries or slots, over all shards.
    length: positions per row.
    dtype: format of keys and values: float32, bfloat16, float16 or int8.
    track_tokens: whether to allocate `seen_tokens`.
  """
  c = model.config
  kv_dtype = jnp.int8 if dtype == "int8" else DTYPES[dtype]
  scale = jnp.zeros((rows, 1, c.kv_heads, length), jnp.float32) if dtype == "int8" else None
  kv = KV(
    jnp.zeros((rows, 1, c.kv_heads, c.head_dim, length), kv_dtype),
    jnp.zeros((rows, 1, c.kv_heads, length, c.head_dim), kv_dtype),
    scale,
    scale,
  )
  hidden = jnp.zeros((rows, 1, 1, c.width), DTYPES[c.compute_dtype])
  seen_tokens = None
  if track_tokens:
    seen_tokens = constrain(jnp.zeros((rows, c.vocab_size), bool), model.mesh, "batch")
  return (
    [_constrain_kv(model, kv) for _ in range(c.layers)],
    constrain(hidden, model.mesh, "batch"),
    seen_tokens,
  )


def abstract_cache(
  model: Qwen2, rows: int, length: int, dtype: str, track_tokens: bool
) -> CacheFields:
  """Returns the shapes and shardings of `init_cache` without allocating anything."""

  def with_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = named_sharding(model.mesh, *_logical_axes(model, x))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  shapes = jax.eval_shape(lambda: init_cache(model, rows, length, dtype, track_tokens))
  return jax.tree.map(with_sharding, shapes)


def insert_prompts(
  model: Qwen2,
  prompt_cache: PromptCache,
  kv: list[KV],
  hidden: jax.Array,
  seen_tokens: jax.Array | None,
  entries: jax.Array,
) -> PromptCache:
  """Writes b newly prefilled prompts into the prompt cache.

  Args:
    model: the architecture.
    prompt_cache: the cache to update.
    kv: per layer, [b, 1, k, ...] with p positions.
    hidden: [b, 1, 1, d].
    seen_tokens: bool[b, v] or None, as in the cache.
    entries: i32[shards, b / shards], each prompt's entry within its shard. A row with a number past
      the last entry is dropped.
  """
  set_rows = lambda old, new, at: old.at[at].set(new, mode="drop")
  insert = lambda old, new: within_shards(model, set_rows, old, new, entries.reshape(-1))
  layers = [
    _constrain_kv(model, jax.tree.map(insert, old, cast_kv(new, old)))
    for old, new in zip(prompt_cache.kv, kv, strict=True)
  ]
  return PromptCache(
    layers,
    insert(prompt_cache.hidden, hidden),
    None if prompt_cache.seen_tokens is None else insert(prompt_cache.seen_tokens, seen_tokens),
  )


def append_chunk(model: Qwen2, caches: list[KV], chunk: list[KV], start: jax.Array) -> list[KV]:
  """Writes a chunk's keys and values into the slots' caches, from positions `start` i32[s] on."""

  def append(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    update = lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis - 1)
    return within_shards(model, jax.vmap(update), old, new, start)

  return [
    _constrain_kv(model, jax.tree.map(append, old, cast_kv(new, old), position_axes(old)))
    for old, new in zip(caches, chunk, strict=True)
  ]


def grow(model: Qwen2, slots: SlotCache, length: int) -> SlotCache:
  """Pads the slots' caches to `length` positions."""

  def pad(x: jax.Array, position_axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[position_axis] = (0, length - x.shape[position_axis])
    return jnp.pad(x, widths)

  kv = [_constrain_kv(model, jax.tree.map(pad, kv, position_axes(kv))) for kv in slots.kv]
  return slots._replace(kv=kv)


def compact(model: Qwen2, slots: SlotCache, order: jax.Array) -> SlotCache:
  """Keeps only the slots `order` i32[shards, kept slots per shard] of each shard, in that order."""
  keep = lambda x: gather_rows(model, x, order.reshape(-1))
  kv = [_constrain_kv(model, jax.tree.map(keep, kv)) for kv in slots.kv]
  return SlotCache(kv, *jax.tree.map(keep, (slots.hidden, slots.seen_tokens)))


def cast_kv(kv: KV, like: KV) -> KV:
  """Converts keys and values to the dtype of `like`; int8 has one scale per head and position."""
  if like.k_scale is None:
    return KV(kv.k.astype(like.k.dtype), kv.v.astype(like.v.dtype))
  k, k_scale = _quantise(kv.k, -2)
  v, v_scale = _quantise(kv.v, -1)
  return KV(k, v, k_scale, v_scale)


def position_axes(kv: KV) -> KV:
  """Returns the index of the position axis of each array."""
  return KV(4, 3, *(None if scale is None else 3 for scale in kv[2:]))


def gather_rows(model: Qwen2, x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the rows of `x` at `index` i32[...], whose numbers are counted within each shard."""
  return within_shards(model, lambda x, index: x[index], x, index)


def within_shards(
  model: Qwen2, function: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
  """Applies `function` to each shard's rows of the arrays and concatenates the results."""
  shards = batch_shards(model.mesh)
  if shards == 1:
    return function(*arrays)
  split = lambda x: constrain(x, model.mesh, "batch", *[...] * (x.ndim - 1))
  out = jax.vmap(function)(*(split(x.reshape(shards, -1, *x.shape[1:])) for x in arrays))
  return split(out.reshape(-1, *out.shape[2:]))


def _constrain_kv(model: Qwen2, kv: KV) -> KV:
  """Shards rows over the batch axes, and heads over the tensor axis if it divides their number."""
  return jax.tree.map(lambda x: constrain(x, model.mesh, *_logical_axes(model, x)), kv)


def _logical_axes(model: Qwen2, x: jax.Array) -> tuple[str | None, ...]:
  """Returns the logical axes of one cache array.

  Keys, values and scales are [rows, 1, k, ...]; the other arrays are [rows, v] and [rows, 1, 1, d].
  """
  has_heads = x.ndim > 2 and x.shape[2] > 1
  divisible = model.config.kv_heads % axis_size(model.mesh, "kv_heads") == 0
  return ("batch", None, "kv_heads") if has_heads and divisible else ("batch",)


def _quantise(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
  """Returns int8 values and f32 scales with x ~ int8 * scale.

  The value of largest magnitude along `axis` becomes +-127.
  """
  scale = jnp.abs(x).max(axis, keepdims=True).astype(jnp.float32) / INT8_MAX
  rounded = jnp.round(x.astype(jnp.float32) / jnp.where(scale > 0, scale, 1))
  return rounded.astype(jnp.int8), scale.squeeze(axis)
