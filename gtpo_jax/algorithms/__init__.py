"""Algorithms: arrays in, arrays out. No models, no configs, no loggers."""

from gtpo_jax.algorithms.algorithm import Algorithm, make
from gtpo_jax.algorithms.recipes import RECIPES, Recipe
from gtpo_jax.algorithms.relative_entropy import relative_entropy
from gtpo_jax.algorithms.selection import informative
from gtpo_jax.algorithms.settings import Settings

__all__ = ["RECIPES", "Algorithm", "Recipe", "Settings", "informative", "make", "relative_entropy"]
