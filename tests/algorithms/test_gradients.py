"""The gradient of every recipe: in the new log-probs it is the derivative, in everything else it is exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_losses
from recipe_cases import (
  CORRECTIONS,
  NAMES,
  SEQUENCE_LEVEL,
  arrays,
  random_batch,
  random_policies,
  settings_of,
  step,
  strong,
)

from gtpo_jax.algorithms import make

SHAPE = N, G, T = 4, 3, 3
MASK = np.arange(T) < np.asarray([[3, 1, 2], [1, 1, 3], [2, 3, 1], [3, 2, 0]])[..., None]
GUIDED = np.broadcast_to(np.arange(G) == 2, (N, G))
CORRECT = np.asarray([[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 1]], bool)

ALIVE = MASK | ~MASK.any(
  -1, keepdims=True
)  # the last completion does not count, and is kept from 0 / 0

# Ratios on both sides of each border and between them, and none near one: of the clip, of the dual clip (2), of the guide's cap (2).
RATIOS = np.asarray([0.4, 0.7, 0.9, 1.0, 1.1, 1.5, 1.8, 2.3, 3.0])
NARROW = np.asarray([0.4, 0.7, 1 - 1e-4, 1.0, 1 + 1e-4, 1.5, 1.8, 2.3, 3.0])  # GSPO's clip range is


def ratio_within(s, rng):
  """Importance ratios [n, g, t] at the recipe's level, and those of the single tokens that make them."""
  values = NARROW if s.eps_low < 0.01 else RATIOS
  if s.ratio is None:
    ratios = rng.permuted(np.resize(values, SHAPE))
    return ratios, ratios
  ratios = np.repeat(rng.permuted(np.resize(values, (N, G, 1))), T, 2)
  noise = 0.2 * rng.standard_normal(SHAPE)
  if s.ratio == "geometric":
    return ratios, ratios * np.exp(noise - noise.mean(-1, where=ALIVE, keepdims=True))
  return ratios, ratios * np.exp(noise) / np.exp(noise).mean(-1, where=ALIVE, keepdims=True)


def case(algorithm, seed):
  """Ratios, and all that `loss` takes, in float64, with advantages of both signs."""
  rng = np.random.default_rng(seed)
  per_completion = algorithm.settings.ratio is not None
  ratios, tokens = ratio_within(algorithm.settings, rng)
  old = -rng.gamma(1.0, 1.0, SHAPE)
  fill = lambda x: np.where(MASK, x, 7e2)
  return ratios, {
    "logp": fill(old + np.log(tokens)),
    "logp_old": fill(old),
    "mask": MASK,
    "logp_sampler": fill(old + 0.2 * rng.standard_normal(SHAPE)),
    "logp_reference": fill(old + 0.3 * rng.standard_normal(SHAPE)),
    "advantages": rng.choice([-1.3, 0.7], (N, G, 1) if per_completion else SHAPE) * np.ones(SHAPE),
    "guided": GUIDED if algorithm.name == "dapo_mixed" else None,
  }


CASES = [(name, options) for name in NAMES for options in ({}, CORRECTIONS)]
CASES += [
  ("grpo_s", {"ratio": "geometric"}),
  ("gspo", {"ratio": "arithmetic", "eps_low": 0.2, "eps_high": 0.3}),
  ("grpo", {"average": "group"}),
  ("gtpo", {"average": "constant"}),
]


@pytest.mark.parametrize(
  ("name", "options"),
  CASES,
  ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())) or "plain",
)
def test_the_gradient_is_the_derivative(name, options):
  """In float64, against central differences of the package's own loss and of the slow loops'."""
  algorithm = make(name, **options)
  s = settings_of(algorithm)
  ratios, x = case(algorithm, seed=1)
  x["weights"] = slow_losses.token_weights(MASK, s, CORRECT, x["guided"])
  edges = np.asarray(
    [1 - s["eps_low"], 1 + s["eps_high"], s["dual_clip"] or np.inf, s["guide_cap"] or np.inf]
  )
  distance = np.abs(ratios[..., None] - edges)[MASK].min()
  assert distance > (1e-4 if s["eps_low"] < 0.01 else 0.05)

  places = np.argwhere(MASK)
  steps = np.zeros((len(places), *SHAPE))
  steps[(np.arange(len(places)), *places.T)] = 1e-6
  with jax.enable_x64(True):
    loss = lambda logp: algorithm.loss(**x | {"logp": logp})[0]
    value, grad = jax.jit(jax.value_and_grad(loss))(x["logp"])
    up, down = jax.jit(jax.vmap(loss))(
      x["logp"] + np.stack([steps, -steps]).reshape(-1, *SHAPE)
    ).reshape(2, -1)
    differences = (up - down) / 2e-6
    assert value.dtype == grad.dtype == jnp.float64
    value, grad, differences = map(np.asarray, (value, grad, differences))
  np.testing.assert_allclose(grad[MASK], differences, rtol=1e-6, atol=1e-9)
  assert not grad[~MASK].any() and (grad[MASK] != 0).mean() > 0.2 and np.abs(grad).max() > 0.01

  slow = lambda logp: slow_losses.loss(x | {"logp": logp}, s)[0]
  np.testing.assert_allclose(value, slow(x["logp"]), rtol=1e-6)
  np.testing.assert_allclose(
    grad,
    slow_losses.numeric_gradient(slow, x["logp"], [tuple(place) for place in places]),
    rtol=1e-5,
    atol=1e-8,
  )


