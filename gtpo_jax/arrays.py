"""What travels between the parts: frozen pytrees of arrays, and the one helper that owns masking.

Dimension letters, used in every shape comment of the package:

  n  prompts in the batch          g  completions per prompt (a group is this axis)
  p  prompt positions, padded left t  completion positions
  s  sequence positions            b  rows of a plain batch
  v  vocabulary                    d  model width
  h  query heads                   k  key/value heads
  r  query heads per kv head       e  features of one head
  w  rows that a prompt's completions are packed into, and m the most that one of them holds
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Prompts:
  """A batch of prompts, padded on the left so that position p-1 is every prompt's last token."""

  tokens: jax.Array  # i32[n, p]
  lengths: jax.Array  # i32[n], real tokens in each row

  @property
  def mask(self) -> jax.Array:
    """bool[n, p], False on the padding."""
    width = self.tokens.shape[1]
    return jnp.arange(width) >= width - self.lengths[:, None]


@flax.struct.dataclass
class Packing:
  """How the completions of each prompt lie behind one another in rows, with less padding than a row each; `training.packing` makes it."""

  segment: (
    jax.Array | None
  )  # i32[n, w, s], which of its row's completions a place is of, from 0; m: of none. None: a row holds one
  source: (
    jax.Array
  )  # i32[n, w, s], where its token stands in the prompt's [g t]; -1 where there is none
  place: jax.Array  # i32[n, g], where each completion begins in the prompt's [w s]

  def pack(self, x: jax.Array) -> jax.Array:
    """[n, g, t] -> [n, w, s], 0 where there is no token."""
    found = _take(x, self.source)
    return jnp.where(self.source < 0, jnp.zeros_like(found), found)

  def unpack(self, x: jax.Array, t: int) -> jax.Array:
    """[n, w, s] -> [n, g, t], the inverse; behind a completion's end stands anything."""
    places = self.place[:, :, None] + jnp.arange(t)
    return _take(x, jnp.minimum(places, math.prod(x.shape[1:]) - 1))


def most_in_row(g: int, w: int) -> int:
  """m: of g completions in w rows, the most that one row may hold."""
  return min(2 * -(-g // w), g) if w < g else 1


def _take(x: jax.Array, places: jax.Array) -> jax.Array:
  """Row by row: of x [n, ...] what stands at `places` i32[n, a, b] of its flattened rest."""
  n = x.shape[0]
  return jnp.take_along_axis(x.reshape(n, -1), places.reshape(n, -1), axis=1).reshape(places.shape)


@flax.struct.dataclass
class Rollouts:
  """Sampled completions with what the sampling policy itself thought of every token."""

  prompts: Prompts
  tokens: jax.Array  # i32[n, g, t]; the padding id where mask is False
  mask: jax.Array  # bool[n, g, t]; True on sampled tokens, EOS included
  log_probs: (
    jax.Array
  )  # f32[n, g, t], nats; at the sampling temperature, before top-k / top-p / min-p
  entropy: jax.Array  # f32[n, g, t], nats; of that same full distribution
  finished: (
    jax.Array
  )  # bool[n, g]; True where a stop token was sampled, False where the length ran out
  # Known of some runs alone; None stands for none of them.
  guided: jax.Array | None = (
    None  # bool[n, g]; a guide wrote the completion, log_probs and entropy are its own
  )
  stale: jax.Array | None = None  # bool[n, g]; the policy of an earlier step wrote it
  rescored: jax.Array | None = (
    None  # f32[n, g, t], nats; log_probs of the same policy as the trainer computes them
  )
  reference: jax.Array | None = None  # f32[n, g, t], nats; log-probs of the frozen reference
  packing: Packing | None = None  # how the trainer lays the completions; None: a row each

  @property
  def lengths(self) -> jax.Array:
    """i32[n, g], tokens, the stop token included."""
    return self.mask.sum(-1)

  @property
  def old_log_probs(self) -> jax.Array:
    """f32[n, g, t], what the learner's log-probs are compared with."""
    return self.log_probs if self.rescored is None else self.rescored


@flax.struct.dataclass
class Rewards:
  """What the verifier said of each completion."""

  correct: jax.Array  # bool[n, g]
  reward: jax.Array  # f32[n, g]; what baselines normalise, length penalty not included
  penalty: jax.Array  # f32[n, g], <= 0; length shaping
  valid: jax.Array | None = (
    None  # bool[n, g]; False: no part in loss or statistics; None: all count
  )


def masked_sum(
  x: jax.Array, mask: jax.Array, axes: int | Sequence[int] | None = None, keepdims: bool = False
) -> jax.Array:
  """Sum of `x` where `mask`; whatever stands under a False, NaN included, has no part in value or gradient."""
  return jnp.where(mask, x, 0).sum(axes, keepdims=keepdims)


def masked_mean(
  x: jax.Array, mask: jax.Array, axes: int | Sequence[int] | None = None, keepdims: bool = False
) -> jax.Array:
  """Mean of `x` over the True places of `mask` along `axes`; 0 where there are none."""
  count = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape)).sum(
    axes, keepdims=keepdims
  )
  return masked_sum(x, mask, axes, keepdims) / jnp.maximum(count, 1)
