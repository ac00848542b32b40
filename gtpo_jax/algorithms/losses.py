"""The clipped objective, and the averages over tokens: each a weighting f32[n, g, t] that sums to 1.

An average is made once from the whole batch's mask. A micro-batch takes its slice, so that the parts' losses and gradients
add up to the whole's exactly.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp


def token_mean(mask: jax.Array) -> jax.Array:
  """Every token of the batch counts the same (DAPO, GTPO)."""
  return mask / jnp.maximum(mask.sum(), 1)


def completion_mean(mask: jax.Array) -> jax.Array:
  """The mean over each completion's tokens, then over the completions (GRPO, GRPO-S)."""
  completions = jnp.maximum(mask.any(-1).sum(), 1)
  return mask / jnp.maximum(mask.sum(-1, keepdims=True), 1) / completions


def clipped_objective(ratio: jax.Array, advantages: jax.Array, eps_low: float, eps_high: float) -> jax.Array:
  """`min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)` f32[n, g, t], to be maximised."""
  return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - eps_low, 1 + eps_high) * advantages)
