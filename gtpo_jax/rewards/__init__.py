"""Verifiers: text in, verdict out. No JAX here."""
from gtpo_jax.rewards.arithmetic import countdown_correct, last_number_correct
from gtpo_jax.rewards.length import group_relative, soft_overlong
from gtpo_jax.rewards.math import math_correct
from gtpo_jax.rewards.verifiers import PARTS, VERIFIERS

__all__ = ["PARTS", "VERIFIERS", "countdown_correct", "group_relative", "last_number_correct", "math_correct", "soft_overlong"]
