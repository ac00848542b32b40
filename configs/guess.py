"""Guess a number: an environment with several turns, in which GTPO learns to bisect.

    gtpo train --config=configs/guess.py --workdir=runs/guess

A number from 0 to 31 is to be found within five guesses. Each guess is answered by higher, lower or
right. The base model imitates a player who, while the range is long, often guesses one of its ends,
which rules out only one number. The best player always guesses the middle, and finds 31 of the 32
numbers (96.9 %) in time, after 4.2 guesses on average.

Hardware: two CPU cores, under 2 GiB of memory, four and a half minutes.
Expected (seeds 0 to 2): the share of sampled games that find the number rises from 45-46 % to 95 %.
Greedy games find it in 96.9 %, which is the best possible, before and after.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 45
  config.model.preset = "tiny"
  config.data.train = "guess"
  config.data.max_prompt_tokens = 16
  config.sampling.max_tokens = 76
  config.sampling.temperature = 1.25  # evaluations sample at 1, where errors are rarer
  config.env.make = "gtpo_jax.environments.examples.guess:Guess"
  config.batch.prompts = 32  # each number once
  config.batch.group = 8
  config.algorithm.name = "gtpo"

  config.warm_start.steps = 800
  config.optimizer.learning_rate = 5e-4
  config.optimizer.schedule = "linear"
  config.optimizer.clip_norm = 0.5
  config.optimizer.b2 = 0.95
  config.eval.problems = 32
  config.eval.samples = 16
  return config
