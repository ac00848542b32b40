"""EMPG and FIPO by hand, the first also over turns with tokens between them that were not drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtpo_jax.algorithms import OBJECTIVES, make
from gtpo_jax.algorithms.modulation import (
  ConfidenceModulation,
  ModulationInputs,
  next_step,
  run_mean,
)
from gtpo_jax.algorithms.objectives import ObjectiveInputs
from gtpo_jax.algorithms.relative_entropy import discounted_future

E = np.exp

# Two turns, then one. The tokens outside the mask are an environment's.
MASK = jnp.asarray([[[True, True, False, True, False], [True, False, False, False, False]]])
ENTROPY = jnp.asarray([[[0.0, 2.0, 9.0, 3.0, 9.0], [2.0, 9.0, 9.0, 9.0, 9.0]]])
ADVANTAGES = jnp.asarray([[[1.0, 1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0, 0.0]]])


def test_empg_over_turns_by_hand():
  """The turns have the entropies 1, 3 and 2, so H' is 0, 1 and 1/2."""
  got = ConfidenceModulation(confidence_k=1.0, clarity=0.1, clarity_k=2.0)(
    ADVANTAGES, ModulationInputs(MASK, jnp.where(MASK, ENTROPY, 0))
  )
  average = (1 + E(-1) + E(-0.5)) / 3
  first = 1 / average + 0.1 * E(-2)  # the next turn has H' = 1
  second = E(-1) / average
  other = -E(-0.5) / average
  mean = (first + second + other) / 3
  expected = [[[first, first, 0, second, 0], [other, 0, 0, 0, 0]]]
  expected = np.where(MASK, np.asarray(expected) - mean, 0)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_empg_over_tokens_by_hand():
  """The entropies are 0, 2, 3 and 2; the token after the second is in the next turn."""
  got = ConfidenceModulation(step="token", confidence_k=3.0, clarity=0.2, clarity_k=1.5)(
    ADVANTAGES, ModulationInputs(MASK, jnp.where(MASK, ENTROPY, 0))
  )
  scale = np.asarray([1, E(-2), E(-3), E(-2)])
  values = np.asarray([1, 1, 1, -1]) * scale / scale.mean()
  values[:2] += 0.2 * np.asarray([E(-1), E(-1.5)])
  np.testing.assert_allclose(np.asarray(got)[MASK], values - values.mean(), rtol=1e-6)
  assert not np.asarray(got)[~MASK].any()


def test_equally_confident_steps_keep_their_advantages():
  """Without a next step there is no bonus, and the mean of these advantages is 0."""
  mask = MASK.at[0, 0, 3].set(False)
  advantages = jnp.where(mask, ADVANTAGES, 0)
  got = ConfidenceModulation()(advantages, ModulationInputs(mask, jnp.where(mask, 0.7, 0.0)))
  np.testing.assert_allclose(got, advantages, atol=1e-7)


def test_the_mean_over_a_run_and_the_next_step():
  begins = jnp.asarray([[[True, False, False, True, False], [True, False, False, False, False]]])
  means = run_mean(ENTROPY, MASK, begins)
  np.testing.assert_array_equal(np.asarray(means)[MASK], [1.0, 1.0, 3.0, 2.0])
  has_next, following = next_step(means, begins)
  assert np.asarray(has_next)[MASK].tolist() == [True, True, False, False]
  assert np.asarray(following)[0, 0, :2].tolist() == [3.0, 3.0]


def test_the_mean_over_a_long_run_is_exact_after_another_one():
  """A difference of running sums would lose the small entropies of the second turn."""
  mask = np.ones((1, 1, 4001), bool)
  mask[..., 3000] = False
  entropy = np.full(mask.shape, 8.0, np.float32)
  entropy[..., 3001:] = 1e-5
  begins = mask.copy()
  begins[..., 1:] &= ~mask[..., :-1]
  means = jax.jit(run_mean)(jnp.asarray(entropy), jnp.asarray(mask), jnp.asarray(begins))
  np.testing.assert_allclose(means[0, 0, [0, 2999, 3001, 4000]], [8, 8, 1e-5, 1e-5], rtol=1e-5)


def test_fipo_by_hand():
  """Half-life 1: each later token counts half; the last token's ratio is beyond the dual clip."""
  log_ratio = jnp.log(jnp.asarray([[[2.0, 0.5, 1.25, 20.0]]]))
  fipo = OBJECTIVES["fipo"](half_life=1.0, influence_low=0.5, influence_high=0.9)
  ones = jnp.ones(log_ratio.shape)
  mask = ones > 0
  x = ObjectiveInputs(jnp.exp(log_ratio), log_ratio - 1, -ones, 2 * ones, mask)
  objective, counted = fipo(x)
  # exp of the sums: 2 * 0.5^(1/2) * 1.25^(1/4); 0.5 * 1.25^(1/2); 1.25; 1 (not counted).
  influence = np.asarray([2 * 0.5**0.5 * 1.25**0.25, 0.5 * 1.25**0.5, 1.25, 1.0])
  clipped = np.asarray([1.28, 0.5, 1.25, 1.28])
  np.testing.assert_allclose(objective[0, 0], 2 * influence * clipped, rtol=1e-6)
  assert not counted["clip/influence"].any()


@pytest.mark.parametrize(
  ("ratio", "advantage", "influence", "counted"),
  [
    (1.1, 1.0, 1.1, False),
    (1.1, -1.0, 1.1, False),
    (1.5, 1.0, 1.2, True),  # at most 1 + 0.2
    (0.7, -1.0, 1.0, True),  # at least 1
    (3.0, -1.0, 1.2, True),
    (5.0, -1.0, 1.0, True),  # beyond safe_ratio
    (5.0, 1.0, 1.2, True),
  ],
)
def test_the_influence_of_a_last_token(ratio, advantage, influence, counted):
  one = jnp.ones((1, 1, 1))
  log_prob = jnp.log(ratio) * one
  x = ObjectiveInputs(ratio * one, log_prob, 0 * one, advantage * one, one > 0)
  objective, metrics = OBJECTIVES["fipo"]()(x)
  plain, _ = OBJECTIVES["clip"](dual_clip=10.0)(x)
  np.testing.assert_allclose(objective, influence * plain, rtol=1e-6)
  assert bool(metrics["clip/influence"].all()) == counted


def test_the_discount_counts_only_drawn_tokens():
  x = jnp.asarray([[[1.0, 100.0, 2.0, 4.0]]])
  mask = jnp.asarray([[[True, False, True, True]]])
  got = np.asarray(discounted_future(x, mask, 0.5))[mask]
  np.testing.assert_allclose(got, [1 + 1 + 1, 2 + 2, 4])


@pytest.mark.parametrize("name", ["gtpo", "grpo_s_v2"])
def test_own_sides_lose_the_verdict(name):
  """Each side's advantages have mean 0, so correct completions are not preferred."""
  rng = np.random.default_rng(3)
  batch = {
    "entropy": rng.gamma(1.0, 1.0, (1, 6, 5)).astype(np.float32),
    "mask": np.ones((1, 6, 5), bool),
    "correct": np.arange(6)[None] < 2,
    "reward": (np.arange(6)[None] < 2).astype(np.float32),
  }
  own = np.asarray(make(name, norm_sides="own").advantages(**batch))
  every = np.asarray(make(name).advantages(**batch))
  assert abs(own[0, :2].mean()) < 1e-6 and abs(own[0, 2:].mean()) < 1e-6 and own.any()
  assert every[0, :2].mean() > 1 and every[0, 2:].mean() < -0.3
