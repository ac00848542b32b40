"""Every recipe, its options and its loss against slow float64 loops written from the equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses
import slow_reference
from recipe_cases import (
  COMPARISONS,
  CORRECTIONS,
  KEY,
  NAMES,
  arrays,
  corrections,
  has_guide,
  meaningful,
  option_id,
  random_batch,
  random_policies,
  settings_of,
  step,
  strong,
  with_gaps,
)
from slow_reference import SEQUENCE_LEVEL, TOKEN_LEVEL

from gtpo_jax.algorithms import OBJECTIVES, make
from gtpo_jax.algorithms.loss import LOSS_AGGREGATIONS
from gtpo_jax.arrays import Signals

NORM_SCOPES = ("group", "batch")
GUARDS = (False, True)


def check_advantages(algorithm, batch):
  """Compares the package with the loops and returns the advantages of the loops."""
  s = settings_of(algorithm)
  expected = slow_reference.advantages(algorithm.name, batch, s)
  x = arrays(batch)
  np.testing.assert_allclose(algorithm.advantages(**x), expected, rtol=1e-5, atol=1e-5)
  expected_mask = slow_reference.loss_mask(algorithm.name, batch, s)
  np.testing.assert_array_equal(algorithm.loss_mask(**x), expected_mask)
  return expected


def check_all_norm_scopes(name, seed, **options):
  """Every other batch has tokens between the drawn ones."""
  for i, (norm_scope, sign_guard) in enumerate(itertools.product(NORM_SCOPES, GUARDS)):
    options |= {"norm_scope": norm_scope, "sign_guard": sign_guard, "h_floor": 0.05}
    batch = random_batch(seed + i)
    if i % 2:
      batch, _ = with_gaps(batch, seed)
    advantages = check_advantages(strong(name, **options), batch)
    assert np.abs(advantages).max() > 0.5


TOKEN_CASES = [("gtpo", "turn", scope) for scope in ("group", "batch")]
TOKEN_CASES += [(name, *comparison) for name in TOKEN_LEVEL for comparison in COMPARISONS]


@pytest.mark.parametrize(("name", "compare", "scope"), TOKEN_CASES)
@pytest.mark.some(5, slow=11)
def test_token_level_advantages(name, compare, scope):
  check_all_norm_scopes(name, 11, compare=compare, scope=scope)


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("name", SEQUENCE_LEVEL)
def test_sequence_level_advantages(name, scope, mean):
  check_all_norm_scopes(name, 12, scope=scope, mean=mean)


def test_a_token_baseline_counts_the_tokens_that_the_policy_drew():
  """In several turns as in one, whatever stands between them."""
  plain = random_batch(16, "otb")
  spread, places = with_gaps(plain, 16)
  algorithm = make("otb")
  got = check_advantages(algorithm, spread)
  np.testing.assert_allclose(
    np.take_along_axis(got, places, -1)[plain["mask"]],
    check_advantages(algorithm, plain)[plain["mask"]],
    rtol=1e-6,
  )
  without_gaps = algorithm.advantages(Signals(**arrays(plain), gaps=False))
  np.testing.assert_allclose(without_gaps, algorithm.advantages(**arrays(plain)), atol=1e-6)


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(6)
def test_published_settings(name):
  for seed in range(3):
    check_advantages(make(name), random_batch(seed + 14, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(6, slow=9)
def test_no_penalty_is_a_penalty_of_0(name):
  batch = random_batch(17, name)
  without = {key: value for key, value in batch.items() if key != "penalty"}
  got = check_advantages(strong(name), without)
  zero = without | {"penalty": np.zeros((7, 5))}
  expected = slow_reference.advantages(name, zero, settings_of(strong(name)))
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.35, 0.5, 0.99, 1.0])
def test_the_forking_mask(share):
  for seed in range(4):
    batch = random_batch(seed + 18, "dapo_forking")
    batch["entropy"] = np.round(batch["entropy"], 1)  # ties
    check_advantages(make("dapo_forking", forking_share=share), batch)


def test_the_groups_that_a_guide_rescues():
  """Group 2 is kept for the guide's success; group 3, where only the guide failed, is not."""
  batch = random_batch(19, "dapo_mixed")
  kept = slow_reference.kept_groups("dapo_mixed", batch)
  assert 2 in kept and not {0, 1, 3} & set(kept) and len(kept) > 2
  advantages = check_advantages(make("dapo_mixed"), batch)
  assert np.abs(advantages[2]).max() > 0.5


# --- weights, loss, gradient and metrics ---

