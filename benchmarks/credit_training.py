"""Trains from a base model with the credit of one arm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from credit_arms import Arm, ArmBatch, collector_of, next_batch
from credit_probe import signal_scores

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.evaluation.evaluate import evaluate_run
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.problems import held_out_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.training.log_probs import score
from gtpo_jax.training.state import Optimizer, OptimizerConfig, make_optimizer

MINIBATCHES = 4  # gradient updates per step, so that the clips of the objective act
SAMPLES = 8  # of each held-out problem
PROBLEMS = 200  # held-out problems
RECORD_EVERY = 5  # steps between the rows of a curve


def train_arm(
  config: Config,
  worker: RolloutWorker,
  rewards: RewardManager,
  params: Params,
  arm: Arm,
  seed: int,
  steps: int,
) -> dict[str, Any]:
  """Trains and evaluates; returns the curve and the verdicts on the held-out problems.

  All arms see the same problems and sample with the same keys, for a given seed.

  Args:
    config, worker, rewards: how to sample and score.
    params: the base model.
    arm: assigns the credit.
    seed: determines the problems and the keys.
    steps: rollouts, of `MINIBATCHES` gradient updates each.
  """
  config = dataclasses.replace(
    config,
    seed=seed,
    steps=steps,
    batch=dataclasses.replace(config.batch, pack=False),  # packing would compile many shapes
    eval=dataclasses.replace(config.eval, problems=PROBLEMS, samples=SAMPLES),
  )
  collector = collector_of(config, worker, rewards)
  optimizer, update = _make_update(worker.model, arm.algorithm, config.optimizer, steps)
  opt_state = optimizer.init(params)
  curve = []
  for step in range(steps):
    batch = next_batch(collector, worker.model, params, seed * 10_000 + step)
    if step % RECORD_EVERY == 0 or step == steps - 1:
      curve.append({"step": step + 1, **signal_scores(batch)})
    for minibatch in _minibatches(arm, batch):
      params, opt_state = update(params, opt_state, *minibatch)
  held_out = held_out_problems(config, worker)
  evaluation = evaluate_run(config, worker, rewards, params, held_out)
  correct = evaluation.sampled.correct.sum(1).tolist()
  return {"curve": curve, "samples": SAMPLES, "correct": correct}


def _minibatches(arm: Arm, batch: ArmBatch) -> list[tuple[Rollouts, jax.Array, jax.Array]]:
  """Returns rollouts, advantages and loss mask of each minibatch; credit is of the whole batch."""
  values = (batch.rollouts, arm.advantages(batch), arm.loss_mask(batch))
  size = len(batch.codes) // MINIBATCHES
  starts = range(0, size * MINIBATCHES, size)
  return [jax.tree.map(lambda x, i=i: x[i : i + size], values) for i in starts]


@functools.lru_cache(maxsize=32)
def _make_update(
  model: Transformer, algorithm: Algorithm, config: OptimizerConfig, steps: int
) -> tuple[Optimizer, Callable[..., tuple[Params, Any]]]:
  """Returns the optimizer, and a jitted function that makes one gradient update."""
  optimizer = make_optimizer(config, steps, MINIBATCHES)

  @jax.jit
  def update(
    params: Params, opt_state: Any, rollouts: Rollouts, advantages: jax.Array, mask: jax.Array
  ) -> tuple[Params, Any]:
    def loss(params: Params) -> jax.Array:
      log_probs, _ = score(model, params, rollouts.prompts, rollouts.tokens, 1.0, 0)
      return algorithm.loss(
        log_probs=log_probs, log_probs_old=rollouts.log_probs, advantages=advantages, mask=mask
      )[0]

    updates, next_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), next_state

  return optimizer, update
