"""Loss aggregations: each a weighting of tokens f32[n, g, t], made from the loss mask of a batch.

The weights are made once from the whole batch. A micro-batch takes its slice of them, so that the
losses and gradients of the parts add up to those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def token_mean(mask: jax.Array) -> jax.Array:
  """Weighs every token of the batch equally (DAPO, GTPO)."""
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
  """Divides the sum over tokens by n * g * t, whatever the lengths (Dr. GRPO)."""
  return mask / mask.size


LOSS_AGGREGATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "token": token_mean,
  "completion": completion_mean,
  "group": group_mean,
  "constant": constant_divisor,
}
