"""What the settings of the shaping and of the advantages do."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import BONUS, COMPARISONS, arrays, random_batch, strong
from slow_reference import TWO_COLLECTIONS

from gtpo_jax.algorithms import make


@pytest.mark.parametrize(
  ("name", "each"), [("gtpo", -1.2), ("gtpo_v2", -1.0), ("grpo_s", -1.2), ("grpo_s_v2", -1.0)]
)
def test_the_floor_is_in_nats(name, each):
  """If no entropy is above 0.4 nats, a floor of 0.4 makes all penalties equal; 0.1 does not."""
  batch = random_batch(14) | {"penalty": np.zeros((7, 5), np.float32)}
  low = arrays(batch | {"entropy": np.minimum(batch["entropy"], 0.4)})

  def penalties(floor):
    shaped, units = strong(name, h_floor=floor).shaped(**low)
    return np.asarray(shaped.minus)[np.asarray(units.minus)]

  np.testing.assert_allclose(penalties(0.4), each, rtol=1e-5)
  assert np.ptp(penalties(0.1)) > 0.1


@pytest.mark.parametrize(
  ("name", "base", "bonus"), [("gtpo", "alpha1", "alpha2"), ("grpo_s", "beta1", "beta2")]
)
def test_both_weights_matter(name, base, bonus):
  x = arrays(random_batch(5) | {"penalty": None})
  advantages = lambda a, b: np.asarray(make(name, **{base: a, bonus: b}).advantages(**x))
  assert np.abs(advantages(1.0, 0.0) - advantages(1.0, 0.5)).max() > 0.1
  assert np.abs(advantages(0.5, 0.5) - advantages(1.0, 0.5)).max() > 0.1
  # Z-scores are invariant to a common factor.
  np.testing.assert_allclose(advantages(2.0, 1.0), advantages(1.0, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TWO_COLLECTIONS)
def test_entropy_rewards_correct_units_and_spares_incorrect_ones(name):
  x = {
    "entropy": jnp.asarray([[[0.2], [1.5], [0.2], [1.5]]]),
    "mask": jnp.ones((1, 4, 1), bool),
    "correct": jnp.asarray([[True, True, False, False]]),
    "reward": jnp.zeros((1, 4)),
  }
  sure, unsure, sure_wrong, unsure_wrong = make(name).advantages(**x).ravel().tolist()
  assert unsure > sure > 0 > sure_wrong and unsure_wrong > sure_wrong


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "gtpo_v1", "grpo_s_v2"])
def test_sign_guard_clamps_only_wrong_signs(name):
  rng = np.random.default_rng(7)
  correct = np.ones((2, 16), bool)
  correct[:, 0] = False  # with 15 of 16 correct, many correct units get A < 0 without the guard
  x = arrays(
    {
      "entropy": rng.gamma(0.5, 1.0, (2, 16, 8)).astype(np.float32),
      "mask": np.ones((2, 16, 8), bool),
      "correct": correct,
      "reward": correct.astype(np.float32),
    }
  )
  free, guarded = (
    np.asarray(make(name, sign_guard=guard, **{BONUS[name]: 1.0}).advantages(**x))
    for guard in (False, True)
  )
  flipped = (free < 0) & correct[..., None]
  assert flipped.mean() > 0.1
  np.testing.assert_array_equal(guarded, np.where(flipped, 0, free))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo"])
def test_a_spread_of_rewards_below_1e_6_is_no_signal(name):
  mask = jnp.ones((1, 2, 3), bool)
  correct = jnp.asarray([[True, False]])
  advantages = lambda spread: make(name).advantages(
    entropy=jnp.zeros(mask.shape),
    mask=mask,
    correct=correct,
    reward=jnp.asarray([[spread, -spread]]),
  )
  if name == "dr_grpo":  # it does not divide by the std
    np.testing.assert_allclose(advantages(5e-7), [[[5e-7] * 3, [-5e-7] * 3]], rtol=1e-5)
    return
  assert not advantages(5e-7).any()
  np.testing.assert_allclose(advantages(5e-6), [[[1.0] * 3, [-1.0] * 3]], rtol=1e-5)


def test_all_comparisons_and_norm_scopes_differ():
  """Otherwise a test that iterates over them would prove little."""
  x = arrays(random_batch(14))
  # ("sequence", "batch") is the same as ("sequence", "group").
  comparisons = [pair for pair in COMPARISONS if pair != ("sequence", "batch")]
  results = [
    np.asarray(strong("gtpo", compare=compare, scope=scope, norm_scope=norm_scope).advantages(**x))
    for compare, scope in comparisons
    for norm_scope in ("group", "batch")
  ]
  assert all(np.abs(a - b).max() > 1e-2 for a, b in itertools.combinations(results, 2))
