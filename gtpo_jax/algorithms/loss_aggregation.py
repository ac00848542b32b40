"""Loss aggregations: functions from the loss mask bool[n, g, t] to token weights f32[n, g, t].

The weights are computed from the complete batch of a gradient update. Each micro-batch uses its
slice of them, so the losses and gradients of the micro-batches add up to those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def token_mean(mask: jax.Array) -> jax.Array:
  """Averages over all tokens of the batch (DAPO, GTPO)."""
  return mask / jnp.maximum(mask.sum(), 1)


def completion_mean(mask: jax.Array) -> jax.Array:
  """Averages over the tokens of each completion, then over completions (GRPO, GRPO-S)."""
  completions = jnp.maximum(mask.any(-1).sum(), 1)
  return mask / jnp.maximum(mask.sum(-1, keepdims=True), 1) / completions


def group_mean(mask: jax.Array) -> jax.Array:
  """Averages over all tokens of each group, then over groups."""
  groups = jnp.maximum(mask.any((1, 2)).sum(), 1)
  return mask / jnp.maximum(mask.sum((1, 2), keepdims=True), 1) / groups


def constant_divisor(mask: jax.Array) -> jax.Array:
  """Divides the sum over tokens by n * g * t, independent of the lengths (Dr. GRPO)."""
  return mask / mask.size


LOSS_AGGREGATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "token": token_mean,
  "completion": completion_mean,
  "group": group_mean,
  "constant": constant_divisor,
}
