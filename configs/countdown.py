"""Countdown: reach a target with every number used once. Several answers are right, so pass@k means something.

    gtpo train --config=configs/countdown.py --workdir=runs/countdown

Hardware: two CPU cores, five to six minutes. Expected (seed 0): held-out pass@1 22 % -> 34 %, while pass@16 falls from 88 % to 42 %:
the policy gets surer faster than it gets better, which is what to study here. Longer runs want a longer warm start.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 200
  config.model.preset = "tiny"
  config.data.train = "countdown"
  config.data.max_prompt_tokens = 28
  config.sampling.max_tokens = 32
  config.algorithm.name = "gtpo"
  config.warm_start.steps = 2000
  config.optimizer.learning_rate = 1e-4
  config.optimizer.b2 = 0.95
  config.eval.every = 20
  config.eval.samples = 16
  config.checkpoint.every = 50
  return config
