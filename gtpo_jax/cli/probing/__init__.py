"""Compares recipes by their gradients on the user's own model and task, before one trains."""

from gtpo_jax.cli.probing.probe import probe

__all__ = ["probe"]
