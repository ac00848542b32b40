"""Which groups and tokens enter the loss: groups with contrast, and tokens of high entropy."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

# Subtracted before rounding a count up: 20 % of 15 tokens is 3 in spite of float32 rounding.
COUNT_TOLERANCE = 1e-4


def has_contrast(correct: Array, alive: Array, guided: Array | None = None) -> Array:
  """Returns which groups carry signal, bool[n].

  A group does if some completion is correct and one of the policy's own is incorrect. Without a
  guide that is 0 < n < G. With one, a group that the policy always solves is dropped, and a group
  that it never solves is kept if the guide solved it.

  Args:
    correct: bool[n, g].
    alive: bool[n, g], the completions that count.
    guided: bool[n, g], completions written by the guide; None if there is no guide.
  """
  own = alive if guided is None else alive & ~guided
  return (own & ~correct).any(1) & (alive & correct).any(1)


def all_wrong(correct: Array, alive: Array, guided: Array) -> Array:
  """Returns the groups in which none of the policy's own completions is correct, bool[n].

  Arguments as in `has_contrast`.
  """
  return ~(alive & ~guided & correct).any(1)


def top_share(x: jax.Array, mask: jax.Array, share: float) -> jax.Array:
  """Selects the `share` of the masked entries with the largest values, at least one.

  All entries equal to the threshold are selected. The threshold is found by bisection over the
  bits of a float: 31 counts and no sort, which stays cheap for arrays sharded over many devices.

  Args:
    x: f32[...] >= 0.
    mask: bool[...].
    share: in (0, 1].

  Returns:
    bool[...], a subset of `mask`.
  """
  # The bits of floats >= 0, read as integers, sort like the floats.
  bits = jax.lax.bitcast_convert_type(jnp.maximum(x, 0.0), jnp.int32)
  count = jnp.maximum(jnp.ceil(share * mask.sum() - COUNT_TOLERANCE), 1).astype(jnp.int32)

  def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    higher = threshold | (1 << (30 - i))
    return jnp.where((mask & (bits >= higher)).sum() >= count, higher, threshold)

  return mask & (bits >= jax.lax.fori_loop(0, 31, set_bit, jnp.int32(0)))
