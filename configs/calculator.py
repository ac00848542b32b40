"""A calculator: sums that the model gets wrong by itself, and a tool that it learns to call.

    gtpo train --config=configs/calculator.py --workdir=runs/calculator

The base model imitates a teacher who calls the tool for a quarter of the sums. For the others, the
teacher adds up without carrying, which is wrong, because all of these sums need a carry.

Hardware: two CPU cores, under 2 GiB of memory. The time on quiet cores has not been measured.
Expected: the policy calls the tool for 98 % of the sums and solves 95.1 %, 99.2 % and 95.7 % (seeds
0 to 2, docs/episodes.md), from 9 to 11 %.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 40
  config.model.preset = "tiny"
  config.data.train = "calculator"
  config.data.max_prompt_tokens = 40
  config.sampling.max_tokens = 84
  config.env.make = "gtpo_jax.environments.examples.calculator:calculator"
  config.env.max_turns = 3
  config.algorithm.name = "gtpo"

  config.warm_start.steps = 1800
  config.optimizer.learning_rate = 5e-4
  config.optimizer.schedule = "linear"
  config.optimizer.clip_norm = 0.5
  config.optimizer.b2 = 0.95
  config.eval.problems = 128
  config.eval.samples = 4
  config.eval.every = 20
  return config
