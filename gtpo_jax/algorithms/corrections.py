"""Corrections for tokens that the trained policy's parameters have not, or not exactly, drawn.

The sampler's numbers differ from the trainer's; the policy of an earlier step may have drawn a
token; filters change the distribution that is drawn from. All log-probs are f32[n, g, t], in nats.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.ratios import bounded_exp, geometric_sequence_ratio, token_ratio
from gtpo_jax.arrays import masked_sum

TIS_LEVELS = ("token", "sequence")
BEHAVIOURS = ("policy", "drawn")


def importance_weights(
  log_probs_trainer: jax.Array,
  log_probs_sampler: jax.Array,
  mask: jax.Array,
  cap: float,
  level: str = "token",
) -> jax.Array:
  """Returns the truncated importance weights `min(pi_trainer / pi_sampler, cap)`.

  The weights are constants (`stop_gradient`).

  Args:
    log_probs_trainer: of the policy before the update, computed by the trainer.
    log_probs_sampler: of the distribution that the tokens were drawn from.
    mask: bool[n, g, t].
    cap: the upper bound.
    level: "token" (each token's own probabilities) or "sequence" (those of its completion, that is,
      the product over its tokens).

  Returns:
    f32[n, g, t]; for "token", min(1, cap) where `mask` is False.
  """
  if level == "token":
    ratio = token_ratio(log_probs_trainer, log_probs_sampler, mask)
  else:
    total = masked_sum(log_probs_trainer - log_probs_sampler, mask, -1, keepdims=True)
    ratio = jnp.broadcast_to(bounded_exp(total), mask.shape)
  return jax.lax.stop_gradient(jnp.minimum(ratio, cap))


def kept_completions(
  log_probs_trainer: jax.Array,
  log_probs_sampler: jax.Array,
  mask: jax.Array,
  low: float,
  high: float,
) -> jax.Array:
  """Returns the completions whose geometric mean ratio lies in [low, high], bool[n, g].

  Args:
    log_probs_trainer, log_probs_sampler, mask: as in `importance_weights`.
    low: the lower bound; 0 for none.
    high: the upper bound; 0 for none.
  """
  ratio = geometric_sequence_ratio(log_probs_trainer, log_probs_sampler, mask)[..., 0]
  return (ratio >= low) & ((ratio <= high) if high else True)
