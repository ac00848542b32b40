"""The training loop: `learn.py` is the paper's Algorithm 1, `run.py` the components of a run."""

from gtpo_jax.loop.learn import steps, train

__all__ = ["steps", "train"]
