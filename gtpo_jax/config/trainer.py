"""The optimizer and the update that a config describes."""

from __future__ import annotations

from gtpo_jax.config.config import Config
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.training.state import Optimizer, make_optimizer
from gtpo_jax.training.update import Update, make_update


def run_optimizer(config: Config) -> Optimizer:
  """Returns the optimizer of the run."""
  coef = config.resolved_algorithm.recipe.entropy_bonus.initial_coef
  return make_optimizer(config.optimizer, config.steps, config.batch.updates, coef)


def run_update(config: Config, model: Transformer, optimizer: Optimizer) -> Update:
  """Returns the training step of the run for `model`, on its mesh."""
  return make_update(
    model,
    config.resolved_algorithm,
    optimizer,
    temperature=config.sampling.temperature,
    minibatches=config.batch.minibatches,
    epochs=config.batch.epochs,
    micro_batches=config.batch.micro_batches,
    head_chunk=config.batch.head_chunk,
  )
