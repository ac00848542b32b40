"""What is learned from: groups with contrast, and tokens at which the policy forks."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)


def informative(correct: Array, alive: Array, guided: Array | None = None) -> Array:
  """Which groups carry signal, bool[n]: somebody was right, and one of the policy's own completions was wrong.

  Without a guide that is 0 < n < G. With one, a group that the policy solves throughout is dropped, and a group that it fails
  throughout is kept where the guide was right.

  Args:
    correct: bool[n, g].
    alive: bool[n, g], completions that count.
    guided: bool[n, g], completions written by the guide; None for none.
  """
  own = alive if guided is None else alive & ~guided
  return (own & ~correct).any(1) & (alive & correct).any(1)


def zero_reward(correct: Array, alive: Array, guided: Array) -> Array:
  """Groups of which none of the policy's own completions was right, bool[n]."""
  return ~(alive & ~guided & correct).any(1)


def highest(x: jax.Array, mask: jax.Array, share: float) -> jax.Array:
  """The `share` of the masked entries with the largest values, at least one; ties at the border are all in.

  The border is found by bisection over the bits of a float: 31 counts, no sort, so that it stays cheap on arrays that lie on
  many devices.

  Args:
    x: f32[...] >= 0.
    mask: bool[...].
    share: in (0, 1].

  Returns:
    bool[...], a part of `mask`.
  """
  bits = jax.lax.bitcast_convert_type(
    jnp.maximum(x, 0.0), jnp.int32
  )  # of floats >= 0: the same order
  count = jnp.maximum(jnp.ceil(share * mask.sum() - 1e-4), 1).astype(
    jnp.int32
  )  # 20 % of 15 tokens is 3, whatever rounding adds

  def settle(i: jax.Array, border: jax.Array) -> jax.Array:
    higher = border | (1 << (30 - i))
    return jnp.where((mask & (bits >= higher)).sum() >= count, higher, border)

  return mask & (bits >= jax.lax.fori_loop(0, 31, settle, jnp.int32(0)))
