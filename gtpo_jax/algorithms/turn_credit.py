"""Credit of turns: the advantage of a turn among comparable turns of the same prompt's episodes.

A turn is a run of drawn tokens without others between them. The arrays are [n, g, t]; what belongs
to a turn is on all of its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.relative_entropy import discounted_future, sum_by_place, turn_begins
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.fields import AT_LEAST_0, Checked, Condition, number, one_of, setting

TURN_CREDITS = ("none", "state", "return", "reward")
TURN_NORMS = ("std", "mean")
# A standard deviation of values that are equal but for rounding: this share of the rewards that
# were summed. A float32 has a relative error of 2**-24.
ROUNDING = 2**-18


@dataclasses.dataclass(frozen=True)
class TurnCredit(Checked):
  """The credit of a turn beside its completion: `outcome_weight * A + step_weight * A_turn`.

  A is the advantage of the completion, as without turns, and A_turn compares something of the turn
  with the same of other turns of the prompt's episodes, by their mean and their population
  standard deviation:

  - "state": the discounted return from the turn on, among the turns that began in an equal state
    (GiGPO, 2505.10978, section 4.2). A state that occurs once has nothing to compare: A_turn is 0.
  - "return": the same return, among the turns with the same number (2511.14846, section 3).
  - "reward": the reward of the turn alone, among the turns with the same number. The last turn has
    no A_turn, and A compares what the rewards of earlier turns leave of the completion's reward
    (MT-GRPO, 2505.11821, section 4).

  The rewards of a completion's turns sum to its reward. A turn gets the environment's reward for
  it, times the weight of the part "env"; the last turn also gets all other parts.
  """

  prefix: ClassVar[str] = "algorithm."
  read_if: ClassVar[Mapping[str, Condition]] = {
    "turn_discount": Condition(
      'turn_credit = "state" or "return"', lambda x: x.turn_credit in ("state", "return")
    ),
    **dict.fromkeys(
      ("step_weight", "outcome_weight", "turn_norm"), Condition("turn_credit", lambda x: bool(x))
    ),
  }

  turn_credit: str = setting(
    "none",
    'what the turns of episodes earn beside their completion: "none", "state" (returns compared '
    'where the state was equal), "return" (returns compared by the number of the turn) or '
    '"reward" (rewards of single turns compared by the number of the turn).',
    one_of(TURN_CREDITS),
  )
  step_weight: float = setting(1.0, "the weight of a turn's own advantage.", AT_LEAST_0)
  outcome_weight: float = setting(
    1.0, "the weight of the completion's advantage, if turns have their own.", AT_LEAST_0
  )
  turn_discount: float = setting(
    1.0,
    "how much the reward of the next turn counts in the return of a turn.",
    number(lambda x: 0 <= x <= 1, "in [0, 1]"),
  )
  turn_norm: str = setting(
    "std",
    'whether the advantages of turns are divided by their standard deviation ("std") or only '
    'centred ("mean").',
    one_of(TURN_NORMS),
  )

  def __post_init__(self):
    super().__post_init__()
    if not self.step_weight and not self.outcome_weight:
      raise UserError(
        "algorithm.step_weight and algorithm.outcome_weight are both 0, so that no token would "
        "get an advantage; raise one of them"
      )

  def __bool__(self) -> bool:
    return self.turn_credit != "none"

  def earlier_rewards(self, reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the part of a completion's reward that A leaves out, f32[n, g]; 0 unless "reward".

    Args:
      reward: f32[n, g, t], of the turn that each token is in.
      mask: bool[n, g, t], drawn tokens.
    """
    begins = turn_begins(mask)
    if self.turn_credit != "reward":
      return jnp.zeros(mask.shape[:2], jnp.float32)
    return jnp.where(begins & _has_next(begins), reward, 0.0).sum(-1)

  def __call__(
    self, advantages: jax.Array, reward: jax.Array, state: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns the advantages of tokens plus their turns', f32[n, g, t]; 0 outside `mask`.

    Args:
      advantages: f32[n, g, t] or f32[n, g, 1], of the completions.
      reward: f32[n, g, t], of the turn that each token is in.
      state: i32[n, g, t], the number of the state in which that turn began, in [0, g t); equal
        numbers of one prompt are equal states.
      mask: bool[n, g, t], drawn tokens.
    """
    begins = turn_begins(mask)
    value = jnp.where(begins, reward, 0.0)
    size = jnp.abs(value)
    compared = begins
    if self.turn_credit == "reward":
      compared = begins & _has_next(begins)
    else:
      value, size = (discounted_future(x, begins, self.turn_discount) for x in (value, size))
    by = state if self.turn_credit == "state" else jnp.cumsum(begins, -1) - 1
    own = compare_turns(value, compared, by, size if self.turn_norm == "std" else None)
    total = self.outcome_weight * advantages + self.step_weight * hold(own, begins)
    return jnp.where(mask, total, 0.0)


def compare_turns(
  value: jax.Array, begins: jax.Array, by: jax.Array, size: jax.Array | None = None
) -> jax.Array:
  """Returns the value of each turn minus the mean of the turns of the prompt with the same `by`.

  Args:
    value: f32[n, g, t], read where `begins` is True.
    begins: bool[n, g, t], the first tokens of the turns that are compared.
    by: i32[n, g, t], in [0, g t).
    size: f32[n, g, t], the sum of the magnitudes that each value is a sum of, to divide by the
      population standard deviation; None to only subtract the mean. The result is 0 where the
      deviation is at most `ROUNDING` times the mean size.

  Returns:
    f32[n, g, t]; 0 where `begins` is False.
  """
  add_up = lambda x: sum_by_place(x, begins, by, of_batch=False)
  count = jnp.maximum(add_up(jnp.ones(begins.shape)), 1.0)
  centred = value - add_up(value) / count
  # The second pass removes the rounding error of the first: equal values have std 0.
  centred -= add_up(centred) / count
  if size is not None:
    std = jnp.sqrt(add_up(jnp.square(centred)) / count)
    differ = std > ROUNDING * add_up(size) / count
    centred = jnp.where(differ, centred / jnp.where(differ, std, 1.0), 0.0)
  return jnp.where(begins, centred, 0.0)


def hold(x: jax.Array, begins: jax.Array) -> jax.Array:
  """Returns x of the first token of the turn that a token is in, or of the latest turn before it.

  Args:
    x: f32[n, g, t].
    begins: bool[n, g, t], the first tokens of turns.
  """
  latest = jax.lax.cummax(jnp.where(begins, jnp.arange(x.shape[-1]), 0), axis=x.ndim - 1)
  return jnp.take_along_axis(x, latest, -1)


def _has_next(begins: jax.Array) -> jax.Array:
  """Returns whether a turn begins after a token, bool[n, g, t]."""
  return jnp.cumsum(begins, -1) < begins.sum(-1, keepdims=True)
