"""Selects the groups and tokens that enter the loss, or that an objective treats differently.

Nothing is sorted: thresholds are found by bisection over the bits of the values, which takes 32
counts. This is cheap for arrays sharded over many devices, and exact counts do not depend on the
mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.fields import FLAG, SHARE, Checked, setting

Array: TypeAlias = jax.Array | np.ndarray | Any  # all arrays of a call are of one library

# Subtracted before a count is rounded up, so that 60 % of 25 tokens is 15 despite float32 rounding.
COUNT_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Selection(Checked):
  """Which groups, completions and tokens are trained on."""

  prefix: ClassVar[str] = "algorithm."
  forking_share: ClassVar[float] = 0.0

  contrast: bool = setting(
    True,
    "whether groups without contrast, in which all completions are correct or all are incorrect, "
    "are excluded from the loss and from all statistics. Algorithm 1 of v1, as printed, does not "
    "exclude them.",
    FLAG,
  )
  overlong_filter: bool = setting(
    False,
    "exclude completions that were cut off at the length limit from the loss and from the "
    "statistics of their group.",
    FLAG,
  )
  dynamic_sampling: bool = setting(
    False,
    "replace all-correct and all-wrong groups by groups of further prompts (DAPO, 2503.14476).",
    FLAG,
  )

  def with_contrast(
    self, mask: jax.Array, correct: jax.Array, guided: jax.Array | None
  ) -> jax.Array:
    """Returns `mask`, set to False in groups without contrast if the settings exclude them."""
    if not self.contrast:
      return mask
    return mask & has_contrast(correct, mask.any(-1), guided)[:, None, None]


@dataclasses.dataclass(frozen=True)
class ForkingSelection(Selection):
  """Also drops the tokens with low entropy (2506.01939)."""

  forking_share: float = setting(
    0.2,
    "train on only this fraction of the loss tokens, those with the highest entropy in the batch "
    "(2506.01939).",
    SHARE,
  )


def has_contrast(correct: Array, alive: Array, guided: Array | None = None) -> Array:
  """Returns the groups with contrast, bool[n].

  A group has contrast if at least one completion is correct and at least one of the policy's own
  completions is incorrect. Without a guide, these are the groups that are neither all correct nor
  all incorrect. With a guide, a group in which the policy is always correct has no contrast, and a
  group in which it is never correct has contrast if the guide is correct.

  Args:
    correct: bool[n, g].
    alive: bool[n, g], the completions to consider; others are ignored.
    guided: bool[n, g], completions sampled from the guide; None if there is no guide.
  """
  own = alive if guided is None else alive & ~guided
  return (own & ~correct).any(1) & (alive & correct).any(1)


def all_wrong(correct: Array, alive: Array, guided: Array) -> Array:
  """Returns the groups in which none of the policy's own completions is correct, bool[n].

  Takes the arguments of `has_contrast`; `guided` is required.
  """
  return ~(alive & ~guided & correct).any(1)


def top_share(x: jax.Array, mask: jax.Array, share: float) -> jax.Array:
  """Selects the largest entries where `mask` is True.

  It selects a fraction `share` of them, rounded up, and at least one if there are any. All entries
  that tie with the smallest selected one are selected too.

  Args:
    x: f32[...].
    mask: bool[...].
    share: in (0, 1].

  Returns:
    bool[...], a subset of `mask`.
  """
  count = jnp.maximum(jnp.ceil(share * mask.sum() - COUNT_TOLERANCE), 1).astype(jnp.int32)
  return _largest(_sortable_bits(x), mask, count)


def token_covariance(advantages: jax.Array, log_probs: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns each token's term of the covariance of advantages and log-probs (2505.22617, eq. 10).

  The term is `(A - mean A) (log pi - mean log pi)`, with means over the tokens in `mask`. Training
  on the tokens with the largest terms lowers the policy's entropy most.

  Args:
    advantages: f32[n, g, t].
    log_probs: f32[n, g, t], nats.
    mask: bool[n, g, t], all tokens of a gradient update.

  Returns:
    f32[n, g, t], 0 where `mask` is False.
  """
  deviation = lambda x: jnp.where(mask, x - masked_mean(x, mask), 0.0)
  return deviation(advantages) * deviation(log_probs)


