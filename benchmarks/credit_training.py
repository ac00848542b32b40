"""Trains a policy with the credit of one arm, and evaluates it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from credit_arms import Arm, ArmBatch, batch_of, collector_of

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.config import Config
from gtpo_jax.logs.credit_scores import truth_metrics
from gtpo_jax.logs.truth import CLASSES
from gtpo_jax.loop.evaluation.evaluate import evaluate_run
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.problems import held_out_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.training.state import Optimizer, OptimizerConfig, init_state, make_optimizer
from gtpo_jax.training.update import Update, UpdateSettings, make_update

MINIBATCHES = 4  # gradient updates per step, so that the clips of the objective act
# The metrics of an update that a curve records.
RECORDED = ("clip/low", "clip/high", "clip/influence", "grad_norm", "update/empty")


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


def train(
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
  update is that of the package.

  Args:
    config, worker, rewards: how to sample and score.
    params: the base model; donated.
    arm: assigns the credit.
    sizes: how long the run is.
    minibatches: gradient updates of a step.
  """
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
    changed = arm.changed(experience.rollouts, experience.rewards, batch)
    state, metrics = update(state, *changed)
    measured = {key: float(metrics[key]) for key in RECORDED if key in metrics}
    finished = float(np.asarray(experience.rollouts.finished).mean())
    curve.append({"step": step, "finished": finished, **batch_scores(batch), **measured})
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
  """Returns accuracy, lengths and entropies of a batch; NaN where a side has no completion.

  Where the truth of tokens is known, they include entropy and accuracy by token class.
  """
  mask = batch.signals.mask
  correct = batch.signals.correct
  entropy = np.asarray(batch.signals.entropy, np.float64)
  lengths = mask.sum(-1)
  found = {
    "accuracy": float(correct.mean()),
    "mixed": float((correct.any(1) & ~correct.all(1)).mean()),
    "length": float(lengths.mean()),
    "entropy": float(entropy[mask].mean()),
  }
  for name, side in (("correct", correct), ("incorrect", ~correct)):
    tokens = mask & side[..., None]
    found[f"length_{name}"] = float(lengths[side].mean()) if side.any() else float("nan")
    found[f"entropy_{name}"] = float(entropy[tokens].mean()) if tokens.any() else float("nan")
  if batch.codes.any():
    scores = truth_metrics(batch.codes, correct, np.zeros(mask.shape), entropy)
    found |= {f"entropy_{name}": scores[f"truth/entropy/{name}"] for name in CLASSES}
    found["right_decisive"] = scores["truth/right/decisive"]
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
