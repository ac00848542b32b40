"""Keys and values while sampling: prompts in seats, completions in slots, and what a query of a slot sees of both.

Slots and seats are split over the batch axes of the mesh. Everything that moves between a slot and its prompt's seat moves within one
shard, so that no device waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention import KV, PartialAttention, Source, join, look
from gtpo_jax.models.presets import DTYPES
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.mesh import axis_size, batch_shards, constrain, named_sharding
from gtpo_jax.sampling.ragged import look_back


class PromptCache(NamedTuple):
  """Prompts that have been read; their last token is at position p-1."""

  kv: list[KV]  # per layer, p positions of m rows
  hidden: jax.Array  # [m, 1, 1, d], predicts the first token of a completion
  seen: jax.Array | None  # bool[m, v], the prompt's tokens; None where no sampler asks


class SlotCache(NamedTuple):
  """Completions on their way, the first token at position 0."""

  kv: list[KV]  # per layer, w positions of s rows
  hidden: jax.Array  # [s, 1, 1, d], predicts the next token
  seen: jax.Array | None  # bool[s, v], tokens of prompt and completion


def empty(
  model: Qwen2, rows: int, length: int, dtype: str, seen: bool
) -> tuple[list[KV], jax.Array, jax.Array | None]:
  """The fields of `PromptCache` or `Slots`, zeroed: `rows` of them with `length` positions, kept as `dtype`."""
  c = model.config
  kind = jnp.int8 if dtype == "int8" else DTYPES[dtype]
  scale = jnp.zeros((rows, 1, c.kv_heads, length), jnp.float32) if dtype == "int8" else None
  shape = rows, 1, c.kv_heads
  kv = KV(
    jnp.zeros((*shape, c.head_dim, length), kind),
    jnp.zeros((*shape, length, c.head_dim), kind),
    scale,
    scale,
  )
  return (
    [_placed(model, kv) for _ in range(c.layers)],
    constrain(jnp.zeros((rows, 1, 1, c.width), DTYPES[c.compute_dtype]), model.mesh, "batch"),
    constrain(jnp.zeros((rows, c.vocab_size), bool), model.mesh, "batch") if seen else None,
  )


def abstract(
  model: Qwen2, rows: int, length: int, dtype: str, seen: bool
) -> tuple[list[KV], jax.Array, jax.Array | None]:
  """The shapes and shardings of what `empty` gives, with nothing allocated."""
  place = lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=named_sharding(model.mesh, *_axes(model, x))
  )
  return jax.tree.map(place, jax.eval_shape(lambda: empty(model, rows, length, dtype, seen)))


def kept_as(kv: KV, like: KV) -> KV:
  """Keys and values in the type of a cache; int8 with one scale a head and position."""
  if like.k_scale is None:
    return KV(kv.k.astype(like.k.dtype), kv.v.astype(like.v.dtype))
  (k, k_scale) = _quantised(kv.k, -2)
  (v, v_scale) = _quantised(kv.v, -1)
  return KV(k, v, k_scale, v_scale)


def take_seats(
  model: Qwen2,
  prompt_cache: PromptCache,
  kv: list[KV],
  hidden: jax.Array,
  seen: jax.Array | None,
  at: jax.Array,
) -> PromptCache:
  """Puts newly read prompts, [b, ...], into the seats `at` i32[shards, b / shards] within their shards; past the last seat is nowhere."""
  put = lambda all_, new: within_shards(
    model, lambda all_, new, at: all_.at[at].set(new, mode="drop"), all_, new, at.reshape(-1)
  )
  layers = [
    _placed(model, jax.tree.map(put, old, kept_as(new, old)))
    for old, new in zip(prompt_cache.kv, kv, strict=True)
  ]
  return PromptCache(
    layers,
    put(prompt_cache.hidden, hidden),
    None if prompt_cache.seen is None else put(prompt_cache.seen, seen),
  )


def write_back(model: Qwen2, caches: list[KV], chunk: list[KV], start: jax.Array) -> list[KV]:
  """Writes a chunk's keys and values into the slots' caches, from position `start` i32[s] on."""

  def write(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    put = lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis - 1)
    return within_shards(model, jax.vmap(put), old, new, start)

  return [
    _placed(model, jax.tree.map(write, old, kept_as(new, old), positions(old)))
    for old, new in zip(caches, chunk, strict=True)
  ]


def positions(kv: KV) -> KV:
  """Which axis of each of its arrays counts the positions."""
  return KV(4, 3, *(None if scale is None else 3 for scale in kv[2:]))


def longer(model: Qwen2, slots: SlotCache, width: int) -> SlotCache:
  """The slots with room for `width` positions each."""
  pad = lambda x, at: jnp.pad(
    x, [(0, width - x.shape[at] if axis == at else 0) for axis in range(x.ndim)]
  )
  return slots._replace(
    kv=[_placed(model, jax.tree.map(pad, kv, positions(kv))) for kv in slots.kv]
  )


def fewer(model: Qwen2, slots: SlotCache, order: jax.Array) -> SlotCache:
  """Only the slots `order` i32[shards, s' / shards] of each shard."""
  keep = lambda x: within_shards(model, lambda x, at: x[at], x, order.reshape(-1))
  return SlotCache(
    [_placed(model, jax.tree.map(keep, kv)) for kv in slots.kv],
    *jax.tree.map(keep, (slots.hidden, slots.seen)),
  )


@dataclasses.dataclass(frozen=True)
class View:
  """Where each slot looks during one chunk: its prompt's seat, what it wrote before the chunk, what it wrote since."""

  model: Qwen2
  prompt_cache: list[KV]  # per layer, p positions of m rows
  past: list[KV]  # per layer, w positions of s rows
  place: jax.Array  # i32[s], seat * rows + row within the shard
  slot: jax.Array  # i32[m, rows], the slot of each row, within the shard
  seated: jax.Array  # bool[m, 1, 1, p]
  written: jax.Array  # i32[s], how many of the past positions there are
  attention: str  # "xla", "pallas" or "triton", see `Limits`

  def attend(
    self, chunk: list[KV], step: jax.Array
  ) -> Callable[[int, jax.Array, KV], tuple[jax.Array, KV]]:
    """The `attend` of `decode_step` at position `step` i32[] of the chunk; what is kept of each layer is the chunk with it written."""
    precision = self.model.config.matmul_precision
    so_far = (jnp.arange(chunk[0].v.shape[3]) <= step)[None, None, None]

    def attend(layer: int, q: jax.Array, new: KV) -> tuple[jax.Array, KV]:
      old = chunk[layer]
      write = lambda old, fresh, axis: jax.lax.dynamic_update_slice_in_dim(old, fresh, step, axis)
      written = jax.tree.map(write, old, new, positions(old))
      parts = [
        self._prompt(q, layer, precision),
        self._past(q, layer, precision),
        look(q, Source(written, so_far), precision),
      ]
      return join(parts).astype(q.dtype), written

    return attend

  def _past(self, q: jax.Array, layer: int, precision: str) -> PartialAttention:
    if self.attention != "xla":
      return look_back(self.model, q, self.past[layer], self.written, self.attention)
    past = self.past[layer]
    return look(
      q,
      Source(past, (jnp.arange(past.v.shape[3]) < self.written[:, None])[:, None, None]),
      precision,
    )

  def _prompt(self, q: jax.Array, layer: int, precision: str) -> PartialAttention:
    """What each slot's queries see of their prompt. The queries go to the seat and what they saw comes back: a prompt's keys and values
    are read once for all the slots that look at it."""
    m, rows = self.slot.shape
    at_seats = within_shards(
      self.model, lambda x, at: x[at], q[:, 0], self.slot.reshape(-1)
    ).reshape(m, rows, *q.shape[2:])
    seen = look(at_seats, Source(self.prompt_cache[layer], self.seated), precision)
    back = lambda x: within_shards(
      self.model, lambda x, at: x[at], x.reshape(m * rows, *x.shape[2:]), self.place
    )[:, None]
    return PartialAttention(*map(back, seen))


def within_shards(
  model: Qwen2, function: Callable[..., jax.Array], *arrays: jax.Array
) -> jax.Array:
  """Applies `function` to each shard's part of the arrays [shards * n, ...], and puts the results together."""
  shards = batch_shards(model.mesh)
  if shards == 1:
    return function(*arrays)
  rows = lambda x: constrain(x, model.mesh, "batch", *[...] * (x.ndim - 1))
  out = jax.vmap(function)(*(rows(x.reshape(shards, -1, *x.shape[1:])) for x in arrays))
  return rows(out.reshape(-1, *out.shape[2:]))


def _placed(model: Qwen2, kv: KV) -> KV:
  """Laid out over the mesh: rows over the batch axes, heads over the tensor axis where they divide."""
  return jax.tree.map(lambda x: constrain(x, model.mesh, *_axes(model, x)), kv)


def _axes(model: Qwen2, x: jax.Array) -> tuple[str | None, ...]:
  """How one array of a cache lies: [rows, 1, k, ...] for keys, values and scales; [rows, v] and [rows, 1, 1, d] for the rest."""
  split = (
    x.ndim > 2 and x.shape[2] > 1 and not model.config.kv_heads % axis_size(model.mesh, "kv_heads")
  )
  return ("batch", None, "kv_heads") if split else ("batch",)


def _quantised(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
  """x as int8 and f32 scales, x ~ int8 * scale, the largest along `axis` at 127."""
  scale = jnp.abs(x).max(axis, keepdims=True).astype(jnp.float32) / 127
  rounded = jnp.round(x.astype(jnp.float32) / jnp.where(scale > 0, scale, 1))
  return rounded.astype(jnp.int8), scale.squeeze(axis)
