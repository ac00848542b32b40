"""Makes algorithms from names and settings, and rejects combinations that have no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtpo_jax.algorithms.algorithm import Algorithm
from gtpo_jax.algorithms.objectives import OBJECTIVES
from gtpo_jax.algorithms.ratios import SEQUENCE_RATIOS
from gtpo_jax.algorithms.recipes import RECIPES
from gtpo_jax.algorithms.settings import CHECKS, RENAMED, Settings
from gtpo_jax.runtime.errors import UserError, did_you_mean


def make(name: str, **overrides: Any) -> Algorithm:
  """Returns the algorithm `name` with its published settings, changed by `overrides`.

  If `objective` is overridden, the settings of the recipe's own objective are replaced by those
  published for the new one.

  Raises:
    UserError (a ValueError): the name or a setting is unknown (the message suggests the nearest
      valid one), a value is out of bounds, or the combination has no meaning.
  """
  if name not in RECIPES:
    raise UserError(
      f"unknown algorithm {name!r}{did_you_mean(str(name), RECIPES)}; "
      f"valid are {', '.join(RECIPES)}"
    )
  objective = overrides.get("objective", RECIPES[name].settings["objective"])
  if not CHECKS["objective"].accepts(objective):
    raise UserError(
      f"algorithm.objective must be {CHECKS['objective'].description}, got {objective!r}"
    )
  published = RECIPES[name].settings_with(objective)
  _check_overrides(name, objective, published, overrides)
  settings = Settings(**published | overrides)
  _check_without_effect(settings, published)
  _check_combination(name, settings)
  return Algorithm(name, settings)


def _check_overrides(
  name: str, objective: str, published: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
  """Rejects settings that the algorithm does not read, and None."""
  for key, value in overrides.items():
    if key in RENAMED:
      raise UserError(f"algorithm setting {key!r} is now called {RENAMED[key]!r}")
    if key not in published:
      own = RECIPES[name].settings["objective"]
      with_objective = "" if objective == own else f" with objective = {objective!r}"
      raise UserError(
        f"algorithm {name!r}{with_objective} has no setting {key!r}{did_you_mean(key, published)}; "
        f"it reads {', '.join(published)}"
      )
    if value is None:
      raise UserError(
        f"algorithm.{key} must not be None; omit it to use the published value {published[key]!r}"
      )


def _check_without_effect(settings: Settings, published: Mapping[str, Any]) -> None:
  """Rejects changed settings that other settings turn off."""
  if settings.gamma != published["gamma"] and settings.length_penalty != "group_relative":
    raise UserError(
      f"algorithm.gamma = {settings.gamma} only has an effect with length_penalty = "
      f"'group_relative'; set that, or leave gamma at {published['gamma']}"
    )
  for key in ("entropy_coef_delta", "entropy_coef_max"):
    value = getattr(settings, key)
    if value != published[key] and not settings.entropy_target:
      raise UserError(
        f"algorithm.{key} = {value} only has an effect with entropy_target above 0; set that, or "
        f"leave {key} at {published[key]}"
      )


def _check_combination(name: str, settings: Settings) -> None:
  """Rejects combinations of credit, ratio and objective that have no meaning."""
  objective = OBJECTIVES[settings.objective]
  per_token_credit = not RECIPES[name].per_completion or bool(settings.bonus_alpha)
  if settings.ratio in SEQUENCE_RATIOS and per_token_credit:
    raise UserError(
      f"algorithm.ratio = {settings.ratio!r} is the ratio of a completion, but {name!r} gives each "
      "token its own advantage; use 'token' or 'gspo_token'"
    )
  if objective.per_completion and per_token_credit:
    raise UserError(
      f"algorithm.objective = {settings.objective!r} needs one advantage per completion, but "
      f"{name!r} gives each token its own; use an algorithm such as 'grpo' or 'grpo_s'"
    )
  if objective.ratios and settings.ratio not in objective.ratios:
    raise UserError(
      f"algorithm.objective = {settings.objective!r} needs ratio = "
      f"{' or '.join(map(repr, objective.ratios))}, got {settings.ratio!r}"
    )
  if settings.guide_completions and (objective.select or settings.ratio != "token"):
    raise UserError(
      f"algorithm {name!r} needs ratio = 'token' and an objective without a selection, because its "
      f"guide's tokens have an objective of their own; got ratio = {settings.ratio!r}, "
      f"objective = {settings.objective!r}"
    )
