"""`make` and `Algorithm`, a recipe under its name: advantages, token weights and loss."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms.advantages import Distillation
from gtpo_jax.algorithms.loss import objective_inputs, token_objectives
from gtpo_jax.algorithms.modulation import ModulationInputs
from gtpo_jax.algorithms.objectives import CHOICE
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS
from gtpo_jax.algorithms.recipes import RECIPES, Recipe, Settings
from gtpo_jax.algorithms.relative_entropy import ShapedRewards, Units, completion_entropy
from gtpo_jax.algorithms.selection import all_wrong, top_share
from gtpo_jax.algorithms.shaping import GtpoShaping, TokenShaping
from gtpo_jax.arrays import Needed, Signals, mean_or_nan
from gtpo_jax.runtime.errors import UserError, did_you_mean


def takes_fields(method: Callable[..., Any]) -> Callable[..., Any]:
  """Lets a method of `Signals` take their fields as keyword arguments too."""
  own = inspect.signature(method).parameters

  @functools.wraps(method)
  def call(self: Algorithm, signals: Signals | None = None, **named: Any) -> Any:
    if signals is None:
      signals = Signals(**{name: x for name, x in named.items() if name not in own})
      named = {name: x for name, x in named.items() if name in own}
    return method(self, signals, **named)

  return call


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Computes advantages, token weights and the loss of a batch.

  It is frozen and hashable, and can be a static argument of jitted functions. Its methods take a
  batch as `Signals`, or its fields as keyword arguments. In the loss, the log-probs and entropies
  of the policy being trained come beside it.

  Attributes:
    name: the name of its row in `RECIPES`.
    recipe: the row with this algorithm's settings.
  """

  name: str
  recipe: Recipe

  @functools.cached_property
  def settings(self) -> Settings:
    """The settings by name. Those that the algorithm does not read are None.

    `make(name, **recipe.settings)`, with the settings that it reads, returns an equal algorithm.
    """
    return Settings(**self.recipe.settings)

  @takes_fields
  def advantages(self, signals: Signals) -> jax.Array:
    """Returns the advantage of every token, under `stop_gradient`, in float32.

    Args:
      signals: `entropy`, `mask`, `correct` and `reward` are needed.

    Returns:
      f32[n, g, t]; 0 outside `loss_mask`.

    Raises:
      UserError: `guided` is given and the recipe has no guide, or there is a teacher and
        `divergence` is not given, or turns are compared and their rewards are not given, or a
        signal in `recipe.needs` is not given.
    """
    for name in self.recipe.needs:
      if getattr(signals, name) is None:
        raise UserError(f"algorithm {self.name!r} needs {name}; pass it")
    x = jax.lax.stop_gradient(signals)
    shaped, units = self.shaped(x)
    advantages = self.recipe.advantage(shaped, units, self.recipe.normalisation)
    mask = self.loss_mask(x)
    if turns := self.recipe.turns:
      advantages = turns(advantages, x.turn_reward, x.turn_state, x.mask)
    advantages = jnp.where(mask, advantages, 0.0)
    masked = lambda values: jnp.where(mask, values.astype(jnp.float32), 0.0)
    of_tokens = ModulationInputs(mask, masked(x.entropy))
    modulation = self.recipe.modulation
    taught = self.recipe.distillation and self.recipe.distillation.sampled
    if taught:
      if x.divergence is None:
        raise UserError(f"algorithm {self.name!r} has a teacher and needs divergence; pass it")
      of_tokens = of_tokens._replace(divergence=masked(x.divergence))
    advantages = modulation(advantages, of_tokens)
    if taught and not modulation.by_teacher:
      advantages -= self.teacher_weights(x) * of_tokens.divergence
    return jax.lax.stop_gradient(advantages)

  @takes_fields
  def teacher_weights(self, signals: Signals) -> jax.Array:
    """Returns the weight of each token's divergence from the teacher, f32[n, g, t], a constant.

    It is 0 on tokens outside `loss_mask` and on a guide's. Needs what `advantages` needs.
    """
    distillation = self.recipe.distillation
    mask = dataclasses.replace(signals, mask=self.loss_mask(signals)).own
    shares = None
    if distillation.credit == "entropy":
      shaping = self.recipe.shaping
      shaping = shaping if isinstance(shaping, TokenShaping) else GtpoShaping()
      shares = shaping.shares(_units(self, signals, per_completion=False))
    return jax.lax.stop_gradient(distillation.weights(mask, shares))

  @takes_fields
  def shaped(self, signals: Signals) -> tuple[ShapedRewards, Units]:
    """Returns the shaped reward of each unit of credit, and the units (the inputs of shaping).

    Needs what `advantages` needs.
    """
    units = _units(self, signals)
    return self.recipe.shaping(units)[0], units

  @takes_fields
  def credit_metrics(self, signals: Signals) -> dict[str, jax.Array]:
    """Returns the diagnostics of entropy shaping, f32[] each; {} for recipes without it.

    Needs what `advantages` needs.
    """
    return self.recipe.shaping(_units(self, signals))[1]

  @takes_fields
  def loss_mask(self, signals: Signals) -> jax.Array:
    """Returns the tokens that enter the loss, bool[n, g, t].

    Args:
      signals: `entropy`, `mask` and `correct` are needed; with continuations, `value_gains`.
    """
    signals.need("entropy", "correct")
    _check_guided(self, signals.guided)
    selection = self.recipe.selection
    mask = selection.with_contrast(signals.mask, signals.correct, signals.guided)
    if self.recipe.continuations:
      signals.need("value_gains")
      mask &= ~jnp.isnan(signals.value_gains)
    share = selection.forking_share
    return top_share(signals.entropy, mask, share) if share else mask

  def token_weights(
    self, mask: jax.Array, correct: Needed = None, guided: Needed = None
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

  @takes_fields
  def select(
    self, signals: Signals, *, log_probs: jax.Array, key: jax.Array | None = None
  ) -> jax.Array:
    """Returns the tokens that the objective treats differently, bool[n, g, t]. Not differentiable.

    Only for objectives with `select_needs`. Compute the selection from the complete batch of a
    gradient update, then slice it for its micro-batches.

    Args:
      signals: `log_probs_old`, `advantages` and `mask` are needed, with `stare` also `entropy`.
      log_probs: f32[n, g, t], nats, of the policy being trained.
      key: PRNG key; needed with `clip_cov` and `kl_cov`.

    Raises:
      UserError: an array that the objective needs is missing.
    """
    signals.need("log_probs_old", "advantages")
    objective = self.recipe.objective
    given = {"entropy": signals.entropy, "key": key}
    for name in objective.select_needs:
      _check_present(self, name, given[name])
    inputs = objective_inputs(objective, log_probs, signals)
    return objective.select(jax.lax.stop_gradient(inputs), key)

  @takes_fields
  def loss(
    self, signals: Signals, *, log_probs: jax.Array, entropy: Needed = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss f32[], and its metrics, f32[] each.

    The loss is differentiable only in `log_probs` and `entropy`.

    Args:
      signals: `log_probs_old`, `advantages` and `mask` are needed.
      log_probs: f32[n, g, t], nats, of the policy being trained.
      entropy: f32[n, g, t], nats, of the policy being trained; needed with an entropy bonus.

    Raises:
      UserError: an array that the settings need is missing, or `guided` is given and the recipe has
        no guide.
    """
    signals.need("log_probs_old", "advantages")
    _check_loss_signals(self, signals, entropy)
    recipe = self.recipe
    x = jax.lax.stop_gradient(signals)
    mask, weights = x.mask, x.weights
    if weights is None:
      mask = mask & (x.advantages != 0) if recipe.selection.forking_share else mask
      weights = self.token_weights(mask)
    x = dataclasses.replace(x, mask=mask)

    objective, metrics = token_objectives(recipe.objective, recipe.guide, log_probs, x)
    if recipe.corrections.tis_cap:
      importance: Needed = x.importance
      if importance is None:
        importance = recipe.corrections.weights(x.log_probs_old, x.log_probs_sampler, mask)
      objective *= importance
      metrics["mismatch/weight"] = mean_or_nan(importance, x.own)
    loss = -jnp.where(mask, weights * objective, 0.0).sum()
    kl_weight = recipe.reference.kl_weight
    if kl_weight:
      divergence = recipe.reference.divergence(log_probs, x)
      loss += kl_weight * jnp.where(x.own, weights * divergence, 0.0).sum()
      metrics["kl/reference"] = mean_or_nan(divergence, x.own)
    if recipe.entropy_bonus:
      entropy_weights: Needed = x.entropy_weights
      if entropy_weights is None:
        entropy_weights = weights * recipe.entropy_bonus.entropy_coef
      loss -= jnp.where(x.own, entropy_weights * entropy, 0.0).sum()
    return loss, jax.lax.stop_gradient(metrics)

  def token_loss(self, log_probs: jax.Array, entropy: jax.Array, signals: Signals) -> jax.Array:
    """Returns the sum of the loss terms of some of a batch's tokens, f32[].

    Valid only if the recipe is `per_token`.

    Args:
      log_probs: f32[b, c], nats, for c tokens in each of b rows.
      entropy: f32[b, c], nats; used only with an entropy bonus.
      signals: of the tokens, [b, c] each. `weights` come from the complete batch, and
        `guided` says for each token whether its completion was sampled from the guide.
    """
    # Each token is treated as a completion of one token: [b, c, 1].
    values = (log_probs, entropy, signals)
    log_probs, entropy, single = jax.tree.map(lambda x: x[..., None], values)
    single = single.replace(guided=signals.guided)
    return self.loss(single, log_probs=log_probs, entropy=entropy)[0]


def _units(algorithm: Algorithm, x: Signals, per_completion: bool | None = None) -> Units:
  """Returns the inputs of reward shaping.

  `per_completion` is the unit of credit; None for the shaping's.
  """
  x.need("entropy", "correct", "reward")
  _check_guided(algorithm, x.guided)
  mask = algorithm.recipe.selection.with_contrast(x.mask, x.correct, x.guided)
  entropy = x.entropy.astype(jnp.float32)
  tokens = mask.astype(jnp.float32)
  shaping = algorithm.recipe.shaping
  if shaping.per_completion if per_completion is None else per_completion:
    tokens = tokens.sum(-1, keepdims=True)
    entropy = completion_entropy(entropy, mask, shaping.mean, shaping.h_floor)
    mask = mask.any(-1, keepdims=True)
  penalty = x.penalty
  if penalty is None:
    penalty = jnp.zeros(x.correct.shape, jnp.float32)
  reward = x.reward.astype(jnp.float32)
  if turns := algorithm.recipe.turns:
    if x.turn_reward is None or x.turn_state is None:
      raise UserError(
        f"algorithm {algorithm.name!r} compares turns (turn_credit = {turns.turn_credit!r}) and "
        "needs turn_reward and turn_state; pass them"
      )
    earlier = turns.earlier_rewards(x.turn_reward, x.mask)
    if shaping.from_verdict:
      penalty -= earlier
    else:
      reward -= earlier
  score_norms = x.score_norms
  if score_norms is not None and x.importance is not None:
    score_norms = score_norms * jnp.square(x.importance)
  columns = x.correct[..., None], reward[..., None], penalty[..., None]
  of_parts = x.parts, x.part_weights
  return Units(
    entropy, mask, *columns, tokens, x.gaps, x.turn_state, *of_parts, score_norms, x.value_gains
  )


def _check_loss_signals(algorithm: Algorithm, x: Signals, entropy: jax.Array | None) -> None:
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


def make(name: str, distillation: Distillation | None = None, **overrides: Any) -> Algorithm:
  """Returns the algorithm `name` with its published settings, changed by `overrides`.

  If `objective` is overridden, the settings of the recipe's own objective are replaced by those
  published for the new one. `distillation` adds a teacher's divergence to the advantages; None for
  the algorithm's own, which only "opd" has.

  Raises:
    UserError (a ValueError): the name or a setting is unknown (the message suggests the nearest
      valid one), a value is out of bounds, or the combination has no meaning.
  """
  if name not in RECIPES:
    raise UserError(
      f"unknown algorithm {name!r}{did_you_mean(str(name), RECIPES)}; "
      f"valid are {', '.join(RECIPES)}"
    )
  recipe = RECIPES[name]
  objective = overrides.get("objective", recipe.objective.name)
  bound = CHOICE.metadata["bound"]
  if not bound.accepts(objective):
    raise UserError(f"algorithm.objective must be {bound.description}, got {objective!r}")
  recipe = recipe.with_objective(objective)
  _check_overrides(name, recipe, overrides)
  recipe = recipe.with_settings(overrides)
  if distillation:
    recipe = dataclasses.replace(recipe, distillation=distillation)
  _check_combination(name, recipe)
  return Algorithm(name, recipe)


def _check_overrides(name: str, recipe: Recipe, overrides: Mapping[str, Any]) -> None:
  """Rejects settings that the algorithm does not read, and None."""
  published = recipe.settings
  for key, value in overrides.items():
    if key not in published:
      own = RECIPES[name].objective.name
      objective = recipe.objective.name
      with_objective = "" if objective == own else f" with objective = {objective!r}"
      raise UserError(
        f"algorithm {name!r}{with_objective} has no setting {key!r}{did_you_mean(key, published)}; "
        f"it reads {', '.join(published)}"
      )
    if value is None:
      raise UserError(
        f"algorithm.{key} must not be None; omit it to use the published value {published[key]!r}"
      )


def _check_combination(name: str, recipe: Recipe) -> None:
  """Rejects combinations of credit, ratio and objective that have no meaning."""
  objective = recipe.objective
  taught = bool(recipe.distillation and recipe.distillation.sampled)
  source = "a teacher" if taught else repr(name)
  if objective.ratio in SEQUENCE_RATIOS and recipe.per_token_credit:
    raise UserError(
      f"algorithm.ratio = {objective.ratio!r} is the ratio of a completion, but {source} gives "
      "each token its own advantage; use 'token' or 'gspo_token'"
    )
  if objective.per_completion and recipe.per_token_credit:
    advice = "objective = 'clip'" if taught else "an algorithm such as 'grpo' or 'grpo_s'"
    raise UserError(
      f"algorithm.objective = {objective.name!r} needs one advantage per completion, but "
      f"{source} gives each token its own; use {advice}"
    )
  if getattr(recipe.shaping, "compare", "") == "state" and not recipe.turns:
    raise UserError(
      "algorithm.compare = 'state' needs turns that are compared; set turn_credit = 'state', "
      "perhaps with step_weight = 0"
    )
  if recipe.modulation.by_teacher and recipe.distillation != Distillation():
    raise UserError(
      f"algorithm {name!r} weights its advantages by a teacher and reads no setting of distill; "
      f"leave them out, got {recipe.distillation}"
    )
  if objective.ratios and objective.ratio not in objective.ratios:
    raise UserError(
      f"algorithm.objective = {objective.name!r} needs ratio = "
      f"{' or '.join(map(repr, objective.ratios))}, got {objective.ratio!r}"
    )
  if recipe.matches_distributions and (recipe.selects or not recipe.per_token):
    raise UserError(
      f"distill.divergence = {recipe.distillation.divergence!r} needs ratio = 'token' and an "
      f"objective without a selection, got ratio = {recipe.settings.get('ratio')!r}, objective = "
      f"{objective.name!r}; change them, or set distill.divergence = 'sampled'"
    )
  has_guide = bool(recipe.guide.guide_completions)
  if has_guide and (recipe.selects or objective.ratio != "token" or not objective.ratios):
    raise UserError(
      f"algorithm {name!r} needs ratio = 'token' and an objective without a selection, because its "
      "guide's tokens have an objective of their own; got ratio = "
      f"{recipe.settings.get('ratio')!r}, objective = {objective.name!r}"
    )
