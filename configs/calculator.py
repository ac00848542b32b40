"""A calculator: sums that the model gets wrong by itself, and a tool that it learns to call.

    gtpo train --config=configs/calculator.py --workdir=runs/calculator

The base model imitates a teacher who seldom calls the tool, and forgets to carry without it. What
a run reaches has not been measured yet.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 60
  config.model.preset = "tiny"
  config.data.train = "calculator"
  config.data.max_prompt_tokens = 48
  config.sampling.max_tokens = 96
  config.env.tools = "gtpo_jax.environments.examples.calculator:add"
  config.env.max_turns = 3
  config.algorithm.name = "gtpo"

  config.warm_start.steps = 1000
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.b2 = 0.95
  config.eval.problems = 128
  config.eval.samples = 4
  return config