@pytest.mark.parametrize("name", ["grpo_s", "grpo_s_v1", "grpo_s_v2", "gspo"])
@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
def test_the_true_gradient_of_the_sequence_ratio(name, ratio):
  """Of w^ it is (1/|o|) w_t at each token (arithmetic) or (1/|o|) w^ (geometric); the paper's eq. 28 is misprinted."""
  algorithm = make(name, ratio=ratio, eps_low=0.9, eps_high=9.0)
  rng = np.random.default_rng(2)
  logp, old = -rng.gamma(1.0, 1.0, SHAPE), -rng.gamma(1.0, 1.0, SHAPE)
  old = logp + np.clip(old - logp, -1, 1)  # never clipped
  advantages = rng.standard_normal((N, G, 1)) * np.ones(SHAPE)
  lengths = MASK.sum(-1, keepdims=True)
  completions = MASK.any(-1).sum()
  tokens = np.exp(logp - old)
  whole = np.exp(np.where(MASK, logp - old, 0).sum(-1, keepdims=True) / np.maximum(lengths, 1))
  by_hand = (
    -advantages
    * (tokens if ratio == "arithmetic" else whole)
    / np.maximum(lengths, 1)
    / completions
  )
  with jax.enable_x64(True):
    grad = jax.jit(
      jax.grad(lambda x: algorithm.loss(logp=x, logp_old=old, advantages=advantages, mask=MASK)[0])
    )(logp)
    np.testing.assert_allclose(grad, np.where(MASK, by_hand, 0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_per_token_is_that_of_its_tokens_in_any_parts(name):
  """Its tokens shuffled and cut in two have its loss and its gradient; those of a sequence-level ratio have others."""
  algorithm = strong(name, **CORRECTIONS)
  batch = random_batch(11, name)
  policies = random_policies(11, batch["mask"])
  mask = batch["mask"]
  whole = jax.device_get(step(algorithm, arrays(batch), arrays(policies)))
  guided = np.broadcast_to(batch["guided"][..., None], mask.shape) if "guided" in batch else None
  logp = policies.pop("logp")
  signals = (
    policies | {key: whole[key] for key in ("advantages", "mask", "weights")} | {"guided": guided}
  )
  part_loss = jax.jit(jax.value_and_grad(algorithm.token_loss))
  loss = 0.0
  grad = np.zeros(mask.size, np.float32)
  for part in np.random.default_rng(11).permutation(mask.size).reshape(2, 7, -1):
    value, grad[part] = part_loss(*jax.tree.map(lambda x: x.reshape(-1)[part], (logp, signals)))  # noqa: B023
    loss += value
  same = np.allclose(grad.reshape(mask.shape), whole["grad"], rtol=1e-5, atol=1e-7) and np.isclose(
    loss, whole["loss"], rtol=1e-5
  )
  assert same == algorithm.per_token == (name not in (*SEQUENCE_LEVEL, "gspo"))
  assert np.abs(grad).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_flows_through_the_new_log_probs_alone(name):
  algorithm = strong(name, **CORRECTIONS)
  batch = arrays(random_batch(8, name))
  policies = arrays(random_policies(8, np.asarray(batch["mask"])))

  def value(inputs):
    signals = batch | {key: inputs[key] for key in ("entropy", "reward", "penalty")}
    advantages = inputs["factor"] * algorithm.advantages(**signals)
    mask = algorithm.loss_mask(**signals)
    weights = algorithm.token_weights(mask, batch["correct"], batch.get("guided"))
    loss, metrics = algorithm.loss(
      **{key: inputs[key] for key in policies},
      advantages=advantages,
      mask=mask,
      weights=weights,
      guided=batch.get("guided"),
    )
    return loss + sum(metrics.values())  # which are numbers to look at

  inputs = (
    policies
    | {key: batch[key] for key in ("entropy", "reward", "penalty")}
    | {"factor": jnp.float32(1)}
  )
  grads = jax.jit(jax.grad(value))(inputs)
  assert np.abs(grads.pop("logp")).max() > 1e-3
  assert len(grads) == 7 and not any(np.asarray(grad).any() for grad in grads.values())


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_constants(name):
  algorithm = strong(name)
  batch = arrays(random_batch(8, name))
  real = {key: batch[key] for key in ("entropy", "reward", "penalty")}
  grads = jax.grad(lambda x: (algorithm.advantages(**batch | x) ** 3).sum())(real)
  assert not any(np.asarray(grad).any() for grad in grads.values())


@pytest.mark.parametrize("name", NAMES)
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
  """There every ratio is 1: the derivative in log pi is -A times the token's weight, at any level."""
  batch = random_batch(9, name)
  policies = random_policies(9, batch["mask"])
  got = step(strong(name), arrays(batch), arrays(policies | {"logp": policies["logp_old"]}))
  advantages = np.asarray(got["advantages"])
  weights = np.asarray(got["weights"])
  np.testing.assert_allclose(got["grad"], -advantages * weights, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(got["loss"], -(advantages * weights).sum(), rtol=1e-5, atol=1e-6)
