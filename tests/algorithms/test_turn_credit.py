"""Advantages of turns by hand, and laws: one turn is GRPO, a tool gets no credit."""

import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import arrays, random_batch

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.relative_entropy import discounted_future
from gtpo_jax.algorithms.turn_credit import compare_turns
from gtpo_jax.runtime.errors import UserError

TURNS = ("gigpo", "turn_return", "mt_grpo")
# Three completions of one prompt; 0 is a token of the environment. The first two have two turns.
MASK = jnp.asarray([[[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]], bool)
# Their rewards: 1 and 2; 0 and 1; 1.
TURN_REWARD = jnp.asarray([[[1.0, 0, 2, 2], [0, 0, 0, 1], [1, 1, 0, 0]]])
REWARD = jnp.asarray([[3.0, 1.0, 1.0]])
# All begin in state 0; the second turns in states 1 and 0.
TURN_STATE = jnp.asarray([[[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]])
BATCH = {
  "entropy": jnp.ones((1, 3, 4)),
  "mask": MASK,
  "correct": jnp.asarray([[True, False, False]]),
  "reward": REWARD,
  "turn_reward": TURN_REWARD,
  "turn_state": TURN_STATE,
}
Z = np.sqrt(2.0)  # the z-scores of 3, 1, 1 are Z, -Z / 2, -Z / 2


def close(got, expected):
  np.testing.assert_allclose(np.asarray(got)[0], expected, rtol=1e-5, atol=1e-6)


def test_gigpo_by_hand():
  """Discount 1/2. Returns: 1 + 2/2 = 2 and 2; 0 + 1/2 = 0.5 and 1; 1.

  State 0 has the returns 2, 0.5, 1, 1 (mean 1.125); state 1 has a single one.
  """
  own = np.array([2, 0.5, 1, 1]) - 1.125
  std = np.sqrt((own**2).mean())
  first, second, again, third = own / std
  got = make("gigpo", turn_discount=0.5, step_weight=0.5).advantages(**BATCH)
  a, b = Z, -Z / 2
  expected = [
    [a + first / 2, 0, a, a],
    [b + second / 2, b + second / 2, 0, b + again / 2],
    [b + third / 2, b + third / 2, 0, 0],
  ]
  close(got, expected)
  centred = make("gigpo", turn_discount=0.5, turn_norm="mean", outcome_weight=0.0)
  first, second, again, third = own
  expected = [[first, 0, 0, 0], [second, second, 0, again], [third, third, 0, 0]]
  close(centred.advantages(**BATCH), expected)


def test_turn_return_by_hand():
  """First turns: 3, 1, 1. Second turns: 2 and 1."""
  got = make("turn_return").advantages(**BATCH)
  close(got, [[Z, 0, 1, 1], [-Z / 2, -Z / 2, 0, -1], [-Z / 2, -Z / 2, 0, 0]])


def test_mt_grpo_by_hand():
  """Outcomes: 3 - 1, 1 - 0, 1. The turns before the last: 1 and 0."""
  got = make("mt_grpo").advantages(**BATCH)
  close(got, [[Z + 1, 0, Z, Z], [-Z / 2 - 1, -Z / 2 - 1, 0, -Z / 2], [-Z / 2, -Z / 2, 0, 0]])


def test_gtpo_with_the_advantages_of_states():
  """They are added to GTPO's, whose entropies are compared where the state was equal."""
  entropy = jnp.asarray([[[1.0, 9, 5, 9], [3, 9, 9, 2], [9, 9, 9, 9]]])
  batch = BATCH | {"entropy": entropy, "correct": jnp.asarray([[True, True, False]])}
  settings = {"alpha1": 0.0, "alpha2": 1.0, "norm_scope": "group", "compare": "state"}
  algorithm = make("gtpo", turn_credit="state", step_weight=0.0, **settings)
  shaped, _ = algorithm.shaped(**batch)
  # The first tokens of O+ in state 0: 1, 3 and 2; the second token of a turn there: 9. State 1: 5,
  # 9.
  close(shaped.plus, [[1 / 2, 0, 1, 1], [3 / 2, 1, 0, 2 / 2], [0, 0, 0, 0]])
  alone = make("gigpo", outcome_weight=0.0, turn_discount=1.0).advantages(**batch)
  both = make("gtpo", turn_credit="state", **settings).advantages(**batch)
  close(both - algorithm.advantages(**batch), np.asarray(alone)[0])


@pytest.mark.parametrize(("name", "factor"), [("gigpo", 2), ("turn_return", 1), ("mt_grpo", 1)])
def test_one_turn_is_grpo(name, factor):
  """With GiGPO, all began in one state, so both advantages are GRPO's."""
  batch = random_batch(3, "grpo")
  total = batch["reward"] + batch["penalty"]
  turns = {
    "turn_reward": np.where(batch["mask"], total[..., None], 0),
    "turn_state": np.zeros(batch["mask"].shape, np.int32),
  }
  expected = make("grpo").advantages(**arrays(batch))
  got = make(name).advantages(**arrays(batch | turns))
  np.testing.assert_allclose(got, factor * expected, rtol=1e-5, atol=1e-5)


def test_a_constant_of_all_returns_of_a_state_changes_nothing():
  rng = np.random.default_rng(5)
  begins = rng.random((3, 4, 6)) < 0.6
  state = rng.integers(0, 3, begins.shape)
  value = rng.normal(size=begins.shape)
  shift = rng.normal(size=(3, 3))[np.arange(3)[:, None, None], state]
  for size in (jnp.abs(value), None):
    got = compare_turns(jnp.asarray(value), jnp.asarray(begins), jnp.asarray(state), size)
    moved = compare_turns(jnp.asarray(value + shift), jnp.asarray(begins), jnp.asarray(state), size)
    np.testing.assert_allclose(got, moved, atol=1e-5)
    assert np.abs(np.asarray(got)).max() > 0.5


def test_returns_of_long_episodes():
  """A slow loop in float64, for up to 200 turns."""
  rng = np.random.default_rng(6)
  begins = rng.random((2, 2, 400)) < 0.5
  reward = np.where(begins, rng.normal(size=begins.shape), 0)
  expected = np.zeros(begins.shape)
  for i, j in np.ndindex(2, 2):
    following = 0.0
    for k in reversed(np.flatnonzero(begins[i, j])):
      following = reward[i, j, k] + 0.95 * following
      expected[i, j, k] = following
  got = discounted_future(jnp.asarray(reward, jnp.float32), jnp.asarray(begins), 0.95)
  np.testing.assert_allclose(np.where(begins, got, 0.0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gigpo", "turn_return"])
def test_large_rewards_that_add_up_to_the_same_earn_nothing(name):
  """All episodes succeed with rewards of equal sums, in other orders: only rounding differs."""
  rng = np.random.default_rng(7)
  rewards = np.asarray([1e4 / 3, 271.828, -1e4 / 3, 31.4159, 0.577], np.float32)
  reward = np.stack([rng.permutation(rewards) for _ in range(8)])
  mask = np.tile([True, False], 5)
  batch = {
    "mask": np.broadcast_to(mask, (1, 8, 10)),
    "entropy": np.ones((1, 8, 10), np.float32),
    "correct": np.ones((1, 8), bool),
    "reward": np.full((1, 8), rewards.sum()),
    "turn_reward": np.where(mask, np.repeat(reward, 2, 1), 0)[None],
    "turn_state": np.where(np.arange(10) < 2, 0, np.arange(80).reshape(8, 10))[None],
  }
  credit = make(name, outcome_weight=0.0, turn_discount=1.0)
  first = lambda x: np.asarray(credit.advantages(**arrays(x)))[0, :, 0]
  assert not first(batch).any()
  larger = batch["turn_reward"].copy()
  larger[0, 0, 0] += 1.0  # a difference of a ten thousandth of the rewards is real
  assert np.abs(first(batch | {"turn_reward": larger})).max() > 2


def test_what_has_no_meaning_is_refused():
  with pytest.raises(UserError, match=r"step_weight = 2.0 only has an effect with turn_credit"):
    make("grpo", step_weight=2.0)
  with pytest.raises(UserError, match=r"turn_discount = 0.5 only has an effect with turn_credit ="):
    make("mt_grpo", turn_discount=0.5)
  with pytest.raises(UserError, match=r"step_weight and algorithm.outcome_weight are both 0"):
    make("gigpo", step_weight=0.0, outcome_weight=0.0)
  with pytest.raises(UserError, match=r"ratio = 'geometric' is the ratio of a completion"):
    make("gigpo", ratio="geometric")
  with pytest.raises(UserError, match=r"compare = 'state' needs turns that are compared"):
    make("gtpo", compare="state")
  without = {key: value for key, value in BATCH.items() if "turn" not in key}
  with pytest.raises(
    UserError, match=r"'gigpo' compares turns .* needs turn_reward and turn_state"
  ):
    make("gigpo").advantages(**without)