def covariance_band(
  advantages: jax.Array,
  log_probs: jax.Array,
  mask: jax.Array,
  free: jax.Array,
  band: tuple[float, float],
  share: float,
  key: jax.Array,
) -> jax.Array:
  """Selects random tokens whose covariance term lies in a band (Clip-Cov, 2505.22617).

  It selects `max(1, floor(share * tokens in mask))` of the candidates, or all if there are fewer.

  Args:
    advantages, log_probs, mask: as in `token_covariance`.
    free: bool[n, g, t], the tokens that can be selected.
    band: the bounds of the covariance term, both excluded.
    share: in (0, 1].
    key: PRNG key. The selection is the same on every mesh.

  Returns:
    bool[n, g, t], a subset of `free`.
  """
  term = token_covariance(advantages, log_probs, mask)
  candidates = free & (band[0] < term) & (term < band[1])
  return _largest(_random_ranks(key, mask), candidates, _floor_count(share, mask))


def highest_covariance(
  advantages: jax.Array, log_probs: jax.Array, mask: jax.Array, share: float, key: jax.Array
) -> jax.Array:
  """Selects the tokens with the largest covariance term, if it is positive (KL-Cov, 2505.22617).

  It selects `max(1, floor(share * tokens in mask))` tokens, and breaks ties at random: all tokens
  of which the policy is certain (log-prob 0) can share the largest term. The arguments are those of
  `covariance_band`. Returns bool[n, g, t], a subset of `mask`.
  """
  term = token_covariance(advantages, log_probs, mask)
  values = _sortable_bits(term)
  count = _floor_count(share, mask)
  threshold = _threshold(values, mask, count)
  above = mask & (values > threshold)
  ties = mask & (values == threshold)
  chosen = above | _largest(_random_ranks(key, mask), ties, count - above.sum())
  return chosen & (term > 0)


def quantile(x: jax.Array, mask: jax.Array, share: float) -> jax.Array:
  """Returns the smallest masked x that at least a fraction `share` of the masked x do not exceed.

  Args:
    x: f32[...].
    mask: bool[...].
    share: in (0, 1].

  Returns:
    f32[]; 0 if `mask` is False everywhere.
  """
  total = mask.sum()
  below = jnp.maximum(jnp.ceil(share * total - COUNT_TOLERANCE), 1).astype(jnp.int32)
  threshold = _threshold(_sortable_bits(x), mask, total - below + 1)
  is_known = mask.any()
  # The largest value with at least total - below + 1 values not under it.
  bits = jnp.where(threshold < 0, threshold ^ 0x7FFFFFFF, threshold)  # undoes `_sortable_bits`
  return jnp.where(is_known, jax.lax.bitcast_convert_type(bits, jnp.float32), 0.0)


def _random_ranks(key: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns random i32 of the shape of `mask`."""
  draws = jax.random.bits(key, mask.shape, jnp.uint32)
  return jax.lax.bitcast_convert_type(draws, jnp.int32)


def _floor_count(share: float, mask: jax.Array) -> jax.Array:
  return jnp.maximum(jnp.floor(share * mask.sum() + COUNT_TOLERANCE), 1).astype(jnp.int32)


def _sortable_bits(x: jax.Array) -> jax.Array:
  """Returns i32 with the order of the f32 values."""
  x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0.0 equals 0.0
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest(values: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
  """Selects the `count` largest i32 values where `mask` is True, and all ties at the threshold."""
  return mask & (values >= _threshold(values, mask, count))


def _threshold(values: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the largest i32 such that at least `count` masked values are not below it."""
  lowest = jnp.int32(-(2**31))
  enough = lambda threshold: (mask & (values >= threshold)).sum() >= count

  def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    higher = threshold + (jnp.int32(1) << (30 - i))
    return jnp.where(enough(higher), higher, threshold)

  start = jnp.where(enough(jnp.int32(0)), jnp.int32(0), lowest)
  return jax.lax.fori_loop(0, 31, set_bit, start)
