"""Forks: a task that knows which tokens decide, to see where an algorithm puts its credit.

    gtpo train --config=configs/forks.py --workdir=runs/forks

For every pair of digits of a prompt such as `38 52 71:`, the completion has some letters, which may
be any, a colon, the larger digit, `=`, and that digit again. Only the digits decide. The metrics
`credit/truth_*`, `credit/w/*` and `truth/*` score the credit, and `gtpo report` shows it beside the
truth. `--config.data.train=forks_confident` has a teacher that is sure of its mistakes.
"""

from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  config.steps = 100
  config.model.preset = "tiny"
  config.data.train = "forks"
  config.data.max_prompt_tokens = 24
  config.sampling.max_tokens = 26
  config.algorithm.name = "gtpo"
  config.warm_start.steps = 1000
  config.optimizer.learning_rate = 1e-4
  config.optimizer.b2 = 0.95
  config.eval.every = 50
  config.eval.samples = 8
  return config
