"""Credit moves between tokens, it is neither made nor lost; and the difference between right and wrong survives."""

import functools

import jax
import numpy as np
import pytest
from recipe_cases import (
  BY_ENTROPY,
  COMPARISONS,
  SEQUENCE_LEVEL,
  TOKEN_LEVEL,
  arrays,
  random_batch,
  step,
  strong,
)

from gtpo_jax.algorithms import algorithm as algorithm_module
from gtpo_jax.algorithms import make
from gtpo_jax.algorithms.shaping import entropy_shares

# (name, options, what a unit of O+ earns on average, what a unit of O- earns)
LAWS = [
  ("gtpo", {"alpha1": 0.7, "alpha2": 0.6}, 1.3, -1.3),
  ("gtpo_v1", {"alpha": 0.4}, 1.4, 0),
  ("gtpo_v2", {"alpha": 0.4}, 1.4, -1),
  ("grpo_s", {"beta1": 0.7, "beta2": 0.6}, 1.3, -1.3),
  ("grpo_s_v1", {"beta": 0.4}, 1.4, 0),
  ("grpo_s_v2", {"beta": 0.4}, 1.4, -1),
]
TWO_COLLECTIONS = ("gtpo", "gtpo_v2", "grpo_s", "grpo_s_v2")


@functools.partial(jax.jit, static_argnums=0)
def shape(algorithm, batch):
  """Shaped rewards, signals and shares."""
  shaped, signals = algorithm.shaped(**batch)
  return shaped, signals, entropy_shares(signals, algorithm.credit)


def advantages_of(algorithm, batch):
  return algorithm.advantages(**arrays(batch))


def without_penalty(seed):
  return random_batch(seed) | {"penalty": np.zeros((7, 5), np.float32)}


def sides_of(batch):
  """Tokens of O+ and of O- in the groups with contrast, counted by hand from lengths."""
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
def test_the_sums_of_the_shaped_rewards(name, weights, right_unit, wrong_unit):
  for seed, options in enumerate(options_of(name)):
    batch = without_penalty(seed + 40)
    right, wrong = sides_of(batch)
    if name in SEQUENCE_LEVEL:
      right = right.any(-1)
      wrong = wrong.any(-1)
    shaped, _, _ = shape(make(name, **weights, **options), arrays(batch))
    assert right.sum() > 3 and wrong.sum() > 3
    np.testing.assert_allclose(
      np.asarray(shaped.plus, np.float64).sum(), right_unit * right.sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
      np.asarray(shaped.minus, np.float64).sum(), wrong_unit * wrong.sum(), rtol=1e-5
    )


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_every_set_of_shares_sums_to_its_size(name):
  for seed, options in enumerate(options_of(name)):
    algorithm = make(name, **options)
    _, signals, shares = shape(algorithm, arrays(random_batch(seed + 50)))
    for share, side in (
      (shares.plus, signals.mask & signals.correct),
      (shares.minus, signals.mask & ~signals.correct),
    ):
      sums = np.asarray(share, np.float64).sum(algorithm.credit.axes)
      sizes = np.asarray(side).sum(algorithm.credit.axes)
      np.testing.assert_allclose(sums, sizes, atol=1e-5)
      assert sizes.max() > 0


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_the_residual_of_every_recipe_is_rounding(name):
  assert (
    float(make(name).credit_metrics(**arrays(random_batch(51)))["credit/conservation_residual"])
    < 1e-5
  )


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_without_any_entropy_every_unit_of_a_side_earns_the_same(name):
  batch = without_penalty(60)
  batch["entropy"] = np.where(batch["mask"], 0, batch["entropy"]).astype(np.float32)
  shaped, signals, shares = shape(make(name), arrays(batch))
  right = np.asarray(signals.mask & signals.correct)
  wrong = np.asarray(signals.mask & ~signals.correct)
  for values, side in ((shares.plus, right), (shares.minus, wrong)):
    np.testing.assert_allclose(np.asarray(values)[side], 1, rtol=1e-6)
  assert (
    np.ptp(np.asarray(shaped.plus)[right]) < 1e-6 and np.ptp(np.asarray(shaped.minus)[wrong]) < 1e-6
  )


def test_those_that_have_stopped_are_not_counted():
  """d_t is the number of successful completions alive at step t. With all of them in it, the law would fail."""
  mask = np.asarray([[[1, 1], [1, 0], [1, 0], [1, 1]]], bool)
  correct = np.asarray([[True, True, True, False]])
  batch = {
    "entropy": np.asarray([[[1, 2], [2, 0], [3, 0], [1, 1]]], np.float32),
    "mask": mask,
    "correct": correct,
    "reward": correct.astype(np.float32),
  }
  shaped, _, shares = shape(make("gtpo_v1", alpha=0.5), arrays(batch))
  assert shares.plus[0, 0, 1] == 1  # alone at its step: not 3 * 2 / 2
  np.testing.assert_allclose(shaped.plus.sum(), 1.5 * 4, rtol=1e-6)


