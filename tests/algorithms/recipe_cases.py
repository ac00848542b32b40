"""The recipes, random batches for each of them, and one compiled step that every test shares."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import make

TOKEN_LEVEL = ("gtpo", "gtpo_v1", "gtpo_v1_clipped", "gtpo_v2")
SEQUENCE_LEVEL = ("grpo_s", "grpo_s_v1", "grpo_s_v2")
BY_ENTROPY = TOKEN_LEVEL + SEQUENCE_LEVEL
EVERY_GROUP = ("grpo", "dr_grpo", "gspo")
NAMES = (*BY_ENTROPY, *EVERY_GROUP, "dapo", "dapo_forking", "dapo_mixed")
CONTRAST = tuple(name for name in NAMES if name not in EVERY_GROUP)

COMPARISONS = [
  (compare, scope) for compare in ("position", "sequence", "matrix") for scope in ("group", "batch")
]
CORRECTIONS = {"dual_clip": 2.0, "kl_weight": 0.3, "tis_cap": 1.1}

# How shapes of credit can be told apart from their defaults: larger bonuses, and a clip range that cuts at both ends.
STRONG = {
  "gtpo": {"alpha1": 0.8, "alpha2": 0.4},
  "gtpo_v1": {"alpha": 0.4},
  "gtpo_v2": {"alpha": 0.4, "kappa": 2.0},
  "gtpo_v1_clipped": {"alpha1": 0.7, "alpha2": 0.4, "kappa": 1.4},
  "grpo_s": {"beta1": 0.8, "beta2": 0.4},
  "grpo_s_v1": {"beta": 0.4},
  "grpo_s_v2": {"beta": 0.4},
}


def strong(name, **options):
  """The recipe with weights that make its shaping visible."""
  return make(name, **STRONG.get(name, {}) | options)


def settings_of(algorithm):
  return dataclasses.asdict(algorithm.settings)


def random_batch(seed, name="gtpo", n=7, g=5, t=4):
  """Ragged completions. Group 0 is all right, 1 all wrong, 2 right in its last alone, 3 wrong in its last two alone; the
  others are mixed, and one completion of group 4 does not count. The last two of each group are the guide's, where the
  recipe has one. Padding holds large numbers.
  """
  rng = np.random.default_rng(seed)
  mask = np.arange(t) < rng.integers(1, t + 1, (n, g))[..., None]
  correct = rng.random((n, g)) < 0.5
  correct[:4] = [[True], [False], [False], [False]]
  correct[2, -1] = True
  correct[3, :-2] = True
  for i in range(4, n):
    right, wrong = rng.permutation(g)[:2]
    correct[i, right], correct[i, wrong] = True, False
  mask[4, 1] = False
  entropy = rng.gamma(0.7, 1.0, (n, g, t)) * (rng.random((n, g, t)) > 0.1)
  recipe = make(name).recipe
  wrong, right = recipe.rewards
  batch = {
    "entropy": np.where(mask, entropy, 1e6).astype(np.float32),
    "mask": mask,
    "correct": correct,
    "reward": np.where(correct, right, wrong).astype(np.float32),
    "penalty": -rng.random((n, g)).astype(np.float32),
  }
  return batch | (
    {"guided": np.broadcast_to(np.arange(g) >= g - 2, (n, g)).copy()}
    if name == "dapo_mixed"
    else {}
  )


def random_policies(seed, mask, spread=0.6):
  """Log-probs f32[n, g, t] of the new, the old and the reference policy and of the sampler; padding holds large numbers."""
  rng = np.random.default_rng(seed)
  old = -rng.gamma(1.0, 1.0, mask.shape)
  policies = {
    "logp": old + spread * rng.standard_normal(mask.shape),
    "logp_old": old,
    "logp_sampler": old + 0.1 * rng.standard_normal(mask.shape),
    "logp_reference": old + 0.3 * rng.standard_normal(mask.shape),
  }
  return {key: np.where(mask, x, 9e3).astype(np.float32) for key, x in policies.items()}


def arrays(tree):
  return jax.tree.map(jnp.asarray, tree)


@functools.partial(jax.jit, static_argnums=0)
def step(algorithm, batch, policies):
  """All that a recipe makes of a batch: advantages, mask, weights, loss, its gradient in logp, and the metrics."""
  advantages = algorithm.advantages(**batch)
  mask = algorithm.loss_mask(**batch)
  weights = algorithm.token_weights(mask, batch["correct"], batch.get("guided"))
  value = lambda logp: algorithm.loss(
    **policies | {"logp": logp},
    advantages=advantages,
    mask=mask,
    weights=weights,
    guided=batch.get("guided"),
  )
  (loss, metrics), grad = jax.value_and_grad(value, has_aux=True)(policies["logp"])
  return {
    "advantages": advantages,
    "mask": mask,
    "weights": weights,
    "loss": loss,
    "grad": grad,
    "metrics": metrics,
    "credit": algorithm.credit_metrics(**batch),
  }
