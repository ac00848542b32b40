"""`Algorithm`, a recipe under its name: advantages, token weights and loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.loss import LossInputs, objective_inputs, token_objectives
from gtpo_jax.algorithms.ratios import k3
from gtpo_jax.algorithms.recipes import Recipe, Settings
from gtpo_jax.algorithms.relative_entropy import ShapedRewards, Units, completion_entropy
from gtpo_jax.algorithms.selection import all_wrong, top_share
from gtpo_jax.algorithms.shaping import GtpoShaping, TokenShaping
from gtpo_jax.arrays import mean_or_nan
from gtpo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Computes advantages, token weights and the loss of a batch.

  It is frozen and hashable, and can be a static argument of jitted functions.

  Attributes:
    name: the name of its row in `RECIPES`.
    recipe: the row with this algorithm's settings.
  """

  name: str
  recipe: Recipe

  @functools.cached_property
  def settings(self) -> Settings:
    """The settings by name. Those that the algorithm does not read are None.

    `make(name, **recipe.settings)`, with those that it reads, returns an equal algorithm.
    """
    return Settings(**self.recipe.settings)

  def advantages(
    self,
    *,
    entropy: jax.Array,
    mask: jax.Array,
    correct: jax.Array,
    reward: jax.Array,
    penalty: jax.Array | None = None,
    guided: jax.Array | None = None,
    divergence: jax.Array | None = None,
    gaps: bool | None = None,
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
      divergence: f32[n, g, t], nats, the sampling policy's log-prob minus the teacher's; required
        with a teacher.
      gaps: whether some tokens between those in `mask` are not in it; None if the mask has to tell.

    Returns:
      f32[n, g, t]; 0 outside `loss_mask`.

    Raises:
      UserError: `guided` is given and the recipe has no guide, or there is a teacher and
        `divergence` is not given.
    """
    signals = jax.lax.stop_gradient(
      {
        "entropy": entropy,
        "mask": mask,
        "correct": correct,
        "reward": reward,
        "penalty": penalty,
        "guided": guided,
        "divergence": divergence,
      }
    )
    shaped, units = self.shaped(**signals, gaps=gaps)
    advantages = self.recipe.advantage(shaped, units, self.recipe.normalisation)
    mask = self.loss_mask(**signals)
    advantages = jnp.where(mask, advantages, 0.0)
    entropy = jnp.where(mask, signals["entropy"].astype(jnp.float32), 0.0)
    advantages = self.recipe.modulation(advantages, entropy, mask)
    distillation = self.recipe.distillation
    if distillation and distillation.sampled:
      if divergence is None:
        raise UserError(f"algorithm {self.name!r} has a teacher and needs divergence; pass it")
      gap = jnp.where(mask, signals["divergence"].astype(jnp.float32), 0.0)
      advantages -= self.teacher_weights(**signals, gaps=gaps) * gap
    return jax.lax.stop_gradient(advantages)

  def teacher_weights(self, **signals: Any) -> jax.Array:
    """Returns the weight of each token's divergence from the teacher, f32[n, g, t], a constant.

    It is 0 on tokens outside `loss_mask` and on those of a guide. Takes the arguments of
    `advantages`.
    """
    distillation = self.recipe.distillation
    mask = self.loss_mask(**signals)
    guided = signals.get("guided")
    if guided is not None:
      mask = mask & ~guided[..., None]
    shares = None
    if distillation.credit == "entropy":
      shaping = self.recipe.shaping
      shaping = shaping if isinstance(shaping, TokenShaping) else GtpoShaping()
      shares = shaping.shares(self._units(**signals, per_completion=False))
    return jax.lax.stop_gradient(distillation.weights(mask, shares))

  def shaped(self, **signals: jax.Array | None) -> tuple[ShapedRewards, Units]:
    """Returns the shaped reward of each unit of credit, and the units (the inputs of shaping).

    Takes the arguments of `advantages`.
    """
    units = self._units(**signals)
    return self.recipe.shaping(units)[0], units

  def credit_metrics(self, **signals: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the diagnostics of entropy shaping, f32[] each; {} for recipes without it.

    Takes the arguments of `advantages`.
    """
    return self.recipe.shaping(self._units(**signals))[1]

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
    _check_guided(self, guided)
    mask = self.recipe.selection.with_contrast(mask, correct, guided)
    share = self.recipe.selection.forking_share
    return top_share(entropy, mask, share) if share else mask

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
    _check_guided(self, guided)
    aggregate = self.recipe.aggregation
    if guided is None:
      return aggregate(mask)
    rescued = all_wrong(correct, mask.any(-1), guided)[:, None, None]
    return aggregate(mask & ~rescued) + self.recipe.guide.lambda_zero * aggregate(mask & rescued)

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

    Only for objectives with `select_needs`. Compute the selection from the complete batch of a
    gradient update, then slice it for its micro-batches.

    Args:
      log_probs: f32[n, g, t], nats, of the policy being trained.
      log_probs_old, advantages, mask: as in `LossInputs`.
      entropy_old: f32[n, g, t], nats, of the sampling policy; required with `stare`.
      key: PRNG key; required with `clip_cov` and `kl_cov`.

    Raises:
      UserError: an array that the objective requires is missing.
    """
    objective = self.recipe.objective
    given = {"entropy_old": entropy_old, "key": key}
    for name in objective.select_needs:
      _check_present(self, name, given[name])
    x = objective_inputs(objective, log_probs, log_probs_old, advantages, mask)
    return objective.select(jax.lax.stop_gradient(x._replace(entropy_old=entropy_old)), key)

  def loss(
    self, *, log_probs: jax.Array, entropy: jax.Array | None = None, **inputs: jax.Array | None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss f32[], and its metrics, f32[] each.

    The loss is differentiable only in `log_probs` and `entropy`.

    Args:
      log_probs: f32[n, g, t], nats, of the policy being trained.
      entropy: f32[n, g, t], nats, of the policy being trained; required with an entropy bonus.
      inputs: the fields of `LossInputs`; `log_probs_old`, `advantages` and `mask` are required.

    Raises:
      UserError: an array that the settings require is missing, or `guided` is given and the recipe
        has no guide.
    """
    x = LossInputs(**inputs)
    _check_loss_inputs(self, x, entropy)
    recipe = self.recipe
    x = jax.lax.stop_gradient(x)
    mask, weights = x.mask, x.weights
    if weights is None:
      mask = mask & (x.advantages != 0) if recipe.selection.forking_share else mask
      weights = self.token_weights(mask)
    x = x._replace(mask=mask)

    objective, metrics = token_objectives(recipe.objective, recipe.guide, log_probs, x)
    if recipe.corrections.tis_cap:
      importance = x.importance
      if importance is None:
        importance = recipe.corrections.weights(x.log_probs_old, x.log_probs_sampler, mask)
      objective *= importance
      metrics["mismatch/weight"] = mean_or_nan(importance, x.own)
    loss = -jnp.where(mask, weights * objective, 0.0).sum()
    kl_weight = recipe.reference.kl_weight
    if kl_weight:
      # Only on the policy's own tokens: k3 assumes samples from the policy, and the ratio to the
      # reference can be huge on the guide's tokens.
      divergence = k3(log_probs, x.log_probs_reference, x.own)
      loss += kl_weight * jnp.where(x.own, weights * divergence, 0.0).sum()
      metrics["kl/reference"] = mean_or_nan(divergence, x.own)
    if recipe.entropy_bonus:
      entropy_weights = x.entropy_weights
      if entropy_weights is None:
        entropy_weights = weights * recipe.entropy_bonus.entropy_coef
      loss -= jnp.where(x.own, entropy_weights * entropy, 0.0).sum()
    return loss, jax.lax.stop_gradient(metrics)

  def token_loss(
    self, log_probs: jax.Array, entropy: jax.Array, signals: Mapping[str, jax.Array | None]
  ) -> jax.Array:
    """Returns the sum of the loss terms of some of a batch's tokens, f32[].

    Valid only if the recipe is `per_token`.

    Args:
      log_probs: f32[b, c], nats, for c tokens in each of b rows.
      entropy: f32[b, c], nats; used only with an entropy bonus.
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
    gaps: bool | None = None,
    per_completion: bool | None = None,
    **_: jax.Array | None,
  ) -> Units:
    """Returns the inputs of reward shaping. Takes the arguments of `advantages`.

    `per_completion` is the unit of credit; None for that of the shaping.
    """
    _check_guided(self, guided)
    mask = self.recipe.selection.with_contrast(mask, correct, guided)
    entropy = entropy.astype(jnp.float32)
    tokens = mask.astype(jnp.float32)
    shaping = self.recipe.shaping
    if shaping.per_completion if per_completion is None else per_completion:
      tokens = tokens.sum(-1, keepdims=True)
      entropy = completion_entropy(entropy, mask, shaping.mean, shaping.h_floor)
      mask = mask.any(-1, keepdims=True)
    if penalty is None:
      penalty = jnp.zeros(correct.shape, jnp.float32)
    reward = reward.astype(jnp.float32)
    columns = correct[..., None], reward[..., None], penalty[..., None]
    return Units(entropy, mask, *columns, tokens, gaps)


def _check_loss_inputs(algorithm: Algorithm, x: LossInputs, entropy: jax.Array | None) -> None:
  """Raises UserError if an array that the settings require is missing."""
  recipe = algorithm.recipe
  _check_guided(algorithm, x.guided)
  if x.importance is None:
    _check_needed("tis_cap", recipe.corrections.tis_cap, "log_probs_sampler", x.log_probs_sampler)
  kl_weight = recipe.reference.kl_weight
  _check_needed("kl_weight", kl_weight, "log_probs_reference", x.log_probs_reference)
  if recipe.selects:
    _check_present(algorithm, "selected", x.selected)
  if recipe.entropy_bonus:
    _check_present(algorithm, "entropy", entropy)


def _check_guided(algorithm: Algorithm, guided: jax.Array | None) -> None:
  if guided is not None and not algorithm.recipe.guide.guide_completions:
    raise UserError(
      f"algorithm {algorithm.name!r} has no guide; omit `guided`, or use 'dapo_mixed'"
    )


def _check_present(algorithm: Algorithm, name: str, array: jax.Array | None) -> None:
  if array is None:
    objective = algorithm.recipe.objective.name
    raise UserError(f"algorithm {algorithm.name!r} (objective {objective!r}) needs {name}; pass it")


def _check_needed(setting: str, value: float, name: str, array: jax.Array | None) -> None:
  if value and array is None:
    raise UserError(f"algorithm.{setting} = {value} needs {name}; pass it, or set {setting} = 0")
