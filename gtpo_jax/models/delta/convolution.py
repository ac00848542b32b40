"""A causal convolution over positions, with a filter of its own for each feature."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def convolve(
  x: jax.Array, kernel: jax.Array, before: jax.Array, places: jax.Array | None = None
) -> jax.Array:
  """Returns the sum over the taps of each position and those before it, f32[n, g, s, k, f].

  Args:
    x: [n, g, s, k, f].
    kernel: [k, f, taps]; the last tap is for the position itself.
    before: [n, g | 1, taps - 1, k, f], what precedes the first position, the latest last.
    places: i32[n, g, s], the place of each position in its segment, which `before` precedes. None
      if each row is one segment.
  """
  s = x.shape[2]
  taps = kernel.shape[-1]
  kernel = kernel.astype(jnp.float32)
  before = before.astype(jnp.float32)
  wide = extended(x.astype(jnp.float32), before)
  out = 0.0
  for tap in range(taps):
    at_tap = wide[:, :, tap : tap + s]
    if places is not None:
      for place in range(taps - 1 - tap):  # whose tap is before its segment
        is_there = (places == place)[..., None, None]
        at_tap = jnp.where(is_there, before[:, :, tap + place, None], at_tap)
    out += at_tap * kernel[..., tap]
  return out


def extended(x: jax.Array, before: jax.Array) -> jax.Array:
  """Returns `x` [n, g, s, k, f] with what precedes it, [n, g, taps - 1 + s, k, f]."""
  before = jnp.broadcast_to(before, (*x.shape[:2], *before.shape[2:]))
  return jnp.concatenate([before.astype(x.dtype), x], 2)
