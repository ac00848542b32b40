"""The entropy of a token or completion relative to the mean over its comparison set.

GTPO and GRPO-S are built on it. It is unrelated to the KL divergence, which is also called relative
entropy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

# The axes of [n, g, t] that one comparison set spans, by the settings (compare, scope).
COMPARE: dict[tuple[str, str], tuple[int, ...]] = {
  ("position", "group"): (1,),  # method 1, "column": the same position of all completions
  ("position", "batch"): (0, 1),
  ("sequence", "group"): (2,),  # method 2, "row": all tokens of one completion
  ("sequence", "batch"): (2,),
  ("matrix", "group"): (1, 2),  # method 3, "matrix": all tokens of all completions
  ("matrix", "batch"): (0, 1, 2),
}


def relative_entropy(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns `x` divided by its mean over the comparison set (2508.04349 v1, eqs. 2 and 13).

  The results of a comparison set sum to its size.

  Args:
    x: f32[n, g, t] >= 0, entropy in nats or its inverse.
    mask: bool[n, g, t], the tokens to compare: the sampled tokens of O+, or those of O-.
    axes: the axes of one comparison set, from `COMPARE`.

  Returns:
    f32[n, g, t]; 1 in a set with mean 0, and 0 where `mask` is False.
  """
  mean = masked_mean(x, mask, axes, keepdims=True)
  return jnp.where(mask, jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1.0), 1.0), 0.0)


def inverse_entropy(entropy: jax.Array, h_floor: float) -> jax.Array:
  """Returns `1 / max(entropy, h_floor)` f32[n, g, t], in 1/nats: large for confident tokens.

  Without `h_floor`, a single near-certain token would take nearly the complete penalty of its
  comparison set.
  """
  return 1.0 / jnp.maximum(entropy, h_floor)


def effective_participants(share: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns the effective fraction of a comparison set that shares its credit, f32[] in [0, 1].

  For a set with values x this is the effective number of members, (sum x)^2 / sum x^2, divided by
  the size of the set. The result is the mean over the masked entries, each counted with its set.
  """
  total = jnp.where(mask, share, 0).sum(axes, keepdims=True)
  squares = jnp.square(jnp.where(mask, share, 0)).sum(axes, keepdims=True)
  count = jnp.maximum(mask.sum(axes, keepdims=True), 1)
  return masked_mean(jnp.square(total) / jnp.where(squares > 0, squares, 1.0) / count, mask)
