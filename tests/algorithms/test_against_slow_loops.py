"""Every recipe, its options and its loss against slow float64 loops written from the equations."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses
import slow_reference
from recipe_cases import (
  COMPARISONS,
  CORRECTIONS,
  NAMES,
  SEQUENCE_LEVEL,
  TOKEN_LEVEL,
  arrays,
  random_batch,
  random_policies,
  settings_of,
  step,
  strong,
)

from gtpo_jax.algorithms import make

NORM_SCOPES = ("group", "batch")
GUARDS = (False, True)


def check_advantages(algorithm, batch):
  """Package against loops; returns what the loops say."""
  expected = slow_reference.advantages(algorithm.name, batch, settings_of(algorithm))
  x = arrays(batch)
  np.testing.assert_allclose(algorithm.advantages(**x), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(
    algorithm.loss_mask(**x),
    slow_reference.loss_mask(algorithm.name, batch, settings_of(algorithm)),
  )
  return expected


@pytest.mark.parametrize(("compare", "scope"), COMPARISONS)
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_token_level_advantages(name, compare, scope):
  for seed, (norm_scope, sign_guard) in enumerate(itertools.product(NORM_SCOPES, GUARDS)):
    algorithm = strong(
      name, compare=compare, scope=scope, norm_scope=norm_scope, sign_guard=sign_guard, h_floor=0.05
    )
    assert np.abs(check_advantages(algorithm, random_batch(seed + 11))).max() > 0.5


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("name", SEQUENCE_LEVEL)
def test_sequence_level_advantages(name, scope, mean):
  for seed, (norm_scope, sign_guard) in enumerate(itertools.product(NORM_SCOPES, GUARDS)):
    algorithm = strong(
      name, mean=mean, scope=scope, norm_scope=norm_scope, sign_guard=sign_guard, h_floor=0.05
    )
    assert np.abs(check_advantages(algorithm, random_batch(seed + 12))).max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_published_settings(name):
  for seed in range(3):
    check_advantages(make(name), random_batch(seed + 14, name))


@pytest.mark.parametrize("name", NAMES)
def test_no_penalty_is_a_penalty_of_0(name):
  batch = random_batch(17, name)
  without = {key: value for key, value in batch.items() if key != "penalty"}
  got = check_advantages(strong(name), without)
  np.testing.assert_array_equal(
    got,
    slow_reference.advantages(
      name, {**without, "penalty": np.zeros((7, 5))}, settings_of(strong(name))
    ),
  )


@pytest.mark.parametrize("share", [0.01, 0.2, 0.35, 0.5, 0.99, 1.0])
def test_the_forking_mask(share):
  for seed in range(4):
    batch = random_batch(seed + 18, "dapo_forking")
    batch["entropy"] = np.round(batch["entropy"], 1)  # ties
    check_advantages(make("dapo_forking", forking_share=share), batch)


def test_the_groups_that_a_guide_rescues():
  batch = random_batch(19, "dapo_mixed")
  kept = slow_reference.kept_groups("dapo_mixed", batch)
  assert (
    2 in kept and not {0, 1, 3} & set(kept) and len(kept) > 2
  )  # the guide's success alone; the others by its failures alone
  advantages = check_advantages(make("dapo_mixed"), batch)
  assert np.abs(advantages[2]).max() > 0.5


# --- weights, loss, gradient and metrics ---

AVERAGES = ("token", "completion", "group", "constant")
LOSSES = [(name, {}) for name in NAMES] + [(name, CORRECTIONS) for name in NAMES]
LOSSES += [
  (name, {"average": average})
  for name in ("gtpo", "grpo_s", "dapo_mixed", "dapo_forking")
  for average in AVERAGES
]
LOSSES += [
  ("grpo_s", {"ratio": "geometric"}),
  ("gspo", {"ratio": "arithmetic"}),
  ("dapo", {"eps_low": 0.1, "eps_high": 0.4}),
  ("gspo", {"eps_low": 0.2, "eps_high": 0.3, **CORRECTIONS}),
]


@pytest.mark.parametrize(
  ("name", "options"),
  LOSSES,
  ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())) or "plain",
)
def test_loss_gradient_and_metrics(name, options):
  algorithm = strong(name, **options)
  batch = random_batch(25, name)
  s = settings_of(algorithm)
  policies = random_policies(26, batch["mask"])
  got = step(algorithm, arrays(batch), arrays(policies))
  mask = slow_reference.loss_mask(name, batch, s)
  weights = slow_losses.token_weights(mask, s, batch["correct"], batch.get("guided"))
  np.testing.assert_allclose(got["weights"], weights, rtol=1e-6)

  slow = policies | {
    "advantages": slow_reference.advantages(name, batch, s),
    "mask": mask,
    "weights": weights,
  }
  slow["guided"] = batch.get("guided")
  expected, metrics = slow_losses.loss(slow, s)
  np.testing.assert_allclose(got["loss"], expected, rtol=1e-5, atol=1e-6)
  assert got["metrics"].keys() == metrics.keys()
  for key, value in metrics.items():
    np.testing.assert_allclose(got["metrics"][key], value, rtol=1e-5, err_msg=key)

  numeric = slow_losses.numeric_gradient(
    lambda logp: slow_losses.loss(slow | {"logp": logp}, s)[0],
    policies["logp"],
    list(zip(*np.nonzero(mask), strict=True)),
  )
  np.testing.assert_allclose(got["grad"], numeric, rtol=1e-4, atol=1e-6)
  assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_policies_differ_enough_to_clip_both_ways(name):
  batch = random_batch(25, name)
  metrics = step(strong(name), arrays(batch), arrays(random_policies(26, batch["mask"])))["metrics"]
  assert 0 < metrics["clip/low"] < 1 and 0 < metrics["clip/high"] < 1
  assert name != "dapo_mixed" or "clip/guide" in metrics


def test_weights_made_from_the_mask_are_the_default():
  batch = arrays(random_batch(27))
  policies = arrays(random_policies(28, batch["mask"]))
  algorithm = make("gtpo")
  given = step(algorithm, batch, policies)
  made, _ = algorithm.loss(**policies, advantages=given["advantages"], mask=given["mask"])
  np.testing.assert_allclose(made, given["loss"], rtol=1e-6)


def test_forking_finds_its_tokens_from_the_advantages_too():
  """`loss` may be given the mask of all tokens: those that are not learned from have an advantage of 0."""
  algorithm = make("dapo_forking")
  batch = arrays(random_batch(29, "dapo_forking"))
  policies = arrays(random_policies(30, batch["mask"]))
  given = step(algorithm, batch, policies)
  assert bool((given["advantages"] != 0)[given["mask"]].all())
  made, _ = algorithm.loss(
    **policies, advantages=given["advantages"], mask=jnp.asarray(batch["mask"])
  )
  np.testing.assert_allclose(made, given["loss"], rtol=1e-6)
