"""Attention over full sequences with cuDNN's flash kernel, on GPU.

cuDNN treats a mask as a bias of [s, s], but skips the padding of rows whose lengths it knows. Each
completion therefore gets a row of its own that starts with the real tokens of its prompt: causal
masking and a length per row then suffice, whether completions share rows elsewhere or not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.sources import AttentionContext, RowRanges

# Rows are padded to a multiple of this many positions. The kernel refuses odd lengths in training,
# and computes tiles of at least 64 positions in any case.
ROW_MULTIPLE = 64


def attend_with_cudnn(
  q: jax.Array, context: AttentionContext, implementation: str = "cudnn"
) -> jax.Array:
  """Softmax attention of `q` over `context`, in 16 bits.

  Args:
    q: [n, w, h, s, e].
    context: the keys, values and masks.
    implementation: passed to `jax.nn.dot_product_attention`.

  Returns:
    [n, w, h, s, e] in q's dtype; 0 on padding.
  """
  n, w, h, s, e = q.shape
  ranges = _one_range_per_row(context, w) if context.ranges is None else context.ranges
  prompt_lengths = jnp.zeros((n,), jnp.int32)
  prompt_positions = 0
  if context.prompt is not None:
    prompt_lengths = context.prompt_mask[:, 0].sum(-1)
    prompt_positions = context.prompt.v.shape[3] - 1  # the last token is the completion's input
  length = _round_up(prompt_positions + s, ROW_MULTIPLE)
  to_rows, from_rows = _range_indices(ranges, prompt_lengths, length)

  flat = lambda x: jnp.moveaxis(x, 2, 3).reshape(n, -1, x.shape[2], e)  # [n, positions, heads, e]
  queries, keys, values = (
    _move(flat(x), to_rows, from_rows).reshape(n, -1, length, x.shape[2], e)
    for x in (q, jnp.swapaxes(context.own.k, -1, -2), context.own.v)
  )
  if context.prompt is not None:
    # Prompts are padded on the left. Row positions and prompt positions differ by the padding.
    offset = (prompt_positions - prompt_lengths)[:, None]
    to_start = _valid(jnp.arange(length) + offset, prompt_positions)
    from_start = _valid(jnp.arange(prompt_positions) - offset, length)
    at_start = lambda x: _move(flat(x[..., :-1, :]), to_start, from_start)[:, None]
    keys += at_start(jnp.swapaxes(context.prompt.k, -1, -2))
    values += at_start(context.prompt.v)
  rows = lambda x: x.reshape(-1, *x.shape[2:])
  lengths = (prompt_lengths[:, None] + ranges.length).reshape(-1)
  attended = jax.nn.dot_product_attention(
    rows(queries),
    rows(keys),
    rows(values),
    is_causal=True,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    implementation=implementation,
  )
  out = _move(attended.reshape(n, -1, h, e), from_rows, to_rows)
  return jnp.moveaxis(out.reshape(n, w, s, h, e), 3, 2)


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
def _move(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
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


def _move_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple]:
  return _move(x, index, inverse), (index, inverse)


def _move_backward(indices: tuple, d_out: jax.Array) -> tuple[jax.Array, None, None]:
  index, inverse = indices
  return _move(d_out, inverse, index), None, None


_move.defvjp(_move_forward, _move_backward)


def _valid(index: jax.Array, size: int) -> jax.Array:
  """Returns `index` where it is within 0 .. size - 1, else -1."""
  return jnp.where((index >= 0) & (index < size), index, -1)


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
