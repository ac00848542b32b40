"""The arrays passed between the parts of the package, masked reductions, and random keys.

The shapes in comments and docstrings use these letters for dimensions:

  n  prompts in the batch             g  completions per prompt (a group is this axis)
  p  prompt positions, padded left    t  completion positions
  s  sequence positions               b  rows of a batch without groups
  v  vocabulary                       d  model width
  h  query heads                      k  key/value heads
  r  query heads per key/value head   e  features per head
  u  units of credit per completion: t if a unit is a token, 1 if it is a completion
  w  rows per prompt, if completions are packed
  m  the most completions in one such row
  c  positions of a chunk, or the most conversations of a completion

In the matrix products of `models`, `a` is the contracted axis and `c` the last axis of the result.
In `sampling`, s, m and w have other meanings; see `sampling.cache`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp

SHORTEST_ARRAY = 64  # positions; shorter arrays save little time, and each length needs a program


@flax.struct.dataclass
class Prompts:
  """A batch of prompts, padded on the left: every prompt's last token is at position p - 1."""

  tokens: jax.Array  # i32[n, p]
  lengths: jax.Array  # i32[n], tokens without padding
  # [n, p, layers with experts, k], as in `Rollouts`
  routes: jax.Array | None = None

  @property
  def mask(self) -> jax.Array:
    """bool[n, p], False on padding."""
    width = self.tokens.shape[1]
    return jnp.arange(width) >= width - self.lengths[:, None]


@flax.struct.dataclass
class Packing:
  """The layout of each prompt's completions in shared rows, which have less padding.

  `training.packing.plan_rows` computes it.
  """

  # i32[n, w, s], the index of each token's completion within its row; m on padding.
  # None if each row has one completion.
  segment: jax.Array | None
  # i32[n, w, s], the flat index of each token in its prompt's [g, t]; -1 on padding.
  source: jax.Array
  # i32[n, g], the flat index of each completion's first token in its prompt's [w, s].
  start: jax.Array
  # i32[n, g, c], `Rollouts.begins`. Segments are then conversations, not completions.
  begins: jax.Array | None = None

  @property
  def conversations(self) -> int:
    """The most conversations of a completion."""
    return 1 if self.begins is None else self.begins.shape[2]

  def places(self, t: int) -> jax.Array | None:
    """Returns the place of each position in its conversation, i32[n, g, t].

    None if every completion is one conversation.
    """
    if self.begins is None:
      return None
    begins = self.begins[..., None, :]
    positions = jnp.arange(t)
    return positions - jnp.where(begins <= positions[:, None], begins, 0).max(-1)

  def pack(self, x: jax.Array) -> jax.Array:
    """Converts `x` [n, g, t, ...] to rows [n, w, s, ...], with 0 on padding."""
    packed = _gather(x, self.source)
    is_padding = (self.source < 0).reshape(*self.source.shape, *[1] * (x.ndim - 3))
    return jnp.where(is_padding, jnp.zeros_like(packed), packed)

  def unpack(self, x: jax.Array, t: int) -> jax.Array:
    """Converts rows `x` [n, w, s] to [n, g, t], the inverse of `pack`.

    Values after the end of a completion are arbitrary.
    """
    index = self.start[:, :, None] + jnp.arange(t)
    return _gather(x, jnp.minimum(index, math.prod(x.shape[1:3]) - 1))


def conversation_numbers(begins: jax.Array, t: int) -> jax.Array:
  """Returns the number of the conversation that each position belongs to, i32[n, g, t], from 0.

  Args:
    begins: i32[n, g, c], as in `Rollouts`.
    t: completion positions.
  """
  return (begins[..., None, :] <= jnp.arange(t)[:, None]).sum(-1, dtype=jnp.int32) - 1