LOSSES = [(name, {}) for name in NAMES] + [(name, corrections(name)) for name in NAMES]
LOSSES += [
  (name, {"loss_aggregation": kind})
  for name in ("gtpo", "grpo_s", "dapo_mixed", "dapo_forking")
  for kind in LOSS_AGGREGATIONS
]
LOSSES += [
  ("grpo_s", {"ratio": "geometric"}),
  ("gspo", {"ratio": "arithmetic"}),
  ("dapo", {"eps_low": 0.1, "eps_high": 0.4}),
  ("gspo", {"eps_low": 0.2, "eps_high": 0.3, **CORRECTIONS}),
  ("gtpo", {"ratio": "gspo_token"}),
  ("gtpo", {"contrast": False}),
  ("entropy_advantage", {"ratio": "gspo_token"}),
  ("empg", {"step": "token", "clarity": 0.4, "confidence_k": 2.0}),
  ("gtpo", {"norm_sides": "own"}),
  ("grpo", {"kl_weight": 0.3, "kl_estimator": "k2"}),
  ("dapo_mixed", {"kl_weight": 0.3, "kl_estimator": "k3_ratio"}),
  ("gigpo", {"turn_norm": "mean", "step_weight": 0.5}),
]
# Every objective with the credit of GTPO and of GRPO-S.
LOSSES += [
  (name, {"objective": objective})
  for name in ("gtpo", "grpo_s")
  for objective in OBJECTIVES
  if objective != "clip" and meaningful(name, objective)
]


@pytest.mark.parametrize(("name", "options"), LOSSES, ids=option_id)
@pytest.mark.some(10, slow=42)
def test_loss_gradient_and_metrics(name, options):
  algorithm = strong(name, **options)
  batch = random_batch(25, name)
  s = settings_of(algorithm)
  policies = random_policies(26, batch["mask"])
  got = step(algorithm, arrays(batch), arrays(policies))
  mask = slow_reference.loss_mask(name, batch, s)
  weights = slow_losses.token_weights(mask, s, batch["correct"], batch.get("guided"))
  np.testing.assert_allclose(got["weights"], weights, rtol=1e-6)

  inputs = policies | {
    "advantages": slow_reference.advantages(name, batch, s),
    "mask": mask,
    "weights": weights,
    "guided": batch.get("guided"),
    "fixed": policies["log_probs"],
  }
  draws = jax.lax.bitcast_convert_type(jax.random.bits(KEY, mask.shape), jnp.int32)
  selected = slow_losses.select(inputs, s, batch["entropy"], np.asarray(draws))
  if selected is not None:
    np.testing.assert_array_equal(got["selected"], selected)
    assert selected.any() and (mask & ~selected).any()
    inputs["selected"] = selected
  expected, metrics = slow_losses.loss(inputs, s)
  np.testing.assert_allclose(got["loss"], expected, rtol=1e-5, atol=1e-6)
  assert got["metrics"].keys() == metrics.keys()
  for key, value in metrics.items():
    np.testing.assert_allclose(got["metrics"][key], value, rtol=1e-5, err_msg=key)

  numeric = slow_losses.numeric_gradient(
    lambda log_probs: slow_losses.loss(inputs | {"log_probs": log_probs}, s)[0],
    policies["log_probs"],
    list(zip(*np.nonzero(mask), strict=True)),
  )
  np.testing.assert_allclose(got["grad"], numeric, rtol=1e-4, atol=1e-6)
  assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(6)
def test_the_policies_differ_enough_to_clip_both_ways(name):
  batch = random_batch(25, name)
  if name == "max_rl":  # its advantages are 0 if the penalties make the mean reward negative
    batch["penalty"] *= 0.1
  metrics = step(strong(name), arrays(batch), arrays(random_policies(26, batch["mask"])))["metrics"]
  shares = {key: value for key, value in metrics.items() if key.startswith("clip/")}
  if name == "pass_k_max":  # its advantages are never negative
    assert shares.pop("clip/low") == 0
  assert shares and all(0 < value < 1 for value in shares.values()), shares
  assert has_guide(name) == ("clip/guide" in metrics)


def test_weights_default_to_those_of_the_mask():
  batch = arrays(random_batch(27))
  policies = arrays(random_policies(28, batch["mask"]))
  algorithm = make("gtpo")
  expected = step(algorithm, batch, policies)
  loss, _ = algorithm.loss(**policies, advantages=expected["advantages"], mask=expected["mask"])
  np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)


def test_the_forking_loss_accepts_the_mask_of_all_tokens():
  """The tokens outside the loss have an advantage of 0."""
  algorithm = make("dapo_forking")
  batch = arrays(random_batch(29, "dapo_forking"))
  policies = arrays(random_policies(30, batch["mask"]))
  expected = step(algorithm, batch, policies)
  advantages = expected["advantages"]
  assert bool((advantages != 0)[expected["mask"]].all())
  loss, _ = algorithm.loss(**policies, advantages=advantages, mask=jnp.asarray(batch["mask"]))
  np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)
