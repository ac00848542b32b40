"""The algorithms, as pure functions of arrays that know no model, config or logger."""

from gtpo_jax.algorithms.advantages import Distillation
from gtpo_jax.algorithms.algorithm import Algorithm, make
from gtpo_jax.algorithms.continuations import segment_gains
from gtpo_jax.algorithms.objectives import OBJECTIVES
from gtpo_jax.algorithms.recipes import RECIPES, Recipe, Settings, declarations
from gtpo_jax.algorithms.relative_entropy import relative_entropy
from gtpo_jax.algorithms.selection import has_contrast
from gtpo_jax.arrays import Signals

__all__ = [
  "OBJECTIVES",
  "RECIPES",
  "Algorithm",
  "Distillation",
  "Recipe",
  "Settings",
  "Signals",
  "declarations",
  "has_contrast",
  "make",
  "relative_entropy",
  "segment_gains",
]
