"""Every recipe has the correct gradient in the new log-probs, and none in any other input."""

import jax
import numpy as np
import pytest
from recipe_cases import (
  NAMES,
  NOT_PER_TOKEN,
  WEIGHTED_LOG_PROBS,
  arrays,
  corrections,
  has_guide,
  random_batch,
  random_policies,
  step,
  strong,
)

from gtpo_jax.arrays import Signals


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(5, slow=9)
def test_a_per_token_loss_is_the_sum_over_any_parts(name):
  """Two halves of the shuffled tokens give the same sum, unless tokens depend on each other."""
  algorithm = strong(name, **corrections(name))
  batch = random_batch(11, name)
  policies = random_policies(11, batch["mask"])
  mask = batch["mask"]
  whole = jax.device_get(step(algorithm, arrays(batch), arrays(policies)))
  log_probs = policies.pop("log_probs")
  computed = [key for key in ("advantages", "mask", "weights", "selected") if key in whole]
  signals = policies | {key: whole[key] for key in computed}
  signals["guided"] = None
  if has_guide(name):
    signals["guided"] = np.broadcast_to(batch["guided"][..., None], mask.shape)
  no_entropy = lambda log_probs, signals: algorithm.token_loss(
    log_probs, 0 * log_probs, Signals(**signals)
  )
  part_loss = jax.jit(jax.value_and_grad(no_entropy))
  loss = 0.0
  grad = np.zeros(mask.size, np.float32)
  for part in np.random.default_rng(11).permutation(mask.size).reshape(2, 7, -1):
    inputs = jax.tree.map(lambda x: x.reshape(-1)[part], (log_probs, signals))  # noqa: B023
    value, grad[part] = part_loss(*inputs)
    loss += value
  same_grad = np.allclose(grad.reshape(mask.shape), whole["grad"], rtol=1e-5, atol=1e-7)
  same = same_grad and np.isclose(loss, whole["loss"], rtol=1e-5)
  assert same == algorithm.recipe.per_token == (name not in NOT_PER_TOKEN)
  assert np.abs(grad).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(4, slow=9)
def test_the_gradient_flows_only_through_the_new_log_probs(name):
  """Neither does it depend on advantages on padding."""
  algorithm = strong(name, **corrections(name))
  batch = random_batch(8, name)
  policies = random_policies(8, batch["mask"])
  signal_names = ("entropy", "reward", "penalty")

  def value(inputs, batch):
    signals = batch | {key: inputs[key] for key in signal_names}
    advantages = inputs["added"] + algorithm.advantages(**signals)
    mask = algorithm.loss_mask(**signals)
    weights = algorithm.token_weights(mask, batch["correct"], batch.get("guided"))
    loss, metrics = algorithm.loss(
      **{key: inputs[key] for key in policies},
      advantages=advantages,
      mask=mask,
      weights=weights,
      guided=batch.get("guided"),
      selected=mask & (batch["entropy"] > 0.3) if algorithm.recipe.selects else None,
    )
    return loss + sum(metrics.values()), advantages  # metrics have no gradient

  grad = jax.jit(jax.value_and_grad(value, has_aux=True))
  added = np.where(batch["mask"], np.sin(np.arange(batch["mask"].size)).reshape(7, 5, 4), 0)
  inputs = policies | {key: batch[key] for key in signal_names} | {"added": np.float32(added)}
  (total, _), grads = jax.device_get(grad(inputs, batch))
  clean = grads.pop("log_probs")
  assert np.abs(clean).max() > 1e-3 and np.isfinite(total)
  assert len(grads) == 7 and not any(each.any() for each in grads.values())
  for garbage in (np.nan, np.inf, 1e30):
    inputs["added"] = np.where(batch["mask"], np.float32(added), np.float32(garbage))
    (got, advantages), grads = jax.device_get(grad(inputs, batch))
    assert not (np.abs(advantages[~batch["mask"]]) < 1e29).any()
    np.testing.assert_array_equal(got, total)
    np.testing.assert_array_equal(grads["log_probs"], clean)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(6, slow=9)
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
  """Every ratio is 1, so the derivative for a token not selected is -A times its weight."""
  batch = random_batch(9, name)
  policies = random_policies(9, batch["mask"])
  on_policy = dict.fromkeys(policies, policies["log_probs_old"])
  algorithm = strong(name, **corrections(name))
  got = step(algorithm, arrays(batch), arrays(on_policy))
  s = algorithm.settings
  expected = np.asarray(got["advantages"]) * np.asarray(got["weights"])
  # The factor of the selected tokens. |log r| has no gradient at r = 1.
  factor = {"clip_cov": 0.0, "stare": s.surprise_weight}.get(s.objective, 1.0)
  selected = np.asarray(got.get("selected", np.zeros_like(batch["mask"])))
  expected = np.where(selected, factor * expected, expected)
  np.testing.assert_allclose(got["grad"], -expected, rtol=1e-5, atol=1e-7)
  # The objective divided by A at r = 1.
  value = 1.0
  if s.objective in WEIGHTED_LOG_PROBS:
    value = policies["log_probs_old"]
  elif s.objective == "sapo":
    value = 2 / np.where(expected > 0, s.tau_positive, s.tau_negative)
  np.testing.assert_allclose(got["loss"], -(value * expected).sum(), rtol=1e-5, atol=1e-6)
