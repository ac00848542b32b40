"""`Algorithm`, a recipe with its settings: advantages, token weights and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.advantages import NORM_SCOPE, entropy_bonus
from gtpo_jax.algorithms.corrections import importance_weights, kept_completions
from gtpo_jax.algorithms.diagnostics import ratio_metrics
from gtpo_jax.algorithms.loss_aggregation import LOSS_AGGREGATIONS
from gtpo_jax.algorithms.objectives import OBJECTIVES, Objective, ObjectiveInputs, capped_objective
from gtpo_jax.algorithms.ratios import RATIOS, Ratio, k3
from gtpo_jax.algorithms.recipes import RECIPES, Recipe
from gtpo_jax.algorithms.selection import all_wrong, has_contrast, top_share
from gtpo_jax.algorithms.settings import Settings
from gtpo_jax.algorithms.shaping import plain_reward
from gtpo_jax.algorithms.units import ShapedRewards, Units, completion_entropy
from gtpo_jax.arrays import masked_mean
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Computes advantages, token weights and the loss of a batch.

  It is frozen and hashable, and can be a static argument of jitted functions.
  """

  name: str
  settings: Settings

  @property
  def recipe(self) -> Recipe:
    """The entry of `RECIPES` under the algorithm's name."""
    return RECIPES[self.name]

  @property
  def shapes_by_entropy(self) -> bool:
    """Whether rewards come from `correct`, shaped by entropy, instead of from `reward`."""
    return self.recipe.shaping is not plain_reward

  @property
  def ratio(self) -> Ratio:
    """The importance ratio; the token ratio if the objective computes its own."""
    return RATIOS[self.settings.ratio or "token"]

  @property
  def objective(self) -> Objective:
    """The surrogate objective."""
    return OBJECTIVES[self.settings.objective]

  @property
  def selects(self) -> bool:
    """Whether the loss needs `selected`, from `select`."""
    return self.objective.select is not None

  @property
  def entropy_bonus(self) -> bool:
    """Whether the loss has an entropy bonus, and so needs `entropy`."""
    return bool(self.settings.entropy_coef or self.settings.entropy_target)

  @property
  def per_token(self) -> bool:
    """Whether each token's term of the loss depends only on that token's own log-prob and signals.

    If so, the tokens of a batch can be split in any way, and the loss is the sum of `token_loss`
    over the parts.
    """
    return self.ratio.per_token and self.objective.per_token

  @property
  def initial_entropy_coef(self) -> float | None:
    """The initial weight of the entropy bonus if it is adapted, and otherwise None."""
    return self.settings.entropy_coef if self.settings.entropy_target else None

  def settings_dict(self) -> dict[str, Any]:
    """Returns the settings that the algorithm reads, with their values.

    `make(name, **settings_dict)` returns an equal algorithm.
    """
    names = self.recipe.settings_with(self.settings.objective)
    return {name: getattr(self.settings, name) for name in names}

  def advantages(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    reward: jax.Array,
    penalty: jax.Array | None = None,
    guided: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the advantage of every token, under `stop_gradient`, in float32.

    Args:
      entropy: f32[n, g, t], nats, of the sampling policy's full distribution.
      mask: bool[n, g, t], sampled tokens.
      correct: bool[n, g], True for completions in O+ and False for those in O-.
      reward: f32[n, g], the verifier's reward; recipes with entropy shaping ignore it.
      penalty: f32[n, g], added to the (shaped) reward of correct and of incorrect completions: the
        length penalty and, with entropy shaping, the parts of the reward other than "correct". None
        for 0.
      guided: bool[n, g], completions sampled from a guide; None for none.

    Returns:
      f32[n, g, t]; 0 outside `loss_mask`.

    Raises:
      UserError: `guided` is given and the recipe has no guide.
    """
    signals = jax.lax.stop_gradient(
      {
        "entropy": entropy,
        "mask": mask,
        "correct": correct,
        "reward": reward,
        "penalty": penalty,
        "guided": guided,
      }
    )
    shaped, units = self.shaped(**signals)
    axes = NORM_SCOPE[self.settings.norm_scope or "group"]
    advantages = self.recipe.advantage(shaped, units, axes, self.settings.sign_guard or False)
    mask = self.loss_mask(**signals)
    advantages = jnp.where(mask, advantages, 0.0)
    if self.settings.bonus_alpha:
      entropy = jnp.where(mask, signals["entropy"].astype(jnp.float32), 0.0)
      advantages += entropy_bonus(
        advantages, entropy, self.settings.bonus_alpha, self.settings.bonus_kappa
      )
    return jax.lax.stop_gradient(advantages)

  def shaped(self, **signals: jax.Array | None) -> tuple[ShapedRewards, Units]:
    """Returns the shaped reward of each unit of credit, and the units (the inputs of shaping).

    Takes the arguments of `advantages`.
    """
    units = self._units(**signals)
    return self.recipe.shaping(units, self.settings)[0], units

  def credit_metrics(self, **signals: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the diagnostics of entropy shaping, f32[] each; {} for recipes without it.

    Takes the arguments of `advantages`.
    """
    return self.recipe.shaping(self._units(**signals), self.settings)[1]

  def loss_mask(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    guided: jax.Array | None = None,
    **_: jax.Array | None,
  ) -> jax.Array:
    """Returns the tokens that enter the loss, bool[n, g, t].

    Takes the arguments of `advantages`.
    """
    mask = self._contrast_mask(mask, correct, guided)
    share = self.settings.forking_share
    return top_share(entropy, mask, share) if share else mask

  def importance_weights(
    self, log_probs_trainer: jax.Array, log_probs_sampler: jax.Array, mask: jax.Array
  ) -> jax.Array | None:
    """Returns the weights of the tokens' objectives that `tis_cap` asks for; None if it is 0.

    Args:
      log_probs_trainer: f32[n, g, t], nats, of the policy before the update.
      log_probs_sampler: f32[n, g, t], nats, when the tokens were drawn.
      mask: bool[n, g, t], sampled tokens.

    Returns:
      f32[n, g, t], constants.
    """
    s = self.settings
    if not s.tis_cap:
      return None
    return importance_weights(log_probs_trainer, log_probs_sampler, mask, s.tis_cap, s.tis_level)

  def kept_completions(
    self, log_probs_trainer: jax.Array, log_probs_sampler: jax.Array, mask: jax.Array
  ) -> jax.Array | None:
    """Returns the completions that `mask_low` and `mask_high` keep; None if both are 0.

    Takes the arguments of `importance_weights`, and returns bool[n, g].
    """
    s = self.settings
    if not s.masks_completions:
      return None
    return kept_completions(log_probs_trainer, log_probs_sampler, mask, s.mask_low, s.mask_high)

  def token_weights(
    self, mask: jax.Array, correct: jax.Array | None = None, guided: jax.Array | None = None
  ) -> jax.Array:
    """Returns the weight of each token's objective in the loss, f32[n, g, t].

    Compute the weights from the complete batch of a gradient update, then slice them for its
    micro-batches.

    Args:
      mask: bool[n, g, t], from `loss_mask`.
      correct: bool[n, g]; required with `guided`.
      guided: bool[n, g], completions sampled from a guide. If given, groups in which none of the
        policy's own completions is correct are aggregated separately, and their weights are
        multiplied by `lambda_zero` (2507.12931).
    """
    self._check_guided(guided)
    aggregate = LOSS_AGGREGATIONS[self.settings.loss_aggregation]
    if guided is None:
      return aggregate(mask)
    rescued = all_wrong(correct, mask.any(-1), guided)[:, None, None]
    return aggregate(mask & ~rescued) + self.settings.lambda_zero * aggregate(mask & rescued)

  def select(
    self,
    *,
    log_probs: jax.Array,
    log_probs_old: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    entropy_old: jax.Array | None = None,
    key: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the tokens that the objective treats differently, bool[n, g, t]. Not differentiable.

    Only for objectives for which `selects` is True. Compute the selection from the complete batch
    of a gradient update, then slice it for its micro-batches.

    Args:
      log_probs, log_probs_old, advantages, mask: as in `loss`.
      entropy_old: f32[n, g, t], nats, of the sampling policy; required with `stare`.
      key: PRNG key; required with `clip_cov` and `kl_cov`.

    Raises:
      UserError: an array that the objective requires is missing.
    """
    s = self.settings
    self._check_present(s.objective == "stare", "entropy_old", entropy_old)
    self._check_present(self.objective.random, "key", key)
    inputs = self._objective_inputs(log_probs, log_probs_old, advantages, mask)
    return self.objective.select(jax.lax.stop_gradient(inputs), entropy_old, s, key)

  def next_entropy_coef(
    self, coef: jax.Array, entropy_old: jax.Array, mask: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the entropy weight of this gradient update, and the coefficient of the next one.

    Without `entropy_target`, the weight is `entropy_coef`, and `coef` is returned unchanged. With
    it, `Settings` describes how the coefficient is adapted (2505.22312).

    Args:
      coef: f32[], the current coefficient.
      entropy_old: f32[n, g, t], nats, of the sampling policy.
      mask: bool[n, g, t], from `loss_mask`.

    Returns:
      f32[] each.
    """
    s = self.settings
    if not s.entropy_target:
      return jnp.float32(s.entropy_coef), coef
    low = masked_mean(entropy_old, mask) <= s.entropy_target
    change = jnp.where(low, s.entropy_coef_delta, -s.entropy_coef_delta)
    return jnp.where(low, coef, 0.0), jnp.clip(coef + change, 0.0, s.entropy_coef_max)

  def loss(
    self,
    *,
    advantages: jax.Array,
    mask: jax.Array,
    log_probs: jax.Array | None = None,
    log_probs_old: jax.Array | None = None,
    weights: jax.Array | None = None,
    guided: jax.Array | None = None,
    selected: jax.Array | None = None,
    entropy: jax.Array | None = None,
    entropy_weights: jax.Array | None = None,
    importance: jax.Array | None = None,
    log_probs_sampler: jax.Array | None = None,
    log_probs_reference: jax.Array | None = None,
    logp: jax.Array | None = None,
    logp_old: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss f32[], and its metrics, f32[] each.

    The loss is differentiable only in `log_probs` and `entropy`.

    Args:
      advantages: f32[n, g, t].
      mask: bool[n, g, t], from `loss_mask`.
      log_probs: f32[n, g, t], nats, of the policy being trained.
      log_probs_old: f32[n, g, t], nats, of the policy that sampled the completion.
      weights: f32[n, g, t], from `token_weights` of the complete batch. None for
        `token_weights(mask)`; with `forking_share`, tokens with advantage 0 are first removed from
        `mask`.
      guided: bool[n, g], completions sampled from a guide. Their ratio is capped instead of
        clipped.
      selected: bool[n, g, t], from `select`; required if `selects` is True.
      entropy: f32[n, g, t], nats, of the policy being trained; required with `entropy_bonus`.
      entropy_weights: f32[n, g, t], the weights of the entropies in the loss: `weights` times the
        coefficient of the entropy bonus. None: `weights` times `entropy_coef`.
      importance: f32[n, g, t], from `importance_weights` of the complete batch. None with
        `tis_cap`: computed from `log_probs_old` and `log_probs_sampler`.
      log_probs_sampler: f32[n, g, t], nats, of the tokens when they were drawn, computed by the
        sampler; required with `tis_cap` if `importance` is None.
      log_probs_reference: f32[n, g, t], nats, of the frozen reference; required with `kl_weight`.
      logp: alias of `log_probs`.
      logp_old: alias of `log_probs_old`.

    Raises:
      UserError: an array that the settings require is missing; `log_probs` or `log_probs_old` is
        given under both of its names or under neither; or `guided` is given and the recipe has no
        guide.
    """
    log_probs = _resolve_alias("log_probs", log_probs, "logp", logp)
    log_probs_old = _resolve_alias("log_probs_old", log_probs_old, "logp_old", logp_old)
    self._check_guided(guided)
    if importance is None:
      self._check_needed("tis_cap", "log_probs_sampler", log_probs_sampler)
    self._check_needed("kl_weight", "log_probs_reference", log_probs_reference)
    self._check_present(self.selects, "selected", selected)
    self._check_present(self.entropy_bonus, "entropy", entropy)
    log_probs_old, advantages, importance, log_probs_reference = jax.lax.stop_gradient(
      (log_probs_old, advantages, importance, log_probs_reference)
    )
    s = self.settings
    if weights is None:
      mask = mask & (advantages != 0) if s.forking_share else mask
      weights = self.token_weights(mask)
    own = mask if guided is None else mask & ~guided[..., None]

    inputs = self._objective_inputs(log_probs, log_probs_old, advantages, mask)
    objective, metrics = self._objective(inputs._replace(selected=selected), guided)
    if s.tis_cap:
      if importance is None:
        importance = self.importance_weights(log_probs_old, log_probs_sampler, mask)
      objective *= importance
      metrics["mismatch/weight"] = masked_mean(importance, own)
    loss = -jnp.where(mask, weights * objective, 0.0).sum()
    if s.kl_weight:
      # Only on the policy's own tokens: k3 assumes samples from the policy, and the ratio to the
      # reference can be huge on the guide's tokens.
      divergence = k3(log_probs, log_probs_reference, own)
      loss += s.kl_weight * jnp.where(own, weights * divergence, 0.0).sum()
      metrics["kl/reference"] = masked_mean(divergence, own)
    if self.entropy_bonus:
      if entropy_weights is None:
        entropy_weights = weights * s.entropy_coef
      loss -= jnp.where(own, entropy_weights * entropy, 0.0).sum()
    return loss, jax.lax.stop_gradient(metrics)

  def token_loss(
    self, log_probs: jax.Array, entropy: jax.Array, signals: Mapping[str, jax.Array | None]
  ) -> jax.Array:
    """Returns the sum of the loss terms of some of a batch's tokens, f32[].

    Valid only if `per_token` is True.

    Args:
      log_probs: f32[b, c], nats, for c tokens in each of b rows.
      entropy: f32[b, c], nats; used only with `entropy_bonus`.
      signals: the other arguments of `loss`, [b, c] each. `weights` come from the complete batch,
        and `guided` says for each token whether its completion was sampled from the guide.
    """
    # Each token is treated as a completion of one token: [b, c, 1].
    values = {**signals, "log_probs": log_probs, "entropy": entropy}
    single = jax.tree.map(lambda x: x[..., None], values)
    loss, _ = self.loss(**single | {"guided": signals.get("guided")})
    return loss

  def _units(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    reward: jax.Array,
    penalty: jax.Array | None = None,
    guided: jax.Array | None = None,
  ) -> Units:
    """Returns the inputs of reward shaping. Takes the arguments of `advantages`."""
    mask = self._contrast_mask(mask, correct, guided)
    entropy = entropy.astype(jnp.float32)
    tokens = mask.astype(jnp.float32)
    if self.recipe.per_completion:
      tokens = tokens.sum(-1, keepdims=True)
      mean = self.settings.mean or "arithmetic"
      entropy = completion_entropy(entropy, mask, mean, self.settings.h_floor)
      mask = mask.any(-1, keepdims=True)
    if penalty is None:
      penalty = jnp.zeros(correct.shape, jnp.float32)
    reward = reward.astype(jnp.float32)
    return Units(entropy, mask, correct[..., None], reward[..., None], penalty[..., None], tokens)

  def _contrast_mask(
    self, mask: jax.Array, correct: jax.Array, guided: jax.Array | None
  ) -> jax.Array:
    """Returns `mask`, set to False in groups without contrast if the settings exclude them."""
    self._check_guided(guided)
    if not self.settings.contrast:
      return mask
    return mask & has_contrast(correct, mask.any(-1), guided)[:, None, None]

  def _objective_inputs(
    self, log_probs: jax.Array, log_probs_old: jax.Array, advantages: jax.Array, mask: jax.Array
  ) -> ObjectiveInputs:
    """Returns the inputs of the objective, with zeros where `mask` is False."""
    ratio = self.ratio.function(log_probs, log_probs_old, mask)
    zeroed = (jnp.where(mask, x, 0.0) for x in (log_probs, log_probs_old, advantages))
    return ObjectiveInputs(ratio, *zeroed, mask)

  def _objective(
    self, x: ObjectiveInputs, guided: jax.Array | None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns each token's objective f32[n, g, t], and metrics of the ratios and the objective."""
    own = x.mask if guided is None else x.mask & ~guided[..., None]
    objective, counted = self.objective.function(x, self.settings)
    metrics = {name: masked_mean(flags, own) for name, flags in counted.items()}
    constants = jax.lax.stop_gradient((x.ratio, x.advantages, x.log_probs))
    metrics |= ratio_metrics(*constants, own)
    if guided is None:
      return objective, metrics
    guided = guided[..., None]
    cap = self.settings.guide_cap
    metrics["clip/guide"] = masked_mean(x.ratio > cap, x.mask & guided)
    return jnp.where(guided, capped_objective(x.ratio, x.advantages, cap), objective), metrics

  def _check_guided(self, guided: jax.Array | None) -> None:
    if guided is not None and not self.settings.guide_completions:
      raise UserError(f"algorithm {self.name!r} has no guide; omit `guided`, or use 'dapo_mixed'")

  def _check_present(self, needed: bool, name: str, array: jax.Array | None) -> None:
    if needed and array is None:
      raise UserError(
        f"algorithm {self.name!r} (objective {self.settings.objective!r}) needs {name}; pass it"
      )

  def _check_needed(self, setting: str, name: str, array: jax.Array | None) -> None:
    value = getattr(self.settings, setting)
    if value and array is None:
      raise UserError(f"algorithm.{setting} = {value} needs {name}; pass it, or set {setting} = 0")


def _resolve_alias(
  name: str, array: jax.Array | None, alias: str, aliased: jax.Array | None
) -> jax.Array:
  if (array is None) == (aliased is None):
    given = "neither" if array is None else "both"
    raise UserError(f"Algorithm.loss takes {name} (or its alias {alias}), got {given}")
  return aliased if array is None else array
