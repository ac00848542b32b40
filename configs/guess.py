"""Guess a number: an environment with several turns, in which GTPO learns to bisect.

    gtpo train --config=configs/guess.py --workdir=runs/guess

A number from 0 to 31 is to be found within five guesses. Each guess is answered by higher, lower or
right. The base model imitates a player who often guesses one of the ends of what is left, which
rules out only one number; the best player always guesses the middle, and finds 31 of the 32 numbers
in time. What a run reaches has not been measured yet.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 100
  config.model.preset = "tiny"
  config.data.train = "guess"
  config.data.max_prompt_tokens = 24
  config.sampling.max_tokens = 76
  config.env.make = "gtpo_jax.environments.examples.guess:Guess"
  config.algorithm.name = "gtpo"

  config.warm_start.steps = 1000
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.b2 = 0.95
  config.eval.problems = 128
  config.eval.samples = 4
  return config
