"""Advantages, computed from shaped rewards.

All arrays are [n, g, u], where a unit of credit is a token (u = t) or a completion (u = 1). Means
and standard deviations are over the entries where `mask` is True. O+ and O- are the units of
correct and of incorrect completions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.units import ShapedRewards
from gtpo_jax.arrays import masked_mean

# (shaped, correct, mask, axes, sign_guard) -> advantages f32[n, g, u].
Advantage = Callable[[ShapedRewards, jax.Array, jax.Array, tuple[int, ...], bool], jax.Array]

# The axes of [n, g, u] over which one mean and standard deviation are computed.
NORM_SCOPE: dict[str, tuple[int, ...]] = {"group": (1, 2), "batch": (0, 1, 2)}

# Rewards with a smaller standard deviation count as equal, and their advantages are 0.
MIN_STD = 1e-6


def centred(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns x minus its mean over `axes`, and 0 where `mask` is False."""
  mean = masked_mean(x, mask, axes, keepdims=True)
  # The second pass removes the rounding error of the first, so that equal values have std 0.
  mean += masked_mean(x - mean, mask, axes, keepdims=True)
  return jnp.where(mask, x - mean, 0.0)


def zscore(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns (x - mean) / std, with the mean and the population std over `axes`.

  The result is 0 where the std is below `MIN_STD` and where `mask` is False.
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
  """Z-scores the rewards of O+ and O- together.

  The baselines do this, and so do `gtpo_v1` and `grpo_s_v1` (2508.04349 v1, eqs. 4, 8).

  Args:
    shaped: the shaped rewards R+ and R-, f32[n, g, u] each.
    correct: bool[n, g, 1].
    mask: bool[n, g, u].
    axes: the axes of the mean and the std, from `NORM_SCOPE`.
    sign_guard: whether to clamp the advantages to be >= 0 on O+ and <= 0 on O-.

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
  """Z-scores R+ and R- separately; returns z(R+) on O+ and z(R-) on O-.

  `gtpo`, `grpo_s`, `gtpo_v2` and `grpo_s_v2` use these advantages. Each z-score is over all units,
  including the zeros of the other side. Over its own side only, each side would have mean 0, and
  the difference between correct and incorrect would be lost. Arguments and result are those of
  `joint_zscore`.
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

  Arguments and result are those of `joint_zscore`.
  """
  return _guard_signs(centred(shaped.plus + shaped.minus, mask, axes), correct, sign_guard)


def _guard_signs(advantages: jax.Array, correct: jax.Array, sign_guard: bool) -> jax.Array:
  if not sign_guard:
    return advantages
  return jnp.where(correct, jnp.maximum(advantages, 0.0), jnp.minimum(advantages, 0.0))
