"""gtpo_jax: reinforcement learning of language models with entropy-shaped credit, on TPU, GPU or CPU."""
__version__ = "0.1.0"