@pytest.mark.parametrize("side", ["plus", "minus"])
def test_the_residual_shows_what_is_lost_on_either_side(side, monkeypatch):
  lossy = lambda *x: (shares := entropy_shares(*x))._replace(**{side: getattr(shares, side) / 2})
  monkeypatch.setattr(algorithm_module, "entropy_shares", lossy)
  residual = make("gtpo").credit_metrics(**arrays(random_batch(61)))["credit/conservation_residual"]
  np.testing.assert_allclose(residual, 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dapo_forking", "dapo_mixed", "dr_grpo", "gspo"])
def test_recipes_that_do_not_read_the_entropy_have_no_credit_to_measure(name):
  assert make(name).credit_metrics(**arrays(random_batch(62, name))) == {}


# --- the trap: each side normalised over itself alone ---


def normalised_over_its_own_side(shaped, right, wrong):
  """The wrong way: R+ z-scored over O+ alone, R- over O- alone."""
  out = np.zeros(right.shape)
  for values, side in ((shaped.plus, right), (shaped.minus, wrong)):
    own = np.broadcast_to(np.asarray(values, np.float64), side.shape)[side]
    out[side] = (own - own.mean()) / own.std()
  return out


@pytest.mark.parametrize("norm_scope", ["batch", "group"])
@pytest.mark.parametrize("name", TWO_COLLECTIONS)
def test_right_stays_above_0_and_wrong_below(name, norm_scope):
  for seed, options in enumerate(options_of(name)):
    batch = without_penalty(seed + 70)
    algorithm = strong(name, norm_scope=norm_scope, **options)
    advantages = np.asarray(advantages_of(algorithm, batch))
    (right, wrong) = sides_of(batch)
    if name in SEQUENCE_LEVEL:  # the units are completions
      advantages = advantages[..., :1]
      right = right.any(-1, keepdims=True)
      wrong = wrong.any(-1, keepdims=True)
    trapped = normalised_over_its_own_side(shape(algorithm, arrays(batch))[0], right, wrong)
    assert abs(trapped[right].mean()) < 1e-9 and abs(trapped[wrong].mean()) < 1e-9
    groups = (
      [slice(None)] if norm_scope == "batch" else [i for i in range(len(right)) if right[i].any()]
    )
    for group in groups:
      assert advantages[group][right[group]].mean() > 0.1
      assert advantages[group][wrong[group]].mean() < -0.1


@pytest.mark.parametrize("name", BY_ENTROPY)
def test_right_is_worth_more_than_wrong(name):
  """Of every recipe; those with one collection have no sign to promise, but a difference."""
  batch = without_penalty(80)
  advantages = np.asarray(advantages_of(strong(name), batch))
  (right, wrong) = sides_of(batch)
  assert advantages[right].mean() > 0.3 and advantages[wrong].mean() < -0.3


@pytest.mark.parametrize("name", TWO_COLLECTIONS)
def test_the_weight_of_the_bonus_does_not_cancel(name):
  """In the trap alpha cancels: any bonus gives the same z-scores."""
  bonus = {"gtpo": "alpha2", "gtpo_v2": "alpha", "grpo_s": "beta2", "grpo_s_v2": "beta"}[name]
  batch = without_penalty(81)
  (right, wrong) = sides_of(without_penalty(81))
  little, much = (make(name, **{bonus: value}) for value in (0.1, 1.0))
  assert np.abs(np.asarray(advantages_of(little, batch)) - advantages_of(much, batch)).max() > 0.1
  if name in TOKEN_LEVEL:
    trapped = [
      normalised_over_its_own_side(shape(algorithm, arrays(batch))[0], right, wrong)
      for algorithm in (little, much)
    ]
    np.testing.assert_allclose(*trapped, atol=1e-4)


def test_the_published_gtpo_on_a_whole_step():
  batch = without_penalty(82)
  policies = dict.fromkeys(
    ("logp", "logp_old", "logp_sampler", "logp_reference"),
    np.zeros(batch["mask"].shape, np.float32),
  )
  got = step(make("gtpo"), arrays(batch), arrays(policies))
  (right, wrong) = sides_of(batch)
  grad = np.asarray(got["grad"])
  assert (
    grad[right].mean() < 0 < grad[wrong].mean()
  )  # the loss falls as right tokens become likelier
  assert not grad[~(right | wrong)].any()
