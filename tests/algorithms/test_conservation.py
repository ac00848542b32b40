"""Shaping moves credit between tokens, but never between correct and incorrect completions."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_cases import BONUS, COMPARISONS, WITHOUT_ENTROPY, arrays, random_batch, strong
from slow_reference import BY_ENTROPY, SEQUENCE_LEVEL, TOKEN_LEVEL, TWO_COLLECTIONS

from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.relative_entropy import COMPARE, entropy_shares

# (name, options, mean reward of a unit on O+, mean reward of a unit on O-)
LAWS = [
  ("gtpo", {"alpha1": 0.7, "alpha2": 0.6}, 1.3, -1.3),
  ("gtpo_v1", {"alpha": 0.4}, 1.4, 0),
  ("gtpo_v2", {"alpha": 0.4}, 1.4, -1),
  ("grpo_s", {"beta1": 0.7, "beta2": 0.6}, 1.3, -1.3),
  ("grpo_s_v1", {"beta": 0.4}, 1.4, 0),
  ("grpo_s_v2", {"beta": 0.4}, 1.4, -1),
]


def axes_of(algorithm):
  s = algorithm.settings
  return COMPARE[s.compare or "position", s.scope]


@functools.partial(jax.jit, static_argnums=0)
def shape(algorithm, batch):
  """Returns shaped rewards, units and shares."""
  shaped, units = algorithm.shaped(**batch)
  return shaped, units, entropy_shares(units, axes_of(algorithm), algorithm.settings.h_floor)


def advantages_of(algorithm, batch):
  return algorithm.advantages(**arrays(batch))


def without_penalty(seed):
  return random_batch(seed) | {"penalty": np.zeros((7, 5), np.float32)}


def sides_of(batch):
  """Returns the tokens of O+ and of O- in groups with contrast, computed from the batch alone."""
  alive = batch["mask"].any(-1)
  correct = batch["correct"]
  mixed = (alive & correct).any(1) & (alive & ~correct).any(1)
  return tuple(batch["mask"] & (side & mixed[:, None])[..., None] for side in (correct, ~correct))


def options_of(name):
  if name in TOKEN_LEVEL:
    return [{"compare": compare, "scope": scope} for compare, scope in COMPARISONS]
  return [
    {"scope": scope, "mean": mean}
    for scope in ("group", "batch")
    for mean in ("arithmetic", "geometric")
  ]


@pytest.mark.parametrize(
  ("name", "weights", "right_unit", "wrong_unit"), LAWS, ids=[law[0] for law in LAWS]
)
@pytest.mark.some(3)
def test_the_sums_of_the_shaped_rewards(name, weights, right_unit, wrong_unit):
  for seed, options in enumerate(options_of(name)):
    batch = without_penalty(seed + 40)
    right, wrong = sides_of(batch)
    if name in SEQUENCE_LEVEL:
      right = right.any(-1)
      wrong = wrong.any(-1)
    shaped, _, _ = shape(make(name, **weights, **options), arrays(batch))
    assert right.sum() > 3 and wrong.sum() > 3
    plus = np.asarray(shaped.plus, np.float64).sum()
    minus = np.asarray(shaped.minus, np.float64).sum()
    np.testing.assert_allclose(plus, right_unit * right.sum(), rtol=1e-5)
    np.testing.assert_allclose(minus, wrong_unit * wrong.sum(), rtol=1e-5)


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_the_residual_of_every_recipe_is_only_rounding_error(name):
  metrics = make(name).credit_metrics(**arrays(random_batch(51)))
  assert float(metrics["credit/conservation_residual"]) < 1e-5


@pytest.mark.parametrize("side", ["plus", "minus"])
def test_the_residual_shows_a_loss_of_credit_on_either_side(side, monkeypatch):
  def lossy(*inputs):
    shares = entropy_shares(*inputs)
    return shares._replace(**{side: getattr(shares, side) / 2})

  module = importlib.import_module("gtpo_jax.algorithms.relative_entropy")
  monkeypatch.setattr(module, "entropy_shares", lossy)
  residual = make("gtpo").credit_metrics(**arrays(random_batch(61)))["credit/conservation_residual"]
  np.testing.assert_allclose(residual, 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", WITHOUT_ENTROPY)
def test_recipes_that_ignore_the_entropy_have_no_credit_metrics(name):
  assert make(name).credit_metrics(**arrays(random_batch(62, name))) == {}


# --- the trap of normalising each side by itself ---


def normalised_over_its_own_side(shaped, right, wrong):
  """The wrong way: R+ z-scored over O+ only, R- over O- only."""
  out = np.zeros(right.shape)
  for values, side in ((shaped.plus, right), (shaped.minus, wrong)):
    own = np.broadcast_to(np.asarray(values, np.float64), side.shape)[side]
    out[side] = (own - own.mean()) / own.std()
  return out


@pytest.mark.parametrize("norm_scope", ["batch", "group"])
@pytest.mark.parametrize("name", TWO_COLLECTIONS)
@pytest.mark.some(3)
def test_correct_stays_above_0_and_incorrect_below(name, norm_scope):
  for seed, options in enumerate(options_of(name)):
    batch = without_penalty(seed + 70)
    algorithm = strong(name, norm_scope=norm_scope, **options)
    advantages = np.asarray(advantages_of(algorithm, batch))
    right, wrong = sides_of(batch)
    if name in SEQUENCE_LEVEL:  # the units are completions
      advantages = advantages[..., :1]
      right = right.any(-1, keepdims=True)
      wrong = wrong.any(-1, keepdims=True)
    trapped = normalised_over_its_own_side(shape(algorithm, arrays(batch))[0], right, wrong)
    assert abs(trapped[right].mean()) < 1e-9 and abs(trapped[wrong].mean()) < 1e-9
    groups = [slice(None)]
    if norm_scope == "group":
      groups = [i for i in range(len(right)) if right[i].any()]
    for group in groups:
      assert advantages[group][right[group]].mean() > 0.1
      assert advantages[group][wrong[group]].mean() < -0.1


@pytest.mark.parametrize("name", TWO_COLLECTIONS)
def test_the_weight_of_the_bonus_does_not_cancel(name):
  """In the trap alpha cancels: any bonus gives the same z-scores."""
  batch = without_penalty(81)
  right, wrong = sides_of(batch)
  little, much = (make(name, **{BONUS[name]: value}) for value in (0.1, 1.0))
  difference = np.asarray(advantages_of(little, batch)) - advantages_of(much, batch)
  assert np.abs(difference).max() > 0.1
  if name in TOKEN_LEVEL:
    trapped = [
      normalised_over_its_own_side(shape(algorithm, arrays(batch))[0], right, wrong)
      for algorithm in (little, much)
    ]
    np.testing.assert_allclose(*trapped, atol=1e-4)


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


def test_correct_and_incorrect_are_never_compared():
  """Other entropies of incorrect completions leave the rewards of correct ones as they are."""
  algorithm = make("gtpo", compare="matrix", scope="batch")
  batch = without_penalty(82)
  changed = np.where(batch["correct"][..., None], batch["entropy"], batch["entropy"] ** 2 + 1)
  before, after = (
    shape(algorithm, arrays(batch | {"entropy": x}))[0] for x in (batch["entropy"], changed)
  )
  np.testing.assert_array_equal(after.plus, before.plus)
  assert np.abs(after.minus - before.minus).max() > 0.01
