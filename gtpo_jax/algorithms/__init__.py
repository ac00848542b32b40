"""Algorithms: arrays in, arrays out. No models, no configs, no loggers."""
from gtpo_jax.algorithms.recipes import RECIPES, Algorithm, Recipe, Settings, make
from gtpo_jax.algorithms.relative_entropy import relative_entropy

__all__ = ["RECIPES", "Algorithm", "Recipe", "Settings", "make", "relative_entropy"]
