"""Verifiers, reward parts, length penalties and majority votes. None of them uses JAX."""

from gtpo_jax.rewards.code import code_correct, run_code
from gtpo_jax.rewards.gold import check_gold, gold_check
from gtpo_jax.rewards.length import group_relative, soft_overlong
from gtpo_jax.rewards.math.verdicts import math_correct, math_verdicts
from gtpo_jax.rewards.plain import choice_correct, exact_correct
from gtpo_jax.rewards.synthetic import countdown_correct, forks_correct, last_number_correct
from gtpo_jax.rewards.truth import MARKS, knows_truth, truth_marks
from gtpo_jax.rewards.verifiers import PARTS, VERIFIERS, Score, score, verify
from gtpo_jax.rewards.votes import VOTES
from gtpo_jax.runtime.sandbox.bubblewrap import sandbox_problem

__all__ = [
  "MARKS",
  "PARTS",
  "VERIFIERS",
  "VOTES",
  "Score",
  "check_gold",
  "choice_correct",
  "code_correct",
  "countdown_correct",
  "exact_correct",
  "forks_correct",
  "gold_check",
  "group_relative",
  "knows_truth",
  "last_number_correct",
  "math_correct",
  "math_verdicts",
  "run_code",
  "sandbox_problem",
  "score",
  "soft_overlong",
  "truth_marks",
  "verify",
]
