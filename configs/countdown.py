"""Countdown: reach a target number by adding and subtracting given numbers, using each once.

    gtpo train --config=configs/countdown.py --workdir=runs/countdown

A problem has several right answers, so pass@k is informative.
Hardware: two CPU cores, five to six minutes.
Expected (seed 0): held-out pass@1 rises from 22 % to 34 %, while pass@16 falls from 88 % to 42 %.
The policy becomes confident faster than it improves; this task lets you study that effect.
Increase warm_start.steps for longer runs.
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
