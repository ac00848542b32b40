"""Moves completions to rows of their own, for kernels that cannot compute them where they are.

A row begins with the real tokens of the completion's prompt, so that masks follow from positions in
the row, whether completions share rows elsewhere or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.sources import AttentionContext, RowRanges


class OwnRows(NamedTuple):
  """Sequences in rows of their own; 0 on padding, which only follows them."""

  queries: jax.Array  # [n, g, length, h, e]
  keys: jax.Array  # [n, g, length, k, e]
  values: jax.Array  # [n, g, length, k, e]
  lengths: jax.Array  # i32[n, g]
  # [n, g, length, h, e] -> [n, w, h, s, e], moves attention outputs to where the queries were
  move_back: Callable[[jax.Array], jax.Array]


def in_own_rows(q: jax.Array, context: AttentionContext, multiple: int) -> OwnRows:
  """Moves each completion, or each sequence without one, to a row of its own.

  Args:
    q: [n, w, h, s, e].
    context: the keys, values and masks.
    multiple: the rows' length is a multiple of it.
  """
  n, w, h, s, e = q.shape
  ranges = _one_range_per_row(context, w) if context.ranges is None else context.ranges
  prompt_lengths = jnp.zeros((n,), jnp.int32)
  prompt_positions = 0
  if context.prompt is not None:
    prompt_lengths = context.prompt_mask[:, 0].sum(-1)
    prompt_positions = context.prompt.v.shape[3] - 1  # the last token is the completion's input
  length = -(-(prompt_positions + s) // multiple) * multiple
  to_rows, from_rows = _range_indices(ranges, prompt_lengths, length)

  flat = lambda x: jnp.moveaxis(x, 2, 3).reshape(n, -1, x.shape[2], e)  # [n, positions, heads, e]
  queries, keys, values = (
    move(flat(x), to_rows, from_rows).reshape(n, -1, length, x.shape[2], e)
    for x in (q, jnp.swapaxes(context.own.k, -1, -2), context.own.v)
  )
  if context.prompt is not None:
    # Prompts are padded on the left. Row positions and prompt positions differ by the padding.
    offset = (prompt_positions - prompt_lengths)[:, None]
    to_start = _valid(jnp.arange(length) + offset, prompt_positions)
    from_start = _valid(jnp.arange(prompt_positions) - offset, length)
    at_start = lambda x: move(flat(x[..., :-1, :]), to_start, from_start)[:, None]
    keys += at_start(jnp.swapaxes(context.prompt.k, -1, -2))
    values += at_start(context.prompt.v)

  def move_back(attended: jax.Array) -> jax.Array:
    out = move(attended.reshape(n, -1, h, e), from_rows, to_rows)
    return jnp.moveaxis(out.reshape(n, w, s, h, e), 3, 2)

  return OwnRows(queries, keys, values, prompt_lengths[:, None] + ranges.length, move_back)


def _one_range_per_row(context: AttentionContext, w: int) -> RowRanges:
  """Returns the ranges of rows that are one sequence each: the real tokens of `own_mask`."""
  n, *_, s, _ = context.own.v.shape
  first = jnp.zeros((n, w), jnp.int32)
  length = jnp.full((n, w), s, jnp.int32)
  row = jnp.broadcast_to(jnp.arange(w), (n, w))
  owner = jnp.broadcast_to(row[..., None], (n, w, s))
  if context.own_mask is not None:
    mask = jnp.broadcast_to(context.own_mask, (n, w, s))
    first = mask.argmax(-1)
    length = mask.sum(-1, dtype=jnp.int32)
    owner = jnp.where(mask, owner, -1)
  return RowRanges(row * s + first, length, owner)


def _range_indices(
  ranges: RowRanges, prompt_lengths: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
  """Returns where each position of the kernel's rows comes from, and where each position goes.

  Args:
    ranges: g completions in rows [n, w, s].
    prompt_lengths: i32[n], the positions before a completion in its row for the kernel.
    length: the positions of a row for the kernel.

  Returns:
    i32[n, g length], indices into [w s], and i32[n, w s], indices into [g length]; -1 where there
    is nothing.
  """
  n, g = ranges.start.shape
  offset = jnp.arange(length) - prompt_lengths[:, None, None]  # [n, 1, length]
  inside = (offset >= 0) & (offset < ranges.length[..., None])
  to_rows = jnp.where(inside, ranges.start[..., None] + offset, -1)
  owner = ranges.owner.reshape(n, -1)
  of_owner = lambda x: jnp.take_along_axis(x, jnp.maximum(owner, 0), axis=1)
  within = jnp.arange(owner.shape[1]) - of_owner(ranges.start)
  position = jnp.maximum(owner, 0) * length + prompt_lengths[:, None] + within
  from_rows = jnp.where(owner < 0, -1, position)
  return to_rows.reshape(n, g * length), from_rows


@jax.custom_vjp
def move(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
  """Moves positions: out[:, i] = x[:, index[:, i]], and 0 where the index is -1.

  No position is moved twice, so the gradient moves back along `inverse`. A general gather would
  scatter its gradient, which a GPU adds up in no fixed order.

  Args:
    x: [n, a, ...].
    index: i32[n, b], in -1 .. a - 1.
    inverse: i32[n, a], in -1 .. b - 1, the inverse of `index`.

  Returns:
    [n, b, ...].
  """
  expand = lambda index: index.reshape(*index.shape, *[1] * (x.ndim - 2))
  moved = jnp.take_along_axis(x, expand(jnp.maximum(index, 0)), axis=1)
  return jnp.where(expand(index) < 0, jnp.zeros((), x.dtype), moved)


def _move_backward(indices: tuple, d_out: jax.Array) -> tuple[jax.Array, None, None]:
  index, inverse = indices
  return move(d_out, inverse, index), None, None


move.defvjp(lambda x, index, inverse: (move(x, index, inverse), (index, inverse)), _move_backward)


def _valid(index: jax.Array, size: int) -> jax.Array:
  """Returns `index` where it is within 0 .. size - 1, else -1."""
  return jnp.where((index >= 0) & (index < size), index, -1)
