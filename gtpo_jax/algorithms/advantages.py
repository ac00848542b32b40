"""From shaped rewards to advantages.

All arrays are [n, g, u]; statistics are over the entries where `mask` is True.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.units import ShapedRewards
from gtpo_jax.arrays import masked_mean

# (shaped, correct, mask, axes, sign_guard) -> advantages f32[n, g, u].
Advantage = Callable[[ShapedRewards, jax.Array, jax.Array, tuple[int, ...], bool], jax.Array]

# The axes of [n, g, u] that one normalisation spans.
NORM_SCOPE: dict[str, tuple[int, ...]] = {"group": (1, 2), "batch": (0, 1, 2)}

# Below this standard deviation rewards carry no signal, and their advantages are 0.
MIN_STD = 1e-6


def centred(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns x - mean over `axes`; 0 where `mask` is False."""
  mean = masked_mean(x, mask, axes, keepdims=True)
  # The second pass removes the rounding error: equal values must have a std of exactly 0.
  mean += masked_mean(x - mean, mask, axes, keepdims=True)
  return jnp.where(mask, x - mean, 0.0)


def zscore(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns (x - mean) / population std over `axes`.

  It is 0 where the std is below `MIN_STD` and where `mask` is False.
  """
  x = centred(x, mask, axes)
  std = jnp.sqrt(masked_mean(jnp.square(x), mask, axes, keepdims=True))
  return jnp.where(std >= MIN_STD, x / jnp.where(std >= MIN_STD, std, 1.0), 0.0)


def joint_zscore(
  shaped: ShapedRewards,
  correct: jax.Array,
  mask: jax.Array,
  axes: tuple[int, ...],
  sign_guard: bool,
) -> jax.Array:
  """Z-scores O+ and O- together, as the baselines and v1 of GTPO and GRPO-S (eqs. 4, 8) do.

  Args:
    shaped: f32[n, g, u] twice.
    correct: bool[n, g, 1].
    mask: bool[n, g, u].
    axes: the axes of one normalisation, from `NORM_SCOPE`.
    sign_guard: whether to clamp A at >= 0 on O+ and at <= 0 on O-.

  Returns:
    f32[n, g, u].
  """
  return _guard_signs(zscore(shaped.plus + shaped.minus, mask, axes), correct, sign_guard)


def two_sided_zscore(
  shaped: ShapedRewards,
  correct: jax.Array,
  mask: jax.Array,
  axes: tuple[int, ...],
  sign_guard: bool,
) -> jax.Array:
  """Z-scores R+ and R- separately, each over all units; uses A+ on O+ and A- on O-.

  These are the advantages of the final paper and of v2. Both collections include the zeros of the
  other side: normalised over its own side only, each would have mean 0, and the difference
  between correct and incorrect would be lost. Arguments and result as in `joint_zscore`.
  """
  plus = zscore(shaped.plus, mask, axes)
  minus = zscore(shaped.minus, mask, axes)
  return _guard_signs(jnp.where(correct, plus, minus), correct, sign_guard)


def joint_centred(
  shaped: ShapedRewards,
  correct: jax.Array,
  mask: jax.Array,
  axes: tuple[int, ...],
  sign_guard: bool,
) -> jax.Array:
  """Subtracts the mean reward without dividing by the std (Dr. GRPO, 2503.20783).

  Arguments and result as in `joint_zscore`.
  """
  return _guard_signs(centred(shaped.plus + shaped.minus, mask, axes), correct, sign_guard)


def _guard_signs(advantages: jax.Array, correct: jax.Array, sign_guard: bool) -> jax.Array:
  if not sign_guard:
    return advantages
  return jnp.where(correct, jnp.maximum(advantages, 0.0), jnp.minimum(advantages, 0.0))
