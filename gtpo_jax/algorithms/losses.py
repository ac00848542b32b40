"""The clipped objective, and the averages over tokens: each a weighting f32[n, g, t] of the whole batch.

An average is made once from the whole batch's mask. A micro-batch takes its slice, so that the parts' losses and gradients
add up to the whole's exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def token_mean(mask: jax.Array) -> jax.Array:
  """Every token of the batch counts the same (DAPO, GTPO)."""
  return mask / jnp.maximum(mask.sum(), 1)


def completion_mean(mask: jax.Array) -> jax.Array:
  """The mean over each completion's tokens, then over the completions (GRPO, GRPO-S)."""
  completions = jnp.maximum(mask.any(-1).sum(), 1)
  return mask / jnp.maximum(mask.sum(-1, keepdims=True), 1) / completions


def group_mean(mask: jax.Array) -> jax.Array:
  """The mean over all tokens of each group, then over the groups."""
  groups = jnp.maximum(mask.any((1, 2)).sum(), 1)
  return mask / jnp.maximum(mask.sum((1, 2), keepdims=True), 1) / groups


def constant_divisor(mask: jax.Array) -> jax.Array:
  """The sum over tokens over completions x longest length, whatever was written (Dr. GRPO)."""
  return mask / mask.size


AVERAGES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "token": token_mean,
  "completion": completion_mean,
  "group": group_mean,
  "constant": constant_divisor,
}


def clipped_objective(
  ratio: jax.Array, advantages: jax.Array, eps_low: float, eps_high: float, dual_clip: float = 0.0
) -> jax.Array:
  """`min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)` f32[n, g, t], to be maximised.

  With `dual_clip` c > 1 it is no less than `c A` where A < 0 (1912.09729, eq. 5): a wrong token that became likely pulls no
  harder than that.
  """
  objective = jnp.minimum(
    ratio * advantages, jnp.clip(ratio, 1 - eps_low, 1 + eps_high) * advantages
  )
  if dual_clip:
    objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
  return objective
