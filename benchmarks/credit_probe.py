"""Compares the gradient of every arm with the true one, at fixed parameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from credit_arms import REFERENCE, Arm, ArmBatch, collector_of, next_batch

from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.logs.credit_scores import auroc, class_weight, credit_scores
from gtpo_jax.logs.truth import CLASSES, decides, is_wrong, of_class
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.training.log_probs import Reading, head_settings, score

LINE_S = 30.0  # seconds between lines of progress


def probe(
  config: Config,
  worker: RolloutWorker,
  rewards: RewardManager,
  params: Params,
  arms: Mapping[str, Arm],
  batches: int,
  reference_batches: int,
) -> dict[str, Any]:
  """Returns what each arm does at these parameters, as plain data.

  The result of an arm does not depend on the other arms.

  The reference gradient is the mean over batches that the arms do not see. `arms` has, for each
  arm, the cosine of its gradient with the reference in each batch, the noise-to-signal ratio of
  the gradient of one batch, and the mean scores of its credit.

  Args:
    config, worker, rewards, params: the policy, and how it samples and is scored.
    arms: the arms to compare.
    batches: batches on which the arms are compared, at least 2.
    reference_batches: batches of the reference gradient.
  """
  collector = collector_of(config, worker, rewards)
  gradients = make_gradients(worker.model)
  sums = {name: Moments() for name in arms}
  kept: dict[str, list[np.ndarray]] = {name: [] for name in arms}
  scores: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
  signals: list[dict[str, float]] = []
  report = _reporter(batches + reference_batches)
  for number in range(batches):
    batch = next_batch(collector, params, number)
    advantages = {name: arm.advantages(batch) for name, arm in arms.items()}
    cotangents = np.stack([cotangent(arm, batch, advantages[name]) for name, arm in arms.items()])
    for name, gradient in zip(arms, gradients(params, batch.rollouts, cotangents), strict=True):
      sums[name].add(np.asarray(gradient))
      kept[name].append(np.asarray(gradient, np.float32))
      scores[name].append(scores_of(np.asarray(advantages[name]), batch))
    signals.append(signal_scores(batch))
    report(number + 1)
  reference = Moments()
  for number in range(reference_batches):
    batch = next_batch(collector, params, batches + number)
    cotangents = cotangent(REFERENCE, batch, REFERENCE.advantages(batch))[None]
    reference.add(np.asarray(gradients(params, batch.rollouts, cotangents)[0]))
    report(batches + number + 1)
  return {
    "batches": batches,
    "reference_batches": reference_batches,
    "reference_noise": reference.noise() / reference_batches,
    "signals": _means(signals),
    "arms": {
      name: {
        "cosine": [cosine(gradient, reference.mean) for gradient in kept[name]],
        "noise": sums[name].noise(),
        **_means(scores[name]),
      }
      for name in arms
    },
  }


def flatten(gradient: Params) -> jax.Array:
  """Returns a gradient as one vector f32[p], of all p parameters."""
  return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])


def make_gradients(
  model: Transformer, reduce: Callable[[Params], jax.Array] = flatten
) -> Callable[[Params, Rollouts, np.ndarray], jax.Array]:
  """Returns a jitted function (params, rollouts, cotangents) -> gradients f32[v, p].

  The forward pass is shared, and the gradients are computed one after another.

  Args:
    model: the policy's architecture.
    reduce: makes a vector of a gradient, such as all of it, or a sketch.

  The arguments of the function:
    params, rollouts: the policy, and what it sampled.
    cotangents: f32[v, n, g, t], derivatives of v losses by the log-probs.
  """

  @jax.jit
  def gradients(params: Params, rollouts: Rollouts, cotangents: jax.Array) -> jax.Array:
    def log_probs(params: Params) -> jax.Array:
      x, _ = score(model, params, Reading.of(rollouts), head_settings(model, 1.0, 0))
      return jnp.where(rollouts.mask, x, 0.0)

    _, pull_back = jax.vjp(log_probs, params)
    return jax.lax.map(lambda cotangent: reduce(pull_back(cotangent)[0]), cotangents)

  return gradients


def cotangent(arm: Arm, batch: ArmBatch, advantages: jax.Array) -> np.ndarray:
  """Returns the derivative of an arm's loss by the log-probs, f32[n, g, t], before any update."""
  mask = arm.loss_mask(batch)
  return np.asarray(_derivative(arm.algorithm, batch.rollouts.log_probs, advantages, mask))


