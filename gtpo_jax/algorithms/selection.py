"""Selects the groups and tokens of the loss: groups with contrast, and tokens of high entropy."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

# Subtracted before a count is rounded up, so that 20 % of 15 tokens is 3 despite float32 rounding.
COUNT_TOLERANCE = 1e-4


def has_contrast(correct: Array, alive: Array, guided: Array | None = None) -> Array:
  """Returns the groups with contrast, bool[n].

  A group has contrast if at least one completion is correct and at least one of the policy's own
  completions is incorrect. Without a guide, these are the groups that are neither all correct nor
  all incorrect. With a guide, a group in which the policy is always correct has no contrast, and a
  group in which it is never correct has contrast if the guide is correct.

  Args:
    correct: bool[n, g].
    alive: bool[n, g], the completions to consider; others are ignored.
    guided: bool[n, g], completions sampled from the guide; None if there is no guide.
  """
  own = alive if guided is None else alive & ~guided
  return (own & ~correct).any(1) & (alive & correct).any(1)


def all_wrong(correct: Array, alive: Array, guided: Array) -> Array:
  """Returns the groups in which none of the policy's own completions is correct, bool[n].

  Arguments are those of `has_contrast`.
  """
  return ~(alive & ~guided & correct).any(1)


def top_share(x: jax.Array, mask: jax.Array, share: float) -> jax.Array:
  """Selects the largest masked entries: a fraction `share` of them, but at least one.

  All entries equal to the threshold are selected. The threshold is found by bisection over the
  bits of a float. This takes 31 counts and no sort, which is cheap for arrays sharded over many
  devices.

  Args:
    x: f32[...] >= 0.
    mask: bool[...].
    share: in (0, 1].

  Returns:
    bool[...], a subset of `mask`.
  """
  # Floats >= 0 have the same order as their bits read as integers.
  bits = jax.lax.bitcast_convert_type(jnp.maximum(x, 0.0), jnp.int32)
  count = jnp.maximum(jnp.ceil(share * mask.sum() - COUNT_TOLERANCE), 1).astype(jnp.int32)

  def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    higher = threshold | (1 << (30 - i))
    return jnp.where((mask & (bits >= higher)).sum() >= count, higher, threshold)

  return mask & (bits >= jax.lax.fori_loop(0, 31, set_bit, jnp.int32(0)))
