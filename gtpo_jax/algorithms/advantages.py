"""From shaped rewards to advantages. All arrays are [n, g, u]; the statistics are over the True places of `mask`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.shaping import Shaped
from gtpo_jax.arrays import masked_mean

# The axes of [n, g, u] that one normalisation spans.
NORM_SCOPE: dict[str, tuple[int, ...]] = {"group": (1, 2), "batch": (0, 1, 2)}

STD_FLOOR = 1e-6


def centred(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """x - mean over `axes`; 0 outside `mask`."""
  mean = masked_mean(x, mask, axes, keepdims=True)
  mean += masked_mean(
    x - mean, mask, axes, keepdims=True
  )  # what rounding left: equal values must give a std of 0
  return jnp.where(mask, x - mean, 0.0)


def zscore(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """(x - mean) / population std over `axes`; 0 where the std is below 1e-6, and 0 outside `mask`."""
  x = centred(x, mask, axes)
  std = jnp.sqrt(masked_mean(jnp.square(x), mask, axes, keepdims=True))
  return jnp.where(std >= STD_FLOOR, x / jnp.where(std >= STD_FLOOR, std, 1.0), 0.0)


def joint_zscore(
  shaped: Shaped, correct: jax.Array, mask: jax.Array, axes: tuple[int, ...], sign_guard: bool
) -> jax.Array:
  """One z-score over right and wrong together: the baselines', and GTPO's and GRPO-S's of v1 (eqs. 4, 8).

  Args:
    shaped: f32[n, g, u] twice.
    correct: bool[n, g, 1].
    mask: bool[n, g, u].
    axes: of one normalisation, from `NORM_SCOPE`.
    sign_guard: clamp A at >= 0 on O+ and <= 0 on O-.
  """
  return _guarded(zscore(shaped.plus + shaped.minus, mask, axes), correct, sign_guard)


def two_sided_zscore(
  shaped: Shaped, correct: jax.Array, mask: jax.Array, axes: tuple[int, ...], sign_guard: bool
) -> jax.Array:
  """The final paper's advantages (and v2's): R+ and R- each z-scored over all units, A+ used on O+ and A- on O-.

  Both collections keep the zeros on the other side. Over its own side alone each would get mean 0, and with it the difference
  between right and wrong would be gone. Arguments as of `joint_zscore`.
  """
  plus = zscore(shaped.plus, mask, axes)
  minus = zscore(shaped.minus, mask, axes)
  return _guarded(jnp.where(correct, plus, minus), correct, sign_guard)


def joint_centred(
  shaped: Shaped, correct: jax.Array, mask: jax.Array, axes: tuple[int, ...], sign_guard: bool
) -> jax.Array:
  """The reward less its mean, not divided by its std (Dr. GRPO, 2503.20783). Arguments as of `joint_zscore`."""
  return _guarded(centred(shaped.plus + shaped.minus, mask, axes), correct, sign_guard)


def _guarded(advantages: jax.Array, correct: jax.Array, sign_guard: bool) -> jax.Array:
  if not sign_guard:
    return advantages
  return jnp.where(correct, jnp.maximum(advantages, 0.0), jnp.minimum(advantages, 0.0))
