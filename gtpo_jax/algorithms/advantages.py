"""From shaped rewards to advantages. All arrays are [n, g, u]; the statistics are over the True places of `mask`."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.shaping import Shaped
from gtpo_jax.arrays import masked_mean

# The axes of [n, g, u] that one normalisation spans.
NORM_SCOPE: dict[str, tuple[int, ...]] = {"group": (1, 2), "batch": (0, 1, 2)}

STD_FLOOR = 1e-6


def zscore(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """(x - mean) / population std over `axes`; 0 where the std is below 1e-6, and 0 outside `mask`."""
  mean = masked_mean(x, mask, axes, keepdims=True)
  mean += masked_mean(x - mean, mask, axes, keepdims=True)  # what rounding left: equal values must give a std of 0
  std = jnp.sqrt(masked_mean(jnp.square(x - mean), mask, axes, keepdims=True))
  alive = mask & (std >= STD_FLOOR)
  return jnp.where(alive, (x - mean) / jnp.where(std >= STD_FLOOR, std, 1.0), 0.0)


def two_sided_zscore(shaped: Shaped, correct: jax.Array, mask: jax.Array, norm_scope: str, sign_guard: bool) -> jax.Array:
  """The final paper's advantages: R+ and R- each z-scored over all units, A+ used on O+ and A- on O-.

  Both collections keep the zeros on the other side. Over its own side alone each would get mean 0, and with it the difference
  between right and wrong would be gone.

  Args:
    shaped: f32[n, g, u] twice.
    correct: bool[n, g, 1].
    mask: bool[n, g, u].
    norm_scope: "group" or "batch".
    sign_guard: clamp A+ at >= 0 and A- at <= 0.
  """
  axes = NORM_SCOPE[norm_scope]
  plus, minus = zscore(shaped.plus, mask, axes), zscore(shaped.minus, mask, axes)
  if sign_guard:
    plus, minus = jnp.maximum(plus, 0.0), jnp.minimum(minus, 0.0)
  return jnp.where(correct, plus, minus)
