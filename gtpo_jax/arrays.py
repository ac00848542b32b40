"""The arrays passed between the parts of the package: frozen pytrees, and the masking helpers.

Dimension letters, used in every shape comment of the package:

  n  prompts in the batch             g  completions per prompt (a group is this axis)
  p  prompt positions, padded left    t  completion positions
  s  sequence positions               b  rows of a plain batch
  v  vocabulary                       d  model width
  h  query heads                      k  key/value heads
  r  query heads per key/value head   e  features per head
  w  rows per prompt, if completions are packed
  m  the most completions in one such row
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

SHORTEST_ARRAY = 64  # positions; shorter arrays save little time, and each costs a program


@flax.struct.dataclass
class Prompts:
  """A batch of prompts, padded on the left: every prompt's last token is at position p-1."""

  tokens: jax.Array  # i32[n, p]
  lengths: jax.Array  # i32[n], number of tokens without padding

  @property
  def mask(self) -> jax.Array:
    """bool[n, p], False on padding."""
    width = self.tokens.shape[1]
    return jnp.arange(width) >= width - self.lengths[:, None]


@flax.struct.dataclass
class Packing:
  """How each prompt's completions are packed into rows, to save padding.

  `training.packing` makes it.
  """

  # i32[n, w, s], the index of each token's completion within its row; m on padding.
  # None: each row holds one completion.
  segment: jax.Array | None
  # i32[n, w, s], the flat index of each token in its prompt's [g, t]; -1 on padding.
  source: jax.Array
  # i32[n, g], the flat index of each completion's first token in its prompt's [w, s].
  start: jax.Array

  def pack(self, x: jax.Array) -> jax.Array:
    """Returns [n, g, t] as [n, w, s], with 0 on padding."""
    packed = _gather(x, self.source)
    return jnp.where(self.source < 0, jnp.zeros_like(packed), packed)

  def unpack(self, x: jax.Array, t: int) -> jax.Array:
    """Returns [n, w, s] as [n, g, t], the inverse of `pack`.

    Values after a completion's end are arbitrary.
    """
    index = self.start[:, :, None] + jnp.arange(t)
    return _gather(x, jnp.minimum(index, math.prod(x.shape[1:]) - 1))


def max_per_row(g: int, w: int) -> int:
  """Returns m, the most completions that one row may hold if g completions share w rows."""
  return min(2 * -(-g // w), g) if w < g else 1


def array_lengths(longest: int, shards: int = 1) -> list[int]:
  """Returns the lengths that arrays for up to `longest` positions are padded to, ascending.

  They are `longest` halved again and again, down to 64, each rounded up to a multiple of `shards`:
  few, because each length is a program of its own, and never more than twice what is needed.
  """
  lengths = [longest]
  while (half := -(-lengths[0] // (2 * shards)) * shards) >= SHORTEST_ARRAY and half < lengths[0]:
    lengths.insert(0, half)
  return lengths


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns x [n, ...] at `index` i32[n, a, b] of its flattened trailing axes, [n, a, b]."""
  n = x.shape[0]
  return jnp.take_along_axis(x.reshape(n, -1), index.reshape(n, -1), axis=1).reshape(index.shape)


@flax.struct.dataclass
class Rollouts:
  """Sampled completions, with the sampling policy's own log-prob and entropy of every token."""

  prompts: Prompts
  tokens: jax.Array  # i32[n, g, t]; the padding id where mask is False
  mask: jax.Array  # bool[n, g, t]; True on sampled tokens, EOS included
  # f32[n, g, t], nats; at the sampling temperature, before top-k / top-p / min-p.
  log_probs: jax.Array
  entropy: jax.Array  # f32[n, g, t], nats; of the same full distribution
  # bool[n, g]; True if a stop token was sampled, False if the completion was cut off.
  finished: jax.Array

  # Only some runs have these; None elsewhere.
  # bool[n, g]; True if a guide wrote the completion, and log_probs and entropy are the guide's.
  guided: jax.Array | None = None
  # bool[n, g]; True if the policy of an earlier step wrote the completion.
  stale: jax.Array | None = None
  # f32[n, g, t], nats; log_probs of the same policy, as computed by the trainer.
  rescored: jax.Array | None = None
  # f32[n, g, t], nats; log-probs of the frozen reference.
  reference: jax.Array | None = None
  # How the trainer packs completions into rows. None: one completion per row.
  packing: Packing | None = None

  @property
  def lengths(self) -> jax.Array:
    """i32[n, g], in tokens, including the stop token."""
    return self.mask.sum(-1)

  @property
  def old_log_probs(self) -> jax.Array:
    """f32[n, g, t], nats; the denominator of the importance ratio."""
    return self.log_probs if self.rescored is None else self.rescored


@flax.struct.dataclass
class Rewards:
  """The verifier's result for each completion."""

  correct: jax.Array  # bool[n, g]
  reward: jax.Array  # f32[n, g]; what baselines normalise, without length penalty
  penalty: jax.Array  # f32[n, g], <= 0; length shaping
  # bool[n, g]; False excludes a completion from loss and statistics. None: all are valid.
  valid: jax.Array | None = None


def masked_sum(
  x: jax.Array, mask: jax.Array, axes: int | Sequence[int] | None = None, keepdims: bool = False
) -> jax.Array:
  """Returns the sum of `x` where `mask` is True.

  Masked entries, NaN included, affect neither the value nor the gradient.
  """
  return jnp.where(mask, x, 0).sum(axes, keepdims=keepdims)


def masked_mean(
  x: jax.Array, mask: jax.Array, axes: int | Sequence[int] | None = None, keepdims: bool = False
) -> jax.Array:
  """Returns the mean of `x` where `mask` is True, along `axes`; 0 over an empty mask."""
  mask_of_x = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape))
  count = mask_of_x.sum(axes, keepdims=keepdims)
  return masked_sum(x, mask, axes, keepdims) / jnp.maximum(count, 1)
