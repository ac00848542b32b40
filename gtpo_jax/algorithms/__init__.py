"""The algorithms, as pure functions of arrays that know no model, config or logger."""

from gtpo_jax.algorithms.algorithm import Algorithm, make
from gtpo_jax.algorithms.recipes import RECIPES, Recipe
from gtpo_jax.algorithms.relative_entropy import relative_entropy
from gtpo_jax.algorithms.selection import has_contrast
from gtpo_jax.algorithms.settings import Settings

__all__ = ["RECIPES", "Algorithm", "Recipe", "Settings", "has_contrast", "make", "relative_entropy"]
