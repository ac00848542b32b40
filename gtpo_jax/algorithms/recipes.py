"""The algorithms, each a row: unit of credit x shaping x advantage x ratio x average, with its published settings.

Not to be confused with the other GTPO ("Group-relative Trajectory-based Policy Optimization", arXiv 2508.03772).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.advantages import NORM_SCOPE, two_sided_zscore, zscore
from gtpo_jax.algorithms.losses import clipped_objective, completion_mean, token_mean
from gtpo_jax.algorithms.ratios import geometric_sequence_ratio, sequence_ratio, token_ratio
from gtpo_jax.algorithms.relative_entropy import COMPARE, effective_participants, inverse_entropy, relative_entropy
from gtpo_jax.algorithms.shaping import Shaped, Signals, completion_entropy, entropy_credit
from gtpo_jax.arrays import masked_mean
from gtpo_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Settings:
  """Every hyperparameter of every recipe; a recipe reads those that its row lists, the others stay None.

  Attributes:
    alpha1, alpha2: token level: the base reward, and the weight of the entropy share (eqs. 3, 5).
    beta1, beta2: the same at the sequence level (eqs. 8, 10).
    compare: "position", "sequence" or "matrix": which entropies a token's is compared with.
    scope: "group" or "batch": whose completions are compared.
    norm_scope: "group" or "batch": over what advantages are z-scored.
    h_floor: nats; entropies below it count as it in 1/H.
    sign_guard: no correct unit gets a negative advantage, no wrong one a positive.
    mean: "arithmetic" or "geometric": the entropy of a whole completion.
    ratio: "arithmetic" or "geometric": the importance ratio of a whole completion.
    eps_low, eps_high: the clip range [1 - eps_low, 1 + eps_high].
    overlong_buffer: tokens before the length limit over which the soft penalty falls from 0 to -1; 0 switches it off.
  """

  alpha1: float | None = None
  alpha2: float | None = None
  beta1: float | None = None
  beta2: float | None = None
  compare: str | None = None
  scope: str | None = None
  norm_scope: str | None = None
  h_floor: float | None = None
  sign_guard: bool | None = None
  mean: str | None = None
  ratio: str | None = None
  eps_low: float | None = None
  eps_high: float | None = None
  overlong_buffer: int | None = None

  def __post_init__(self):
    def check(name: str, good: Callable[[Any], bool], bound: str) -> None:
      value = getattr(self, name)
      try:
        valid = value is None or (isinstance(value, bool) == (name == "sign_guard") and good(value))
      except TypeError:  # a text where a number belongs, and the like
        valid = False
      if not valid:
        raise UserError(f"algorithm.{name} must be {bound}, got {value!r}")

    for name in ("alpha1", "alpha2", "beta1", "beta2"):
      check(name, lambda x: 0 <= x < float("inf"), "at least 0 and finite")
    for name, choices in (("compare", {c for c, _ in COMPARE}), ("scope", {s for _, s in COMPARE}), ("norm_scope", NORM_SCOPE),
                          ("mean", MEANS), ("ratio", SEQUENCE_RATIOS)):
      check(name, lambda x, choices=choices: x in choices, f"one of {', '.join(sorted(choices))}")
    check("h_floor", lambda x: 0 < x < float("inf"), "above 0 and finite")
    check("eps_low", lambda x: 0 < x < 1, "in (0, 1)")
    check("eps_high", lambda x: 0 < x < float("inf"), "above 0 and finite")
    check("overlong_buffer", lambda x: x >= 0 and isinstance(x, int), "at least 0, in whole tokens")
    check("sign_guard", lambda x: isinstance(x, bool), "True or False")
    if self.eps_low is not None and self.eps_high is not None and self.eps_low > self.eps_high:
      raise UserError(f"algorithm.eps_low must be in (0, eps_high], got {self.eps_low} > {self.eps_high}")


MEANS = ("arithmetic", "geometric")
SEQUENCE_RATIOS = {"arithmetic": sequence_ratio, "geometric": geometric_sequence_ratio}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """One row of the table.

  Attributes:
    settings: the hyperparameters that this row reads, with their published values.
    per_completion: the unit of credit is a whole completion, else a token.
    shaping: (settings, signals) -> Shaped.
    advantage: (settings, shaped, signals) -> f32[n, g, u].
    ratio: (settings) -> function of (logp, logp_old, mask).
    average: mask -> weights that sum to 1.
    contrast: groups all right or all wrong are cleared before anything is computed.
    rewards: what a wrong and a right completion earn, before any penalty.
  """

  settings: Mapping[str, Any]
  per_completion: bool
  shaping: Callable[[Settings, Signals], Shaped]
  advantage: Callable[[Settings, Shaped, Signals], jax.Array]
  ratio: Callable[[Settings], Callable[..., jax.Array]]
  average: Callable[[jax.Array], jax.Array]
  contrast: bool
  rewards: tuple[float, float] = (0.0, 1.0)


def _token_credit(s: Settings, x: Signals) -> Shaped:
  return entropy_credit(x, base=s.alpha1, bonus=s.alpha2, compare=s.compare, scope=s.scope, h_floor=s.h_floor)


def _completion_credit(s: Settings, x: Signals) -> Shaped:
  return entropy_credit(x, base=s.beta1, bonus=s.beta2, compare="position", scope=s.scope, h_floor=s.h_floor)


def _plain_reward(s: Settings, x: Signals) -> Shaped:
  reward = jnp.where(x.mask, x.reward + x.penalty, 0.0)
  return Shaped(jnp.where(x.correct, reward, 0.0), jnp.where(x.correct, 0.0, reward))


def _two_sided(s: Settings, shaped: Shaped, x: Signals) -> jax.Array:
  return two_sided_zscore(shaped, x.correct, x.mask, s.norm_scope, s.sign_guard)


def _group_zscore(s: Settings, shaped: Shaped, x: Signals) -> jax.Array:
  return zscore(shaped.plus + shaped.minus, x.mask, NORM_SCOPE["group"])


def _token_ratio(s: Settings) -> Callable[..., jax.Array]:
  return token_ratio


def _sequence_ratio(s: Settings) -> Callable[..., jax.Array]:
  return SEQUENCE_RATIOS[s.ratio]


_CLIP = {"eps_low": 0.2, "eps_high": 0.28}
_CREDIT = {"scope": "group", "h_floor": 1e-2, "sign_guard": False, **_CLIP}

RECIPES: dict[str, Recipe] = {
    "gtpo": Recipe({"alpha1": 1.0, "alpha2": 0.1, "compare": "position", "norm_scope": "batch", **_CREDIT},
                   per_completion=False, shaping=_token_credit, advantage=_two_sided, ratio=_token_ratio, average=token_mean,
                   contrast=True),
    "grpo_s": Recipe({"beta1": 1.0, "beta2": 0.1, "mean": "arithmetic", "ratio": "arithmetic", "norm_scope": "group", **_CREDIT},
                     per_completion=True, shaping=_completion_credit, advantage=_two_sided, ratio=_sequence_ratio,
                     average=completion_mean, contrast=True),
    "dapo": Recipe({"overlong_buffer": 0, **_CLIP},
                   per_completion=True, shaping=_plain_reward, advantage=_group_zscore, ratio=_token_ratio, average=token_mean,
                   contrast=True, rewards=(-1.0, 1.0)),
    "grpo": Recipe({"eps_low": 0.2, "eps_high": 0.2},
                   per_completion=True, shaping=_plain_reward, advantage=_group_zscore, ratio=_token_ratio,
                   average=completion_mean, contrast=False),
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A recipe with its settings. Pure functions of arrays; frozen and hashable, so that it may be a static argument."""

  name: str
  settings: Settings

  @property
  def recipe(self) -> Recipe:
    """The row of the table."""
    return RECIPES[self.name]

  def loss_mask(self, mask: jax.Array, correct: jax.Array) -> jax.Array:
    """The tokens that carry signal, bool[n, g, t]: groups all right or all wrong cleared where the recipe asks for contrast."""
    alive = mask.any(-1)
    mixed = (correct & alive).any(1) & (~correct & alive).any(1)
    return mask & mixed[:, None, None] if self.recipe.contrast else mask

  def shaped(self, *, entropy: jax.Array, mask: jax.Array, correct: jax.Array, reward: jax.Array,
             penalty: jax.Array | None = None) -> tuple[Shaped, Signals]:
    """The shaped rewards and what they were made from, per unit of credit [n, g, u]."""
    mask = self.loss_mask(mask, correct)
    unit_entropy, unit_mask = entropy.astype(jnp.float32), mask
    if self.recipe.per_completion:
      unit_mask = mask.any(-1, keepdims=True)
      unit_entropy = jnp.zeros(unit_mask.shape, jnp.float32)  # recipes without a `mean` do not read it
      if self.settings.mean:
        unit_entropy = completion_entropy(entropy.astype(jnp.float32), mask, self.settings.mean, self.settings.h_floor)
    penalty = jnp.zeros(correct.shape, jnp.float32) if penalty is None else penalty
    signals = Signals(unit_entropy, unit_mask, *(x[..., None] for x in (correct, reward.astype(jnp.float32), penalty)))
    return self.recipe.shaping(self.settings, signals), signals

  def advantages(self, *, entropy: jax.Array, mask: jax.Array, correct: jax.Array, reward: jax.Array,
                 penalty: jax.Array | None = None) -> jax.Array:
    """Advantages of every token, under `stop_gradient`, in float32.

    Args:
      entropy: f32[n, g, t], nats, of the old policy's full distribution.
      mask: bool[n, g, t], sampled tokens.
      correct: bool[n, g], splits O+ and O-.
      reward: f32[n, g], what the baselines normalise.
      penalty: f32[n, g] <= 0, added to the reward by recipes that read it (grpo, dapo).

    Returns:
      f32[n, g, t]; 0 outside `loss_mask`.
    """
    inputs = jax.lax.stop_gradient({"entropy": entropy, "mask": mask, "correct": correct, "reward": reward, "penalty": penalty})
    shaped, signals = self.shaped(**inputs)
    advantages = self.recipe.advantage(self.settings, shaped, signals)
    return jax.lax.stop_gradient(jnp.where(self.loss_mask(mask, correct), advantages, 0.0))

  def token_weights(self, mask: jax.Array) -> jax.Array:
    """How much each token's objective counts, f32[n, g, t], summing to 1 over the whole update batch."""
    return self.recipe.average(mask)

  def loss(self, *, logp: jax.Array, logp_old: jax.Array, advantages: jax.Array, mask: jax.Array,
           weights: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped loss f32[], differentiable in `logp` alone, and its metrics.

    Args:
      logp: f32[n, g, t], nats, of the policy that learns.
      logp_old: f32[n, g, t], of the policy that sampled.
      advantages: f32[n, g, t].
      mask: bool[n, g, t], as `loss_mask` gives it.
      weights: `token_weights` of the whole batch where this is a micro-batch of it; made from `mask` if None.
    """
    logp_old, advantages = jax.lax.stop_gradient((logp_old, advantages))
    weights = self.token_weights(mask) if weights is None else weights
    s, ratio = self.settings, self.recipe.ratio(self.settings)(logp, logp_old, mask)
    objective = clipped_objective(ratio, jnp.where(mask, advantages, 0.0), s.eps_low, s.eps_high)
    loss = -jnp.where(mask, weights * objective, 0.0).sum()
    metrics = {"clip/low": masked_mean((ratio < 1 - s.eps_low) & (advantages < 0), mask),
               "clip/high": masked_mean((ratio > 1 + s.eps_high) & (advantages > 0), mask),
               "ratio/mean": masked_mean(ratio, mask)}
    return loss, jax.lax.stop_gradient(metrics)

  def credit_metrics(self, **inputs: jax.Array) -> dict[str, jax.Array]:
    """How the entropy spreads the credit: effective participants of the shares, and the conservation residual.

    Takes what `advantages` takes. Empty for recipes that do not read the entropy.
    """
    s = self.settings
    if s.scope is None:
      return {}
    shaped, x = self.shaped(**inputs)
    base, bonus = (s.beta1, s.beta2) if self.recipe.per_completion else (s.alpha1, s.alpha2)
    axes = COMPARE["position" if self.recipe.per_completion else s.compare, s.scope]
    right, wrong = x.mask & x.correct, x.mask & ~x.correct
    bonus_share = relative_entropy(x.entropy, right, axes)
    penalty_share = relative_entropy(inverse_entropy(x.entropy, s.h_floor), wrong, axes)
    residual = lambda total, count: jnp.abs(total / jnp.maximum(count, 1) - jnp.where(count > 0, base + bonus, 0.0))
    return {"credit/participants_correct": effective_participants(bonus_share, right, axes),
            "credit/participants_incorrect": effective_participants(penalty_share, wrong, axes),
            "credit/conservation_residual": jnp.maximum(residual(shaped.plus.sum(), right.sum()),
                                                        residual(-shaped.minus.sum(), wrong.sum()))}


def make(name: str, **overrides: Any) -> Algorithm:
  """An algorithm by name, with settings other than the published ones as keywords.

  Raises:
    UserError (a ValueError): an unknown name or setting, with the nearest valid one, or a value out of its bounds.
  """
  if name not in RECIPES:
    raise UserError(f"unknown algorithm {name!r}{nearest(name, RECIPES)}; valid are {', '.join(RECIPES)}")
  settings = RECIPES[name].settings
  for key, value in overrides.items():
    if key not in settings:
      raise UserError(f"algorithm {name!r} has no setting {key!r}{nearest(key, settings)}; it reads {', '.join(settings)}")
    if value is None:
      raise UserError(f"algorithm.{key} must be given a value, got None; leave it out for the published {settings[key]!r}")
  return Algorithm(name, Settings(**{**settings, **overrides}))
