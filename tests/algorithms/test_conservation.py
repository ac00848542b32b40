"""Shaping moves credit between tokens, but never between correct and incorrect completions."""

import functools
import importlib

import jax
import numpy as np
import pytest
from recipe_cases import BONUS, COMPARISONS, WITHOUT_ENTROPY, arrays, random_batch, step, strong
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
@pytest.mark.some(3)
def test_the_shares_of_every_set_sum_to_its_size(name):
  for seed, options in enumerate(options_of(name)):
    algorithm = make(name, **options)
    _, units, shares = shape(algorithm, arrays(random_batch(seed + 50)))
    for share, side in ((shares.plus, units.plus), (shares.minus, units.minus)):
      sums = np.asarray(share, np.float64).sum(axes_of(algorithm))
      sizes = np.asarray(side).sum(axes_of(algorithm))
      np.testing.assert_allclose(sums, sizes, atol=1e-5)
      assert sizes.max() > 0


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_the_residual_of_every_recipe_is_only_rounding_error(name):
  metrics = make(name).credit_metrics(**arrays(random_batch(51)))
  assert float(metrics["credit/conservation_residual"]) < 1e-5


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_without_entropy_all_units_of_a_side_earn_the_same(name):
  batch = without_penalty(60)
  batch["entropy"] = np.where(batch["mask"], 0, batch["entropy"]).astype(np.float32)
  shaped, units, shares = shape(make(name), arrays(batch))
  for share, reward, side in (
    (shares.plus, shaped.plus, units.plus),
    (shares.minus, shaped.minus, units.minus),
  ):
    side = np.asarray(side)
    np.testing.assert_allclose(np.asarray(share)[side], 1, rtol=1e-6)
    assert np.ptp(np.asarray(reward)[side]) < 1e-6


def test_completions_that_have_ended_are_not_counted():
  """d_t counts the correct completions alive at step t. If it counted all, the sum would differ."""
  mask = np.asarray([[[1, 1], [1, 0], [1, 0], [1, 1]]], bool)
  correct = np.asarray([[True, True, True, False]])
  batch = {
    "entropy": np.asarray([[[1, 2], [2, 0], [3, 0], [1, 1]]], np.float32),
    "mask": mask,
    "correct": correct,
    "reward": correct.astype(np.float32),
  }
  shaped, _, shares = shape(make("gtpo_v1", alpha=0.5), arrays(batch))
  assert shares.plus[0, 0, 1] == 1  # the only one alive at its step: not 3 * 2 / 2
  np.testing.assert_allclose(shaped.plus.sum(), 1.5 * 4, rtol=1e-6)


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


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_correct_is_worth_more_than_incorrect(name):
  batch = without_penalty(80)
  advantages = np.asarray(advantages_of(strong(name), batch))
  right, wrong = sides_of(batch)
  assert advantages[right].mean() > 0.3 and advantages[wrong].mean() < -0.3


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


def test_a_complete_step_of_the_published_gtpo():
  batch = without_penalty(82)
  zeros = np.zeros(batch["mask"].shape, np.float32)
  policies = {"log_probs": zeros, "log_probs_old": zeros}
  got = step(make("gtpo"), arrays(batch), arrays(policies))
  right, wrong = sides_of(batch)
  grad = np.asarray(got["grad"])
  # The loss falls as correct tokens become more likely.
  assert grad[right].mean() < 0 < grad[wrong].mean()
  assert not grad[~(right | wrong)].any()
