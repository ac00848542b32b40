"""The one idea of the papers: an entropy, relative to the mean of the entropies it is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import masked_mean

# The axes of [n, g, t] that one comparison set spans.
COMPARE: dict[tuple[str, str], tuple[int, ...]] = {
  ("position", "group"): (1,),  # method 1, "column": the same step in all completions
  ("position", "batch"): (0, 1),
  ("sequence", "group"): (2,),  # method 2, "row": the steps of one completion
  ("sequence", "batch"): (2,),
  ("matrix", "group"): (1, 2),  # method 3: every token
  ("matrix", "batch"): (0, 1, 2),
}


def relative_entropy(x: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """`x` over its mean within the compared set; sums to the size of the set (eqs. 2, 13).

  Args:
    x: f32[n, g, t] >= 0: entropy in nats, or its inverse.
    mask: bool[n, g, t], the tokens compared: O+ or O-, alive.
    axes: of one set, from `COMPARE`.

  Returns:
    f32[n, g, t]: the share; 1 throughout a set whose mean is 0, and 0 where `mask` is False.
  """
  mean = masked_mean(x, mask, axes, keepdims=True)
  return jnp.where(mask, jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1.0), 1.0), 0.0)


def inverse_entropy(entropy: jax.Array, h_floor: float) -> jax.Array:
  """`1 / max(H, h_floor)` f32[n, g, t], in 1/nats: large where a wrong completion was confident.

  The floor keeps one near-certain token from taking the whole penalty.
  """
  return 1.0 / jnp.maximum(entropy, h_floor)


def effective_participants(share: jax.Array, mask: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """How many members of a set carry its share, (sum x)^2 / sum x^2, over the set's size, averaged over tokens; f32[] in [0, 1]."""
  total = jnp.where(mask, share, 0).sum(axes, keepdims=True)
  squares = jnp.square(jnp.where(mask, share, 0)).sum(axes, keepdims=True)
  count = jnp.maximum(mask.sum(axes, keepdims=True), 1)
  return masked_mean(jnp.square(total) / jnp.where(squares > 0, squares, 1.0) / count, mask)
