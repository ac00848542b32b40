"""Every recipe has the correct gradient in the new log-probs, and none in any other input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses
from recipe_cases import (
  NAMES,
  NOT_PER_TOKEN,
  SEQUENCE_RATIO,
  WEIGHTED_LOG_PROBS,
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
)

from gtpo_jax.algorithms import OBJECTIVES, make
from gtpo_jax.arrays import Signals

SHAPE = N, G, T = 4, 3, 3
# The last completion does not count.
MASK = np.arange(T) < np.asarray([[3, 1, 2], [1, 1, 3], [2, 3, 1], [3, 2, 0]])[..., None]
GUIDED = np.broadcast_to(np.arange(G) == 2, (N, G))
CORRECT = np.asarray([[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 1]], bool)

# The tokens to average over. Those of the last completion are included to avoid 0 / 0.
AVERAGED = MASK | ~MASK.any(-1, keepdims=True)

# Ratios on both sides of every kink, but not near one. The kinks are those of the clip, the dual
# clip (2) and the guide's cap (2).
RATIOS = np.asarray([0.4, 0.7, 0.9, 1.0, 1.1, 1.5, 1.8, 2.3, 3.0])
# The same for GSPO, which has a narrow clip range.
NARROW = np.asarray([0.4, 0.7, 1 - 1e-4, 1.0, 1 + 1e-4, 1.5, 1.8, 2.3, 3.0])


def draw_ratios(s, rng):
  """Returns importance ratios [n, g, t] at the recipe's level, and token ratios that give them."""
  values = NARROW if s.eps_low and s.eps_low < 0.01 else RATIOS
  if s.ratio in (None, "token"):
    ratios = rng.permuted(np.resize(values, SHAPE))
    return ratios, ratios
  ratios = np.repeat(rng.permuted(np.resize(values, (N, G, 1))), T, 2)
  noise = 0.2 * rng.standard_normal(SHAPE)
  if s.ratio in ("geometric", "gspo_token"):
    return ratios, ratios * np.exp(noise - noise.mean(-1, where=AVERAGED, keepdims=True))
  return ratios, ratios * np.exp(noise) / np.exp(noise).mean(-1, where=AVERAGED, keepdims=True)


def case(algorithm, seed):
  """Returns ratios and the arguments of `loss`, in float64, with advantages of both signs."""
  rng = np.random.default_rng(seed)
  of_completion = algorithm.settings.ratio in ("arithmetic", "geometric")
  per_completion = of_completion or algorithm.recipe.objective.per_completion
  ratios, token_ratios = draw_ratios(algorithm.settings, rng)
  old = -rng.gamma(1.0, 1.0, SHAPE)
  fill = lambda x: np.where(MASK, x, 7e2)
  return ratios, {
    "log_probs": fill(old + np.log(token_ratios)),
    "log_probs_old": fill(old),
    "mask": MASK,
    "log_probs_sampler": fill(old + 0.2 * rng.standard_normal(SHAPE)),
    "log_probs_reference": fill(old + 0.3 * rng.standard_normal(SHAPE)),
    "advantages": rng.choice([-1.3, 0.7], (N, G, 1) if per_completion else SHAPE) * np.ones(SHAPE),
    "guided": GUIDED if has_guide(algorithm.name) else None,
    "selected": rng.random(SHAPE) < 0.4 if algorithm.recipe.selects else None,
  }


def kinks_of(s):
  """Returns the ratios at which the objective has a kink."""
  bounds = {
    "clip": lambda: (1 - s["eps_low"], 1 + s["eps_high"], s["dual_clip"] or np.inf),
    "gmpo": lambda: (np.exp(-s["eps_low"]), np.exp(s["eps_high"])),
    "cispo": lambda: (1 - s["eps_low"], 1 + s["eps_high"]),
    "dppo": lambda: (s["ratio_cap"],),
    "sapo": lambda: (np.inf,),
    "kl_cov": lambda: (np.inf,),
  }
  kind = "clip" if s["objective"] in ("clip_cov", "stare", "fipo") else s["objective"]
  return np.asarray([*bounds[kind](), s["guide_cap"] or np.inf])


