"""Countdown with a long warm start, for comparisons of algorithms.

    python benchmarks/compare.py --out=runs/compare

The task is informative for pass@k: a problem has several right answers, and after the warm start
the policy is still uncertain, so that more samples of a problem find more of them.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 300
  config.model.preset = "tiny"
  config.data.train = "countdown"
  config.data.max_prompt_tokens = 28
  config.sampling.max_tokens = 32
  config.algorithm.name = "gtpo"
  config.warm_start.steps = 6000
  config.warm_start.slips = 0.5
  config.optimizer.learning_rate = 1e-4
  config.optimizer.b2 = 0.95
  config.eval.every = 50
  config.eval.samples = 32
  config.checkpoint.every = 100
  return config