def max_per_row(g: int, w: int) -> int:
  """Returns m, the most completions that may share a row if g completions are packed into w rows.

  It is twice the average number per row (rounded up), but at most g. If every completion has its
  own row (w >= g), it is 1.
  """
  return min(2 * -(-g // w), g) if w < g else 1


def array_lengths(longest: int, shards: int = 1) -> list[int]:
  """Returns the lengths, ascending, to which arrays of up to `longest` positions are padded.

  They are `longest`, half of it, a quarter of it and so on, as long as they are at least
  `SHORTEST_ARRAY`; each half is rounded up to a multiple of `shards`. There are few of them because
  every length needs a compiled program of its own. Halving bounds the padding: only the shortest
  array can be more than twice as long as its contents.
  """
  lengths = [longest]
  while (half := -(-lengths[0] // (2 * shards)) * shards) >= SHORTEST_ARRAY and half < lengths[0]:
    lengths.insert(0, half)
  return lengths


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  """Gathers entries of each prompt's part of `x` by flat index.

  Args:
    x: [n, a, b, ...].
    index: i32[n, c, d], indices into the flattened axes a and b of `x`.

  Returns:
    [n, c, d, ...].
  """
  n = x.shape[0]
  rest = x.shape[3:]
  flat = index.reshape(n, -1, *[1] * len(rest))
  gathered = jnp.take_along_axis(x.reshape(n, -1, *rest), flat, axis=1)
  return gathered.reshape(*index.shape, *rest)


@flax.struct.dataclass
class Rollouts:
  """Sampled completions, with each token's log-prob and entropy under the sampling policy."""

  prompts: Prompts
  tokens: jax.Array  # i32[n, g, t]; the padding id where `present` is False
  # bool[n, g, t]; True on all tokens of a completion. They are the first ones of its row.
  present: jax.Array
  # bool[n, g, t]; True on the tokens that the policy has drawn, EOS included. Tokens that are
  # present but not drawn are context: nothing is learned from them, and no statistic reads them.
  mask: jax.Array
  # f32[n, g, t], nats; at the sampling temperature, before penalty, top-k, top-p and min-p.
  log_probs: jax.Array
  entropy: jax.Array  # f32[n, g, t], nats; of the same unfiltered distribution
  # bool[n, g]; True if the completion ended at a stop token or a stop string, False if it was cut
  # off.
  finished: jax.Array

  # The fields below are None in runs that do not use them.
  # u8 or u16 [n, g, t, layers with experts, k]: the experts that computed each token as an input of
  # the sampler; the largest value where that was not recorded.
  routes: jax.Array | None = None
  # bool[n, g]; True if a guide sampled the completion; log_probs and entropy are then the guide's.
  guided: jax.Array | None = None
  # bool[n, g]; True if the policy of an earlier step sampled the completion.
  stale: jax.Array | None = None
  # i32[n, g, t]; the number of updates of the policy that drew the token.
  versions: jax.Array | None = None
  # f32[n, g, t], nats; under the distribution that was drawn from, after penalty and filters.
  drawn_log_probs: jax.Array | None = None
  # f32[n, g, t], nats; `log_probs` recomputed by the trainer, except that a guide's are copied.
  rescored: jax.Array | None = None
  # f32[n, g, t], nats; log-probs under the frozen reference policy.
  reference: jax.Array | None = None
  # f32[n, g, t], nats; log-probs under the teacher.
  teacher: jax.Array | None = None
  # f32[n, g, t]; the squared norm of the gradient of the token's log-prob in the logits, by the
  # trainer before the update: 1 - 2 p[token] + sum(p^2).
  score_norms: jax.Array | None = None
  # The prompts that the teacher reads; None if they are the policy's.
  teacher_prompts: Prompts | None = None
  # i32[n, g, c], where the conversations of each completion begin, ascending from 0; t for those
  # that it does not have. Each continues the prompt by itself, and attends to no other one. None if
  # every completion is one conversation. The packing of a placed batch has them instead.
  begins: jax.Array | None = None
  # Whether some tokens between those in `mask` are not in it; None if that is not known. The update
  # is compiled for it.
  gaps: bool | None = flax.struct.field(pytree_node=False, default=None)
  # How the trainer packs completions into rows; None if every completion has a row of its own.
  packing: Packing | None = None

  @property
  def lengths(self) -> jax.Array:
    """i32[n, g], in tokens, including the stop token and tokens that were not drawn."""
    return self.present.sum(-1)

  @property
  def sampler_log_probs(self) -> jax.Array:
    """f32[n, g, t], nats; of the tokens when they were drawn."""
    return self.log_probs if self.drawn_log_probs is None else self.drawn_log_probs

  @property
  def old_log_probs(self) -> jax.Array:
    """f32[n, g, t], nats; the denominator of the importance ratio."""
    return self.log_probs if self.rescored is None else self.rescored

  @property
  def for_teacher(self) -> Rollouts:
    """The rollouts with the prompts that the teacher reads."""
    if self.teacher_prompts is None:
      return self
    return self.replace(prompts=self.teacher_prompts, teacher_prompts=None)

  @property
  def divergence(self) -> jax.Array | None:
    """f32[n, g, t], nats; `old_log_probs` minus the teacher's, None without a teacher."""
    return None if self.teacher is None else self.old_log_probs - self.teacher


@flax.struct.dataclass
class Rewards:
  """The verifier's verdict on each completion, and its rewards."""

  correct: jax.Array  # bool[n, g]
  reward: jax.Array  # f32[n, g]; what the baselines normalise, before `penalty` is added
  # f32[n, g]; added to the (shaped) rewards of O+ and O-. It contains the length penalty and, with
  # entropy shaping, the reward parts other than "correct", which `reward` then does not contain.
  penalty: jax.Array
  # bool[n, g]; False excludes a completion from loss and statistics. None if all are valid.
  valid: jax.Array | None = None
  # bool[n, g]; False if a completion has no verdict, in which case `correct` has no meaning. None
  # if all completions have one.
  scored: jax.Array | None = None
  # f32[n, g, t]; the reward of the turn that a token is in, 0 on tokens that were not drawn. Those
  # of a completion's turns sum to its reward. None if the algorithm does not compare turns.
  turn_reward: jax.Array | None = None
  # i32[n, g, t]; the number of the state in which that turn began. Equal numbers of one prompt are
  # equal states. None if the algorithm does not compare turns.
  turn_state: jax.Array | None = None
  # f32[n, g, k], the parts of the reward without their weights, and f32[n, k], the weights. None if
  # the algorithm does not normalise each part.
  parts: jax.Array | None = None
  part_weights: jax.Array | None = None
  # f32[n, g, t], the value after the segment that a token is in minus the value before it; NaN on
  # tokens that are not learned from. None if the algorithm measures no values.
  value_gains: jax.Array | None = None


# An array, or None where nothing needs it: `Signals.need` checks what is read.
Needed: TypeAlias = jax.Array | Any


@flax.struct.dataclass
class Signals:
  """The inputs of a batch's credit and loss, all of them constant in the gradient.

  A batch has one, from its collection to the objective; minibatches and micro-batches have slices
  of it. The first fields are known from the start, the others as they are computed. Fields
  that nothing needs are None.
  """

  # bool[n, g, t]; sampled tokens. For the loss, only those in `Algorithm.loss_mask`.
  mask: jax.Array
  entropy: Needed = None  # f32[n, g, t], nats; of the sampling policy's full distribution
  correct: Needed = None  # bool[n, g]; True for completions in O+, False for those in O-
  # f32[n, g]; the verifier's reward. Recipes with entropy shaping ignore it.
  reward: Needed = None
  # f32[n, g]; added to the (shaped) reward of correct and of incorrect completions: the length
  # penalty and, with entropy shaping, the parts of the reward other than "correct". None for 0.
  penalty: Needed = None
  # bool[n, g]; completions sampled from a guide, whose ratio is capped instead of clipped.
  guided: Needed = None
  # f32[n, g, t], nats; the sampling policy's log-prob minus the teacher's; needed with a teacher.
  divergence: Needed = None
  turn_reward: Needed = None  # f32[n, g, t], as in `Rewards`; needed with `turn_credit`
  turn_state: Needed = None  # i32[n, g, t], as in `Rewards`; needed with `turn_credit`
  # f32[n, g, k] and f32[n, k], as in `Rewards`; needed if each part is normalised
  parts: Needed = None
  part_weights: Needed = None
  score_norms: Needed = None  # f32[n, g, t], as in `Rollouts`; needed by "otb"
  value_gains: Needed = None  # f32[n, g, t], as in `Rewards`; needed with `continuations`
  # Whether some tokens between those in `mask` are not in it; None if the mask has to tell.
  gaps: bool | None = flax.struct.field(pytree_node=False, default=None)

  log_probs_old: Needed = None  # f32[n, g, t], nats; the denominator of the ratio
  advantages: Needed = None  # f32[n, g, t], from `Algorithm.advantages`
  # f32[n, g, t], from `Algorithm.token_weights` of a complete minibatch. None for
  # `token_weights(mask)`; with `forking_share`, tokens with advantage 0 are first removed from it.
  weights: Needed = None
  # bool[n, g, t], from `Algorithm.select`; needed if the objective selects.
  selected: Needed = None
  # f32[n, g, t], the weights of the entropies: `weights` times the coefficient of the entropy
  # bonus. None for `weights` times `entropy_coef`.
  entropy_weights: Needed = None
  # f32[n, g, t], importance weights of the complete batch. None with `tis_cap`: computed from
  # `log_probs_old` and `log_probs_sampler`.
  importance: Needed = None
  # f32[n, g, t], nats; of the tokens when they were drawn, computed by the sampler; needed with
  # `tis_cap` if `importance` is None.
  log_probs_sampler: Needed = None
  # f32[n, g, t], nats; of the frozen reference; needed with `kl_weight`.
  log_probs_reference: Needed = None
  # f32[n, g, t]; the weights of the divergences, if a teacher's distributions are matched.
  teacher_weights: Needed = None

  @classmethod
  def of(cls, rollouts: Rollouts, rewards: Rewards) -> Signals:
    """Returns the inputs of the credit of a batch, of all completions."""
    return cls(
      mask=rollouts.mask,
      entropy=rollouts.entropy,
      correct=rewards.correct,
      reward=rewards.reward,
      penalty=rewards.penalty,
      guided=rollouts.guided,
      divergence=rollouts.divergence,
      turn_reward=rewards.turn_reward,
      turn_state=rewards.turn_state,
      parts=rewards.parts,
      part_weights=rewards.part_weights,
      score_norms=rollouts.score_norms,
      value_gains=rewards.value_gains,
      gaps=rollouts.gaps,
    )

  def only(self, valid: jax.Array | None) -> Signals:
    """Returns the signals without the tokens of completions that are not `valid`, bool[n, g]."""
    return self if valid is None else self.replace(mask=self.mask & valid[..., None])

  def of_tokens(self) -> Signals:
    """Returns the signals that `Algorithm.token_loss` reads."""
    return self.after_credit().replace(
      entropy=None, correct=None, reward=None, penalty=None, divergence=None, teacher_weights=None
    )

  def after_credit(self) -> Signals:
    """Returns the signals without some that only the advantages need."""
    names = ("turn_reward", "turn_state", "parts", "part_weights", "score_norms", "value_gains")
    return self.replace(**dict.fromkeys(names))

  def need(self, *names: str) -> None:
    """Raises TypeError if a field is None."""
    if missing := [name for name in names if getattr(self, name) is None]:
      raise TypeError(f"missing signals: {', '.join(missing)}")

  @property
  def own(self) -> jax.Array:
    """bool[n, g, t]: the tokens in `mask` that the policy itself sampled."""
    return self.mask if self.guided is None else self.mask & ~self.guided[..., None]


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
  """Returns the mean of `x` where `mask` is True, along `axes`; 0 where the mask is empty."""
  mask_of_x = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape))
  count = mask_of_x.sum(axes, keepdims=keepdims)
  return masked_sum(x, mask, axes, keepdims) / jnp.maximum(count, 1)


def mean_or_nan(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean of `x` where `mask` is True, f32[]; NaN if it is False everywhere."""
  return jnp.where(mask.any(), masked_mean(x, mask), jnp.nan)


class KeyStream(enum.IntEnum):
  """The uses of random keys; none shares a random stream with another.

  The numbers are part of a run's reproducibility and never change.
  """

  INIT = 0
  SAMPLE = 1
  EVALUATE = 2
  GUIDE = 3
  CONTINUE = 4
  MEASURE = 5


def key_for(seed: int, stream: KeyStream, step: int = 0) -> jax.Array:
  """Returns the typed PRNG key of one use at one step (or generation batch)."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)
