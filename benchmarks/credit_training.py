"""Trains a policy with the credit of one arm, and evaluates it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from credit_arms import Arm, ArmBatch, batch_of, collector_of, next_batch

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.logs.credit_scores import truth_metrics
from gtpo_jax.logs.truth import CLASSES
from gtpo_jax.loop.evaluation.evaluate import evaluate_run
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.problems import held_out_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.training.log_probs import Reading, head_settings, score
from gtpo_jax.training.state import Optimizer, OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import Update, UpdateSettings, make_update

MINIBATCHES = 4  # gradient updates per step, so that the clips of the objective act
SAMPLES = 8  # of each held-out problem
PROBLEMS = 200  # held-out problems
RECORD_EVERY = 5  # steps between the rows of a curve
# Of the metrics of an update, those that a curve of `train_real` records.
RECORDED = ("clip/low", "clip/high", "clip/influence", "grad_norm", "update/empty")


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
    batch = next_batch(collector, params, seed * 10_000 + step)
    if step % RECORD_EVERY == 0 or step == steps - 1:
      curve.append({"step": step + 1, **token_scores(batch)})
    for minibatch in _minibatches(arm, batch):
      params, opt_state = update(params, opt_state, *minibatch)
  held_out = held_out_problems(config, worker)
  evaluation = evaluate_run(config, worker, rewards, params, held_out)
  correct = evaluation.sampled.correct.sum(1).tolist()
  return {"curve": curve, "samples": SAMPLES, "correct": correct}


def token_scores(batch: ArmBatch) -> dict[str, float]:
  """Returns the accuracy of a batch, and entropy and accuracy by token class."""
  signals = batch.signals
  found = truth_metrics(batch.codes, signals.correct, np.zeros(batch.codes.shape), signals.entropy)
  return {
    "accuracy": float(signals.correct.mean()),
    **{f"entropy_{name}": found[f"truth/entropy/{name}"] for name in CLASSES},
    "right_decisive": found["truth/right/decisive"],
  }


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
      reading = Reading(rollouts.prompts, rollouts.tokens)
      log_probs, _ = score(model, params, reading, head_settings(model, 1.0, 0))
      return algorithm.loss(
        log_probs=log_probs, log_probs_old=rollouts.log_probs, advantages=advantages, mask=mask
      )[0]

    updates, next_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), next_state

  return optimizer, update


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How long a run is, and how it is evaluated.

  Attributes:
    steps: rollouts, of `MINIBATCHES` gradient updates each.
    every: steps between two evaluations; the last step is evaluated too.
    problems: held-out problems.
    samples: completions of each.
  """

  steps: int
  every: int
  problems: int
  samples: int


def train_real(
  config: Config,
  worker: RolloutWorker,
  rewards: RewardManager,
  params: Params,
  arm: Arm,
  sizes: Sizes,
  minibatches: int = MINIBATCHES,
) -> dict[str, Any]:
  """Trains and evaluates; returns the curve and the evaluations as plain data.

  All arms see the same problems and sample with the same keys, for a given `config.seed`. The
  update is that of the package. An arm that replaces the entropies gives it the replaced ones.

  Args:
    config, worker, rewards: how to sample and score.
    params: the base model; donated.
    arm: assigns the credit; it must not change advantages in another way.
    sizes: how long the run is.
    minibatches: gradient updates of a step.
  """
  if arm.change is not None:
    raise ValueError("only arms that replace entropies can be trained here")
  collector = collector_of(config, worker, rewards)
  optimizer, update = shared_update(
    worker, arm.algorithm, config.optimizer, sizes.steps, minibatches
  )
  state = init_state(params, optimizer, worker.model)
  curve = []
  evaluations = {}
  for step in range(1, sizes.steps + 1):
    experience = collector.collect(state.params, step - 1, print)
    batch = batch_of(experience, collector.worker, config.seed * 10_000 + step)
    rollouts = batch.rollouts
    if arm.entropy is not None:
      rollouts = rollouts.replace(entropy=jax.numpy.asarray(arm.entropy(batch)))
    state, metrics = update(state, rollouts, experience.rewards)
    measured = {key: float(metrics[key]) for key in RECORDED if key in metrics}
    curve.append({"step": step, **batch_scores(batch), **measured})
    if step % sizes.every == 0 or step == sizes.steps:
      evaluations[str(step)] = evaluate(config, worker, rewards, state.params, sizes)
  return {"curve": curve, "evaluations": evaluations}


@functools.cache
def shared_update(
  worker: RolloutWorker, algorithm: Algorithm, config: OptimizerConfig, steps: int, minibatches: int
) -> tuple[Optimizer, Update]:
  """Returns the optimizer and the update of an arm, which its seeds share."""
  optimizer = make_optimizer(config, steps, minibatches)
  settings = UpdateSettings(minibatches=minibatches)
  return optimizer, make_update(worker.model, algorithm, optimizer, settings)


def batch_scores(batch: ArmBatch) -> dict[str, float]:
  """Returns accuracy, lengths and entropies of a batch; NaN where a side has no completion."""
  mask = batch.signals.mask
  correct = batch.signals.correct
  entropy = np.asarray(batch.signals.entropy, np.float64)
  lengths = mask.sum(-1)
  found = {
    "accuracy": float(correct.mean()),
    "mixed": float((correct.any(1) & ~correct.all(1)).mean()),
    "finished": float(np.asarray(batch.rollouts.finished).mean()),
    "length": float(lengths.mean()),
    "entropy": float(entropy[mask].mean()),
  }
  for name, side in (("correct", correct), ("incorrect", ~correct)):
    tokens = mask & side[..., None]
    found[f"length_{name}"] = float(lengths[side].mean()) if side.any() else float("nan")
    found[f"entropy_{name}"] = float(entropy[tokens].mean()) if tokens.any() else float("nan")
  return found


def evaluate(
  config: Config, worker: RolloutWorker, rewards: RewardManager, params: Params, sizes: Sizes
) -> dict[str, Any]:
  """Returns the verdicts on the held-out problems: counts by problem, and means."""
  settings = dataclasses.replace(config.eval, problems=sizes.problems, samples=sizes.samples)
  # The same keys for every seed, so that the base model needs one evaluation.
  config = dataclasses.replace(config, eval=settings, seed=0)
  problems = held_out_problems(config, worker)
  found = evaluate_run(config, worker, rewards, params, problems)
  return {
    "samples": sizes.samples,
    "correct": found.sampled.correct.sum(1).tolist(),
    "greedy": found.greedy.correct[:, 0].astype(int).tolist(),
    "length": float(found.sampled.lengths.mean()),
    "finished": float(found.sampled.finished.mean()),
  }
