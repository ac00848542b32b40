"""The recipes, random batches for each of them, and one compiled step that all tests share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from slow_reference import BY_ENTROPY, EVERY_GROUP, SEQUENCE_LEVEL

from gtpo_jax.algorithms import OBJECTIVES, RECIPES, make
from gtpo_jax.algorithms.advantages import no_credit

# The tests of what a teacher adds are in test_distillation.py.
NAMES = tuple(name for name, recipe in RECIPES.items() if recipe.advantage != no_credit)
CONTRAST = tuple(name for name in NAMES if name not in EVERY_GROUP)
# A reward is credit without others to be compared with; in "otb" at the end of the longest one.
# Gains in value are not rewards of the batch.
WITHOUT_BASELINE = ("w_reinforce", "otb", "vineppo", "spo_chain")
# Groups that are all correct or all incorrect are in the loss, with advantages of 0.
ZERO_WITHOUT_CONTRAST = ("pass_at_k",)
WITHOUT_ENTROPY = tuple(name for name in NAMES if name not in BY_ENTROPY)
SEQUENCE_RATIO = (*SEQUENCE_LEVEL, "gspo")
# The loss of a token depends on the other tokens of its completion.
NOT_PER_TOKEN = (*SEQUENCE_RATIO, "gspo_token", "gmpo", "fipo")
# The objectives that are a weight without a gradient times the log-prob.
WEIGHTED_LOG_PROBS = ("cispo", "dppo", "aspo")

COMPARISONS = [
  (compare, scope) for compare in ("position", "sequence", "matrix") for scope in ("group", "batch")
]
CORRECTIONS = {"dual_clip": 2.0, "kl_weight": 0.3, "tis_cap": 1.1}
KEY = jax.random.key(7)

# The setting that multiplies the entropy share on O+.
BONUS = {
  "gtpo": "alpha2",
  "gtpo_v1": "alpha",
  "gtpo_v1_clipped": "alpha2",
  "gtpo_v2": "alpha",
  "grpo_s": "beta2",
  "grpo_s_v1": "beta",
  "grpo_s_v2": "beta",
}
# Settings that make the shaping visible: large weights, and a clip range that cuts at both ends.
STRONG = {
  "gtpo": {"alpha1": 0.8, "alpha2": 0.4},
  "gtpo_v1": {"alpha": 0.4},
  "gtpo_v2": {"alpha": 0.4, "kappa": 2.0},
  "gtpo_v1_clipped": {"alpha1": 0.6, "alpha2": 0.4, "kappa": 1.25},
  "grpo_s": {"beta1": 0.8, "beta2": 0.4},
  "grpo_s_v1": {"beta": 0.4},
  "grpo_s_v2": {"beta": 0.4},
  "qae": {"baseline_quantile": 0.6},
  "pass_at_k": {"pass_k": 2},
  "w_reinforce": {"positive_weight": 0.7},
  "rlsd": {"teacher_mix": 0.8, "teacher_clip": 0.5},
}
# Settings that make each objective act on some, but not all, tokens of `random_policies`.
STRONG_OBJECTIVE = {
  "cispo": {"eps_low": 0.4, "eps_high": 0.5},
  "gmpo": {"eps_low": 0.3, "eps_high": 0.2},
  "dppo": {"delta_low": 0.1, "delta_high": 0.1, "ratio_cap": 1.5},
  "aspo": {"eps_low": 0.3, "eps_high": 0.3, "ratio_cap": 1.4},
  "clip_cov": {"selected_share": 0.2, "cov_low": 0.05, "cov_high": 1.5},
  "kl_cov": {"selected_share": 0.2, "kl_cov_coef": 0.7},
  "stare": {"selected_share": 0.3, "surprise_weight": 1.4, "entropy_gate": 50.0},
  "fipo": {
    "dual_clip": 2.5,
    "half_life": 2.0,
    "influence_low": 0.3,
    "influence_high": 0.4,
    "safe_ratio": 1.5,
  },
}


def strong(name, **options):
  """Returns the algorithm with weights that make its shaping and its objective visible."""
  objective = options.get("objective", RECIPES[name].objective.name)
  return make(name, **STRONG.get(name, {}) | STRONG_OBJECTIVE.get(objective, {}) | options)


def corrections(name, objective=None):
  """Returns the settings of `CORRECTIONS` that the recipe reads."""
  recipe = RECIPES[name]
  settings = recipe.with_objective(objective or recipe.objective.name).settings
  return {key: value for key, value in CORRECTIONS.items() if key in settings}


def meaningful(name, objective):
  """Returns whether `make` accepts the objective for the recipe."""
  token_credit = RECIPES[name].per_token_credit
  if OBJECTIVES[objective].per_completion and token_credit:
    return False
  return not (has_guide(name) and objective in ("gmpo", "clip_cov", "kl_cov", "stare"))


def settings_of(algorithm):
  return dataclasses.asdict(algorithm.settings)


def has_guide(name):
  return "guide_completions" in RECIPES[name].settings


def option_id(value):
  """Returns a test id for a name or a dict of options."""
  return value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain"


def random_batch(seed, name="gtpo", n=7, g=5, t=4):
  """Returns a batch of ragged completions, with large numbers in the padding.

  Group 0 is all correct and group 1 all incorrect. In group 2 only the last completion is correct,
  in group 3 all but the last two. The other groups are mixed, and one completion of group 4 does
  not count. The last two completions of each group are the guide's, if the recipe has one.
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
  wrong, right = RECIPES[name].rewards
  batch = {
    "entropy": np.where(mask, entropy, 1e6).astype(np.float32),
    "mask": mask,
    "correct": correct,
    "reward": np.where(correct, right, wrong).astype(np.float32),
    "penalty": -rng.random((n, g)).astype(np.float32),
  }
  batch |= random_needs(rng, name, batch)
  if has_guide(name):
    batch["guided"] = np.broadcast_to(np.arange(g) >= g - 2, (n, g)).copy()
  return batch


