"""Changes the rows and lengths of a dense cache's arrays between chunks."""

from __future__ import annotations

import jax

from gtpo_jax.models.attention.sources import KV
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.sampling.cache import States, constrain_kv, gather_rows, position_axes, within_shards
from gtpo_jax.sampling.dense.cache import pad_axis


def grow(model: Transformer, slots: list[KV], length: int) -> list[KV]:
  """Pads the slots' arrays to `length` positions."""
  pad = lambda x, axis: pad_axis(x, axis, length)
  return [constrain_kv(model, jax.tree.map(pad, kv, position_axes(kv))) for kv in slots]


def compact(model: Transformer, slots: list[KV], order: jax.Array) -> list[KV]:
  """Keeps the slots `order` i32[shards, kept slots per shard] of each shard, in that order."""
  keep = lambda x: gather_rows(model, x, order.reshape(-1))
  return [constrain_kv(model, jax.tree.map(keep, kv)) for kv in slots]


def refit(
  model: Transformer, kv: list[KV], order: jax.Array, length: int, at_end: bool
) -> list[KV]:
  """Returns the rows `order` i32[shards, rows] of each shard, of `length` positions.

  Args:
    kv: the keys and values.
    order: the rows.
    length: at least as much as is in use.
    at_end: whether what is in use ends at the last position; it begins at the first otherwise.
  """

  def change(x: jax.Array, axis: int) -> jax.Array:
    x = gather_rows(model, x, order.reshape(-1))
    cut = x.shape[axis] - length
    if cut > 0:
      first = cut if at_end else 0
      return jax.lax.slice_in_dim(x, first, first + length, axis=axis)
    return pad_axis(x, axis, length, at_end=not at_end)

  return [constrain_kv(model, jax.tree.map(change, x, position_axes(x))) for x in kv]


def add_entries(
  model: Transformer, prompts: list[KV], states: States, entries: int
) -> tuple[list[KV], States]:
  """Pads the prompts' arrays and states to `entries` per shard."""
  add = lambda x: within_shards(model, lambda x: pad_axis(x, 0, entries), x)
  prompts = [constrain_kv(model, jax.tree.map(add, kv)) for kv in prompts]
  return prompts, jax.tree.map(add, states).constrained(model)
