"""Makes algorithms from names and settings, and rejects combinations that have no meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gtpo_jax.algorithms.advantages import Distillation
from gtpo_jax.algorithms.algorithm import Algorithm
from gtpo_jax.algorithms.objectives import CHOICE
from gtpo_jax.algorithms.objectives.ratios import SEQUENCE_RATIOS
from gtpo_jax.algorithms.recipes import RECIPES, Recipe
from gtpo_jax.runtime.errors import UserError, did_you_mean


def make(name: str, distillation: Distillation | None = None, **overrides: Any) -> Algorithm:
  """Returns the algorithm `name` with its published settings, changed by `overrides`.

  If `objective` is overridden, the settings of the recipe's own objective are replaced by those
  published for the new one. `distillation` adds a teacher's divergence to the advantages; None for
  what the algorithm itself has, which is nothing except with "opd".

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
