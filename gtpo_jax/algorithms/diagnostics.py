"""Diagnostics of importance ratios, and of how advantages and entropies relate to log-probs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.selection import quantile, token_covariance
from gtpo_jax.arrays import masked_mean, mean_or_nan

# The quantiles of the importance ratio that are logged.
RATIO_QUANTILES = {"ratio/p01": 0.01, "ratio/p50": 0.5, "ratio/p99": 0.99}


def ratio_metrics(
  ratio: jax.Array, advantages: jax.Array, log_probs: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Returns diagnostics of a gradient update, f32[] each.

  `ratio/mean` and `ratio/p*` are the mean and quantiles of the importance ratio. `ratio/ess` is the
  effective sample size as a fraction of the tokens, `(sum r)^2 / (N sum r^2)`: 1 if all ratios are
  equal. `covariance/mean` is the covariance of advantages and log-probs (2505.22617, eq. 10), which
  predicts how fast the entropy falls. All are NaN if the mask is empty.

  Args:
    ratio: f32[n, g, t].
    advantages: f32[n, g, t].
    log_probs: f32[n, g, t], nats, of the policy being trained.
    mask: bool[n, g, t].
  """
  metrics = {
    "ratio/mean": masked_mean(ratio, mask),
    "ratio/ess": effective_sample_size(ratio, mask),
    "covariance/mean": masked_mean(token_covariance(advantages, log_probs, mask), mask),
    **{name: quantile(ratio, mask, share) for name, share in RATIO_QUANTILES.items()},
  }
  return {name: jnp.where(mask.any(), value, jnp.nan) for name, value in metrics.items()}


def effective_sample_size(weights: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `(sum w)^2 / (N sum w^2)` over the N weights where `mask` is True, f32[] in (0, 1].

  1 if all weights are equal, 1 / N if one outweighs all others; 1 if the mask is empty.
  """
  weights = jnp.where(mask, weights, 0.0)
  # Divided by the largest weight, so the squares fit float32.
  scaled = weights / jnp.maximum(weights.max(), 1.0)
  squares = jnp.square(scaled).sum()
  share = jnp.square(scaled.sum()) / jnp.where(squares > 0, squares * mask.sum(), 1.0)
  return jnp.where(mask.any(), jnp.minimum(share, 1.0), 1.0)  # sums of float32 may exceed 1


def surprise_metrics(
  entropy: jax.Array, log_probs: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Returns the mean entropy of the tokens in each quartile of surprise, f32[] each, in nats.

  The surprise of a token is -log pi. `entropy/surprise_q1` is the mean over the least surprising
  quarter of the tokens, `entropy/surprise_q4` over the most surprising one. Ties go to the lower
  quartile.

  Args:
    entropy: f32[n, g, t], nats, of the sampling policy.
    log_probs: f32[n, g, t], nats, of the sampled tokens under that policy.
    mask: bool[n, g, t].
  """
  surprise = jnp.where(mask, -log_probs, 0.0)
  bounds = [quantile(surprise, mask, share) for share in (0.25, 0.5, 0.75)]
  quartile = sum((surprise > bound).astype(jnp.int32) for bound in bounds)
  return {
    f"entropy/surprise_q{i + 1}": mean_or_nan(entropy, mask & (quartile == i)) for i in range(4)
  }