@functools.partial(jax.jit, static_argnums=0)
def _derivative(
  algorithm: Any, log_probs: jax.Array, advantages: jax.Array, mask: jax.Array
) -> jax.Array:
  loss = lambda x: algorithm.loss(
    log_probs=x, log_probs_old=log_probs, advantages=advantages, mask=mask
  )[0]
  return jax.grad(loss)(log_probs)


def scores_of(advantages: np.ndarray, batch: ArmBatch) -> dict[str, float]:
  """Returns the scores of an arm's credit, and W = A+ - A- by token class."""
  plus, minus = _sides(batch)
  found = {}
  for name, side, target, credit in (
    ("correct", plus, decides(batch.codes), advantages),
    ("incorrect", minus, is_wrong(batch.codes), -advantages),
  ):
    found |= {f"{key}_{name}": value for key, value in credit_scores(credit, target, side).items()}
  decisive = of_class(batch.codes, "decisive")
  found["lift_decisive"] = credit_scores(advantages, decisive, plus)["lift"]
  for name in CLASSES:
    tokens = of_class(batch.codes, name) & (plus | minus)
    found[f"w_{name}"] = class_weight(advantages, tokens, plus)
  return found


def signal_scores(batch: ArmBatch) -> dict[str, float]:
  """Returns the AUROC of the entropy itself, and entropy and accuracy by class.

  H should find the tokens that decide in O+, 1/H the wrong ones in O-. `pooled` compares tokens of
  all completions, the other values those of the same completion.
  """
  entropy = np.asarray(batch.signals.entropy, np.float64)
  plus, minus = _sides(batch)
  t = entropy.shape[-1]
  found = {"accuracy": float(batch.signals.correct.mean())}
  found["unknown"] = float((batch.codes[batch.signals.mask] == 0).mean())
  for name, x, target, side in (
    ("decisive_or_copied", entropy, decides(batch.codes), plus),
    ("decisive", entropy, of_class(batch.codes, "decisive"), plus),
    ("wrong", -entropy, is_wrong(batch.codes), minus),
  ):
    flat = [a.reshape(-1, t) for a in (x, target, side)]
    found[f"auroc_{name}"] = auroc(*flat)
    found[f"auroc_{name}_pooled"] = auroc(*(a.reshape(1, -1) for a in flat))
  for name in CLASSES:
    tokens = of_class(batch.codes, name)
    found[f"entropy_{name}"] = float(entropy[tokens].mean()) if tokens.any() else float("nan")
    found[f"share_{name}"] = float(tokens.sum() / max((batch.codes > 0).sum(), 1))
  decisive = of_class(batch.codes, "decisive")
  found["right_decisive"] = float((~is_wrong(batch.codes[decisive])).mean())
  return found


def _sides(batch: ArmBatch) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of known truth in O+ and in O-, bool[n, g, t], of groups with both."""
  correct = batch.signals.correct
  mixed = correct.any(1) & ~correct.all(1)
  known = batch.signals.mask & (batch.codes > 0) & mixed[:, None, None]
  return known & correct[..., None], known & ~correct[..., None]


class Moments:
  """The mean and the noise-to-signal ratio of vectors."""

  def __init__(self):
    self._count = 0
    self._sum: Any = 0.0
    self._squares = 0.0

  def add(self, x: np.ndarray) -> None:
    x = x.astype(np.float64)
    self._count += 1
    self._sum = self._sum + x
    self._squares += float(x @ x)

  @property
  def mean(self) -> np.ndarray:
    return self._sum / self._count

  def noise(self) -> float:
    """Returns the expected squared distance from the mean over the squared norm of the mean.

    Both are estimated without bias. It is infinite if the estimate of the norm is not positive.
    """
    n = self._count
    square_of_sum = float(self._sum @ self._sum)
    signal = (square_of_sum - self._squares) / (n * (n - 1))
    noise = (self._squares - square_of_sum / n) / (n - 1)
    return noise / signal if signal > 0 else float("inf")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
  return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of every key over the rows in which it is a number; NaN without one."""
  columns = {key: np.asarray([row[key] for row in rows]) for key in rows[0]}
  mean = lambda column: float(np.nanmean(column)) if not np.isnan(column).all() else float("nan")
  return {key: mean(column) for key, column in columns.items()}


def _reporter(total: int) -> Callable[[int], None]:
  """Returns a function that prints how many batches are done, at most every `LINE_S` seconds."""
  began = last = time.perf_counter()

  def report(done: int) -> None:
    nonlocal last
    now = time.perf_counter()
    if now - last > LINE_S or done == total:
      last = now
      print(f"  {done} of {total} batches, {now - began:.0f} s", flush=True)

  return report