def random_needs(rng, name, batch):
  """Returns the signals that only this recipe needs."""
  if RECIPES[name].turns:
    return random_turns(rng, batch)
  shape = batch["correct"].shape
  needs = {}
  if RECIPES[name].distillation:
    gap = np.where(batch["mask"], rng.normal(0.1, 0.5, batch["mask"].shape), 9e3)
    needs["divergence"] = gap.astype(np.float32)
  if "score_norms" in RECIPES[name].needs:
    norms = np.where(batch["mask"], 2 * rng.random(batch["mask"].shape) ** 2, 9e3)
    needs["score_norms"] = norms.astype(np.float32)
  if RECIPES[name].continuations:
    gains = np.where(rng.random(batch["mask"].shape) < 0.2, np.nan, rng.normal(size=(*shape, 1)))
    needs["value_gains"] = np.where(batch["mask"], gains, 9e3).astype(np.float32)
  if "parts" in RECIPES[name].needs:
    parts = np.stack([batch["reward"], *rng.random((2, *shape)).round(1)], -1)
    needs["parts"] = parts.astype(np.float32)
    needs["part_weights"] = np.tile(np.float32([1.0, 0.5, -0.2]), (len(parts), 1))
  return needs


def with_gaps(batch, seed, t=11):
  """Returns `batch` with its tokens at random positions of longer completions, in their order."""
  rng = np.random.default_rng(seed)
  n, g, short = batch["mask"].shape
  places = np.stack([np.sort(rng.permutation(t)[:short]) for _ in range(n * g)])
  places = places.reshape(n, g, short)
  spread = dict(batch)
  for name, filler in (
    ("mask", False),
    ("entropy", 7e5),
    ("divergence", 7e5),
    ("score_norms", 7e5),
  ):
    if name in batch:
      values = np.full((n, g, t), filler, batch[name].dtype)
      np.put_along_axis(values, places, batch[name], -1)
      spread[name] = values
  return spread, places


def random_turns(rng, batch):
  """Returns turns of random lengths, their rewards and states, of which there are few."""
  mask = batch["mask"] & (rng.random(batch["mask"].shape) > 0.3)
  mask[..., 0] = batch["mask"][..., 0]
  begins = mask & ~np.pad(mask[..., :-1], ((0, 0), (0, 0), (1, 0)))
  number = np.maximum(np.cumsum(begins, -1) - 1, 0)
  values = rng.normal(size=mask.shape)
  last = np.maximum(begins.sum(-1, keepdims=True) - 1, 0)
  earlier = np.where(np.arange(mask.shape[-1]) < last, values, 0.0).sum(-1, keepdims=True)
  total = (batch["reward"] + batch["penalty"])[..., None]
  np.put_along_axis(values, last, total - earlier, -1)
  states = rng.integers(0, 3, mask.shape)
  states[..., 0] = 0
  return {
    "mask": mask,
    "turn_reward": np.where(mask, np.take_along_axis(values, number, -1), 0).astype(np.float32),
    "turn_state": np.where(mask, np.take_along_axis(states, number, -1), 0).astype(np.int32),
  }


def random_policies(seed, mask, spread=0.6):
  """Returns log-probs f32[n, g, t] of four policies, with large numbers in the padding."""
  rng = np.random.default_rng(seed)
  old = -rng.gamma(1.0, 1.0, mask.shape)
  policies = {
    "log_probs": old + spread * rng.standard_normal(mask.shape),
    "log_probs_old": old,
    "log_probs_sampler": old + 0.1 * rng.standard_normal(mask.shape),
    "log_probs_reference": old + 0.3 * rng.standard_normal(mask.shape),
  }
  return {key: np.where(mask, x, 9e3).astype(np.float32) for key, x in policies.items()}


def arrays(tree):
  return jax.tree.map(jnp.asarray, tree)


@functools.partial(jax.jit, static_argnums=0)
def step(algorithm, batch, policies):
  """Returns all that an algorithm computes from a batch, and the gradient in `log_probs`."""
  advantages = algorithm.advantages(**batch)
  mask = algorithm.loss_mask(**batch)
  weights = algorithm.token_weights(mask, batch["correct"], batch.get("guided"))
  selected = None
  if algorithm.recipe.selects:
    selected = algorithm.select(
      log_probs=policies["log_probs"],
      log_probs_old=policies["log_probs_old"],
      advantages=advantages,
      mask=mask,
      entropy=batch["entropy"],
      key=KEY,
    )
  value = lambda log_probs: algorithm.loss(
    **policies | {"log_probs": log_probs},
    advantages=advantages,
    mask=mask,
    weights=weights,
    guided=batch.get("guided"),
    selected=selected,
  )
  (loss, metrics), grad = jax.value_and_grad(value, has_aux=True)(policies["log_probs"])
  results = {} if selected is None else {"selected": selected}
  return results | {
    "advantages": advantages,
    "mask": mask,
    "weights": weights,
    "loss": loss,
    "grad": grad,
    "metrics": metrics,
    "credit": algorithm.credit_metrics(**batch),
  }