CASES = [(name, options) for name in NAMES for options in ({}, corrections(name))]
CASES += [
  ("grpo_s", {"ratio": "geometric"}),
  ("gspo", {"ratio": "arithmetic", "eps_low": 0.2, "eps_high": 0.3}),
  ("grpo", {"loss_aggregation": "group"}),
  ("gtpo", {"loss_aggregation": "constant"}),
  ("gtpo", {"ratio": "gspo_token"}),
]
CASES += [
  (name, {"objective": objective})
  for name in ("gtpo", "grpo_s")
  for objective in OBJECTIVES
  if objective != "clip" and meaningful(name, objective)
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=option_id)
@pytest.mark.some(9, slow=24)
def test_the_gradient_equals_central_differences(name, options):
  """The differences are those of the package's loss and of the slow loops, in float64.

  A loss with stop-gradients is compared only with the slow loops, which keep these terms fixed.
  """
  algorithm = make(name, **options)
  s = settings_of(algorithm)
  ratios, x = case(algorithm, seed=1)
  x["weights"] = slow_losses.token_weights(MASK, s, CORRECT, x["guided"])
  distance = np.abs(ratios[..., None] - kinks_of(s))[MASK].min()
  narrow = s["eps_low"] is not None and s["eps_low"] < 0.01
  assert distance > (1e-4 if narrow else 0.005)
  stop_gradient = s["objective"] in (*WEIGHTED_LOG_PROBS, "fipo")
  stop_gradient |= s["ratio"] == "gspo_token"

  indices = np.argwhere(MASK)
  steps = np.zeros((len(indices), *SHAPE))
  steps[(np.arange(len(indices)), *indices.T)] = 1e-6
  shifts = np.stack([steps, -steps]).reshape(-1, *SHAPE)
  with jax.enable_x64(True):
    loss = lambda log_probs: algorithm.loss(**x | {"log_probs": log_probs})[0]
    value, grad = jax.jit(jax.value_and_grad(loss))(x["log_probs"])
    up, down = jax.jit(jax.vmap(loss))(x["log_probs"] + shifts).reshape(2, -1)
    differences = (up - down) / 2e-6
    assert value.dtype == grad.dtype == jnp.float64
    value, grad, differences = map(np.asarray, (value, grad, differences))
  if not stop_gradient:
    np.testing.assert_allclose(grad[MASK], differences, rtol=1e-6, atol=1e-9)
  assert not grad[~MASK].any() and (grad[MASK] != 0).mean() > 0.2 and np.abs(grad).max() > 0.01

  fixed = {**x, "fixed": x["log_probs"]}
  slow = lambda log_probs: slow_losses.loss(fixed | {"log_probs": log_probs}, s)[0]
  np.testing.assert_allclose(value, slow(x["log_probs"]), rtol=1e-6)
  numeric = slow_losses.numeric_gradient(slow, x["log_probs"], [tuple(i) for i in indices])
  np.testing.assert_allclose(grad, numeric, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", SEQUENCE_RATIO)
@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
def test_the_true_gradient_of_the_sequence_ratio(name, ratio):
  """Per token it is w_t / |o| (arithmetic) or w^ / |o| (geometric); eq. 28 is misprinted."""
  algorithm = make(name, ratio=ratio, eps_low=0.9, eps_high=9.0)
  rng = np.random.default_rng(2)
  new = -rng.gamma(1.0, 1.0, SHAPE)
  old = -rng.gamma(1.0, 1.0, SHAPE)
  old = new + np.clip(old - new, -1, 1)  # never clipped
  advantages = rng.standard_normal((N, G, 1)) * np.ones(SHAPE)
  lengths = np.maximum(MASK.sum(-1, keepdims=True), 1)
  completions = MASK.any(-1).sum()
  of_tokens = np.exp(new - old)
  of_completions = np.exp(np.where(MASK, new - old, 0).sum(-1, keepdims=True) / lengths)
  ratios = of_tokens if ratio == "arithmetic" else of_completions
  expected = -advantages * ratios / lengths / completions
  inputs = {"log_probs_old": old, "advantages": advantages, "mask": MASK}
  with jax.enable_x64(True):
    loss = lambda log_probs: algorithm.loss(log_probs=log_probs, **inputs)[0]
    grad = jax.jit(jax.grad(loss))(new)
    np.testing.assert_allclose(grad, np.where(MASK, expected, 0), rtol=1e-10, atol=1e-12)


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
