"""Importance ratios f32[n, g, t] from log-probs f32[n, g, t]; differentiable in the new log-probs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

LOG_RATIO_BOUND = 20.0


def _log_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.where(mask, logp - logp_old, 0.0)


def _bounded_exp(x: jax.Array) -> jax.Array:
  return jnp.exp(jnp.clip(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def token_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """`exp(logp - logp_old)` a token, the log-ratio held within +-20; 1 outside `mask`."""
  return _bounded_exp(_log_ratio(logp, logp_old, mask))


def sequence_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """The arithmetic mean of a completion's token ratios (GRPO-S, eq. 6), the same at each of its steps."""
  return jnp.broadcast_to(
    masked_mean(token_ratio(logp, logp_old, mask), mask, -1, keepdims=True), mask.shape
  )


def geometric_sequence_ratio(logp: jax.Array, logp_old: jax.Array, mask: jax.Array) -> jax.Array:
  """`exp(mean(logp - logp_old))` over a completion (GSPO, 2507.18071 eq. 7), the same at each of its steps."""
  mean = masked_mean(_log_ratio(logp, logp_old, mask), mask, -1, keepdims=True)
  return jnp.broadcast_to(_bounded_exp(mean), mask.shape)


SEQUENCE_RATIOS: dict[str, Callable[..., jax.Array]] = {
  "arithmetic": sequence_ratio,
  "geometric": geometric_sequence_ratio,
}


def mismatch_weight(
  logp_trainer: jax.Array, logp_sampler: jax.Array, mask: jax.Array, cap: float
) -> jax.Array:
  """`min(pi_trainer / pi_sampler, cap)` a token, a constant: truncated importance weights for one policy computed in two ways.

  Both log-probs are of the parameters that sampled, as the trainer and as the sampler computes them. 1 outside `mask`.
  """
  return jax.lax.stop_gradient(jnp.minimum(token_ratio(logp_trainer, logp_sampler, mask), cap))


def k3(logp: jax.Array, logp_reference: jax.Array, mask: jax.Array) -> jax.Array:
  """Schulman's k3 estimate of KL(pi || reference), `r - 1 - log r` with r = reference / pi; >= 0, in nats; 0 outside `mask`."""
  log_ratio = jnp.clip(_log_ratio(logp_reference, logp, mask), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
  return jnp.expm1(log_ratio) - log_ratio
