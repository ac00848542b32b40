"""Credit by entropy: the entropy of a unit relative to the mean over its comparison set.

GTPO and GRPO-S are built on it. It is unrelated to the KL divergence, which is also called relative
entropy. All arrays are [n, g, u], where a unit of credit is a token (u = t) or a completion (u =
1). O+ and O- are the units of correct and of incorrect completions. rel(x) is `relative_entropy`.
"Final" and "v1" are the final and the first version of 2508.04349.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Needed, masked_mean, masked_sum


@dataclasses.dataclass(frozen=True)
class TurnSets:
  """Comparison sets of the k-th tokens of the same turn of all completions.

  A turn is a run of drawn tokens without others between them.

  Attributes:
    of_batch: whether completions are compared across prompts, not only within one.
  """

  of_batch: bool

  def sum(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the sum of `x` over the set of each token, f32[n, g, t].

    Args:
      x: f32[n, g, t].
      mask: bool[n, g, t], the tokens of some completions.
    """
    return sum_by_place(x, mask, turn_places(mask), self.of_batch)


@dataclasses.dataclass(frozen=True, eq=False)
class StateSets:
  """Comparison sets of the k-th tokens of the prompt's turns that began in an equal state.

  Attributes:
    states: i32[n, g, t], the number of the state in which the turn of a token began; equal numbers
      of one prompt are equal states. None until the batch is known.
  """

  states: Needed = None

  def sum(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the sum of `x` over the set of each token; see `TurnSets.sum`."""
    t = mask.shape[-1]
    return sum_by_place(x, mask, self.states * t + turn_places(mask) % t, of_batch=False)


def sum_by_place(x: jax.Array, mask: jax.Array, places: jax.Array, of_batch: bool) -> jax.Array:
  """Returns the sum of `x` where `mask` is True over the tokens with the same place, f32[n, g, t].

  Args:
    x: f32[n, g, t].
    mask: bool[n, g, t].
    places: i32[n, g, t] >= 0.
    of_batch: whether places of different prompts are the same.
  """
  n, g, t = mask.shape
  rows = (1, n * g * t) if of_batch else (n, g * t)
  places = jnp.where(mask, places, -1).reshape(rows)
  order = jnp.argsort(places, axis=-1)
  in_order = lambda values: jnp.take_along_axis(values, order, -1)
  begins = jnp.diff(in_order(places), axis=-1, prepend=-2) != 0
  sets = jnp.cumsum(begins, -1) - 1  # numbers of the sets, ascending
  add_up = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, rows[1], indices_are_sorted=True))
  sums = add_up(in_order(jnp.where(mask, x, 0.0).reshape(rows)), sets)
  sums = jnp.take_along_axis(sums, sets, -1)
  return jnp.put_along_axis(sums, order, sums, -1, inplace=False).reshape(n, g, t)


# The comparison sets by the settings (compare, scope): the axes of [n, g, t] that one spans, or
# the sets of turns or of states.
Sets = tuple[int, ...] | TurnSets | StateSets
COMPARE: dict[tuple[str, str], Sets] = {
  ("position", "group"): (1,),  # method 1, "column": the k-th drawn tokens of all completions
  ("position", "batch"): (0, 1),
  ("sequence", "group"): (2,),  # method 2, "row": all tokens of one completion
  ("sequence", "batch"): (2,),
  ("matrix", "group"): (1, 2),  # method 3, "matrix": all tokens of all completions
  ("matrix", "batch"): (0, 1, 2),
  ("turn", "group"): TurnSets(of_batch=False),
  ("turn", "batch"): TurnSets(of_batch=True),
  ("state", "group"): StateSets(),
  ("state", "batch"): StateSets(),  # prompts have no states in common
}

MEANS = ("arithmetic", "geometric")  # of the entropies of a completion

# The base reward and the weight of the entropy term.
BaseAndWeight = tuple[float, float]


class Units(NamedTuple):
  """The inputs of reward shaping, per unit of credit."""

  entropy: jax.Array  # f32[n, g, u], nats
  mask: jax.Array  # bool[n, g, u]
  correct: jax.Array  # bool[n, g, 1]
  reward: jax.Array  # f32[n, g, 1]
  penalty: jax.Array  # f32[n, g, 1]; added on both sides, such as the length penalty
  tokens: jax.Array  # f32[n, g, u], number of tokens of the unit; 0 where mask is False
  # Whether some tokens between those in `mask` are not in it; None if the mask has to tell.
  gaps: bool | None = None
  states: Needed = None  # i32[n, g, u], of turns; needed by `StateSets`
  # The next are None unless the recipe needs them.
  parts: Any = None  # f32[n, g, k], of the reward
  part_weights: Any = None  # f32[n, k]
  # f32[n, g, u], of the scores of tokens, times squared importance weights if there are any
  score_norms: Any = None
  value_gains: Any = None  # f32[n, g, u], as in `Rewards`

  def known(self, sets: Sets) -> Sets:
    """Returns comparison sets with the states that they need."""
    return StateSets(self.states) if isinstance(sets, StateSets) else sets

  @property
  def plus(self) -> jax.Array:
    """bool[n, g, u], O+: the units of correct completions."""
    return self.mask & self.correct

  @property
  def minus(self) -> jax.Array:
    """bool[n, g, u], O-: the units of incorrect completions."""
    return self.mask & ~self.correct


class ShapedRewards(NamedTuple):
  """The shaped rewards R+ and R- as separate arrays; R+ is 0 on O-, R- is 0 on O+."""

  plus: jax.Array  # f32[n, g, u]
  minus: jax.Array  # f32[n, g, u]


class EntropyWeights(NamedTuple):
  """The parameters of `shape_by_entropy`.

  The shaped reward is `base + weight * rel(H)` on O+ and `-base - weight * rel(1 / H)` on O-.
  """

  plus: BaseAndWeight  # on O+
  minus: BaseAndWeight  # on O-
  sets: Sets  # from COMPARE
  h_floor: float  # nats; lower bound applied to H before 1 / H
  clip: tuple[float, float]  # range of the reward on O+, before `Units.penalty` is added


def set_sum(x: jax.Array, mask: jax.Array, sets: Sets) -> jax.Array:
  """Returns the sum of `x` over the comparison set of each entry, which broadcasts to [n, g, t].

  Arguments are as in `relative_entropy`.
  """
  if isinstance(sets, TurnSets | StateSets):
    return sets.sum(x, mask)
  return masked_sum(x, mask, sets, keepdims=True)


def relative_entropy(x: jax.Array, mask: jax.Array, sets: Sets) -> jax.Array:
  """Returns `x` divided by its mean over the comparison set (2508.04349 v1, eqs. 2 and 13).

  The results of a comparison set sum to its size.

  Args:
    x: f32[n, g, t] >= 0, entropy in nats or its inverse.
    mask: bool[n, g, t], the tokens to compare: the sampled tokens of O+, or of O-.
    sets: the comparison sets, from `COMPARE`.

  Returns:
    f32[n, g, t]; 1 in a set with mean 0, and 0 where `mask` is False.
  """
  mean = set_sum(x, mask, sets) / jnp.maximum(set_sum(mask, mask, sets), 1)
  return jnp.where(mask, jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1.0), 1.0), 0.0)


def has_gaps(mask: jax.Array) -> jax.Array:
  """Returns whether a completion has drawn tokens after others, bool[]; `mask` is bool[n, g, t]."""
  return (mask[..., 1:] & ~mask[..., :-1]).any()


def drawn_columns(mask: jax.Array) -> jax.Array:
  """Returns the column that each token moves to if the drawn tokens come first, i32[n, g, t].

  The drawn tokens stay in order, and so do the others. `mask` is bool[n, g, t], the drawn
  tokens.
  """
  drawn = jnp.cumsum(mask, -1)
  others = jnp.cumsum(~mask, -1)
  return jnp.where(mask, drawn - 1, drawn[..., -1:] + others - 1)


def turn_begins(mask: jax.Array) -> jax.Array:
  """Returns whether a token is the first of its turn, bool[n, g, t], for drawn tokens `mask`."""
  return mask & ~jnp.pad(mask[..., :-1], ((0, 0), (0, 0), (1, 0)))


def turn_places(mask: jax.Array) -> jax.Array:
  """Returns a number for the turn and the place in it of each drawn token, i32[n, g, t].

  The k-th tokens of the same turn have the same number. `mask` is bool[n, g, t], the drawn tokens.
  """
  begins = turn_begins(mask)
  drawn = jnp.cumsum(mask, -1)
  turn = jnp.cumsum(begins, -1) - 1
  drawn_before_turn = jax.lax.cummax(jnp.where(begins, drawn - 1, 0), axis=2)
  return turn * mask.shape[-1] + drawn - 1 - drawn_before_turn


def discounted_future(x: jax.Array, mask: jax.Array, discount: float) -> jax.Array:
  """Returns `sum_k discount^(k - t) x_k` over the tokens k >= t of each completion, f32[n, g, t].

  Only tokens in the mask count: their x, and in the discount.

  Args:
    x: f32[n, g, t].
    mask: bool[n, g, t].
    discount: in [0, 1].
  """

  def join(
    later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    factor_later, sum_later = later
    factor, total = earlier
    return factor_later * factor, total + factor * sum_later

  steps = jnp.where(mask, discount, 1.0), jnp.where(mask, x, 0.0)
  return jax.lax.associative_scan(join, steps, reverse=True, axis=x.ndim - 1)[1]


def inverse_entropy(entropy: jax.Array, h_floor: float) -> jax.Array:
  """Returns `1 / max(entropy, h_floor)` f32[n, g, t], in 1/nats: large for confident tokens.

  Without `h_floor`, a single near-certain token would take nearly the complete penalty of its
  comparison set.
  """
  return 1.0 / jnp.maximum(entropy, h_floor)


def effective_participants(share: jax.Array, mask: jax.Array, sets: Sets) -> jax.Array:
  """Returns the effective fraction of a comparison set that shares its credit, f32[] in [0, 1].

  For a set with values x this is the effective number of members, (sum x)^2 / sum x^2, divided by
  the size of the set. The result is the mean over the masked entries, each counted with its set.
  """
  total = set_sum(share, mask, sets)
  squares = set_sum(jnp.square(share), mask, sets)
  count = jnp.maximum(set_sum(mask, mask, sets), 1)
  return masked_mean(jnp.square(total) / jnp.where(squares > 0, squares, 1.0) / count, mask)


def shape_by_entropy(x: Units, weights: EntropyWeights) -> ShapedRewards:
  """Shapes rewards by entropy (2508.04349 final, eqs. 3-11; v1, eqs. 2-8 and 11-19).

  A correct unit earns most where the policy was uncertain; an incorrect unit is penalised most
  where the policy was confident. `Units.penalty` is added on both sides.
  """
  shares = entropy_shares(x, weights.sets, weights.h_floor)
  base, weight = weights.plus
  plus = jnp.clip(base + weight * shares.plus, *weights.clip) + x.penalty
  base, weight = weights.minus
  minus = -base - weight * shares.minus + x.penalty
  return ShapedRewards(jnp.where(x.plus, plus, 0.0), jnp.where(x.minus, minus, 0.0))


def entropy_shares(x: Units, sets: Sets, h_floor: float) -> ShapedRewards:
  """Returns rel(H) on O+ and rel(1/H) on O- (v1, eqs. 2 and 13).

  The values of a comparison set sum to its size.
  """
  return ShapedRewards(
    relative_entropy(x.entropy, x.plus, sets),
    relative_entropy(inverse_entropy(x.entropy, h_floor), x.minus, sets),
  )


def share_metrics(x: Units, sets: Sets, h_floor: float) -> dict[str, jax.Array]:
  """Returns diagnostics of how the entropy terms distribute the credit, f32[] each.

  `credit/participants_*` is the effective fraction of a comparison set that shares its credit.
  `credit/conservation_residual` compares the sum of rel(H) over O+ with the number of units in O+,
  and that of rel(1/H) over O- with the number in O-. It is the larger absolute difference per unit,
  and differs from 0 only by rounding.
  """
  shares = entropy_shares(x, sets, h_floor)
  residual = lambda share, side: jnp.abs(share.sum() - side.sum()) / jnp.maximum(side.sum(), 1)
  return {
    "credit/participants_correct": effective_participants(shares.plus, x.plus, sets),
    "credit/participants_incorrect": effective_participants(shares.minus, x.minus, sets),
    "credit/conservation_residual": jnp.maximum(
      residual(shares.plus, x.plus), residual(shares.minus, x.minus)
    ),
  }


def completion_entropy(entropy: jax.Array, mask: jax.Array, mean: str, h_floor: float) -> jax.Array:
  """Returns the mean entropy of each completion over its tokens, in nats.

  Args:
    entropy: f32[n, g, t], nats.
    mask: bool[n, g, t].
    mean: one of `MEANS`.
    h_floor: nats; lower bound applied to the entropies before the geometric mean.

  Returns:
    f32[n, g, 1].
  """
  if mean == "geometric":
    return jnp.exp(masked_mean(jnp.log(jnp.maximum(entropy, h_floor)), mask, -1, keepdims=True))
  return masked_mean(entropy, mask, -1, keepdims=True)
