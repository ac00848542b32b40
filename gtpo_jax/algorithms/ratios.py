"""Importance ratios pi / pi_old, f32[n, g, t] from log-probs f32[n, g, t]; differentiable in the new log-probs."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

LOG_RATIO_BOUND = 20.0


def token_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """`exp(logp - logp_old)` a token, the log-ratio held within +-20; 1 outside `mask`."""
  log_ratio = jnp.where(mask, logp - logp_old, 0.0)
  return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sequence_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """The arithmetic mean of a completion's token ratios (GRPO-S, eq. 6), the same at each of its steps."""
  return jnp.broadcast_to(masked_mean(token_ratio(logp, logp_old, mask), mask, -1, keepdims=True), mask.shape)


def geometric_sequence_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """`exp(mean(logp - logp_old))` over a completion (GSPO), the same at each of its steps."""
  log_ratio = jnp.where(mask, logp - logp_old, 0.0)
  mean = masked_mean(log_ratio, mask, -1, keepdims=True)
  return jnp.broadcast_to(jnp.exp(jnp.clip(mean, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), mask.shape)
