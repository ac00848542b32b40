"""Compares the gradient of every arm with the true one, for arms that no recipe describes.

`gtpo probe` does this for recipes; its gradients, sketches and statistics are used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from credit_arms import REFERENCE_ARM, Arm, ArmBatch, collector_of, next_batch

from gtpo_jax.config import Config
from gtpo_jax.logs.credit_scores import auroc, class_weight, credit_scores
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.truth import CLASSES, decides, is_wrong, of_class
from gtpo_jax.models.params import Params
from gtpo_jax.probing import gradients as probing
from gtpo_jax.probing.statistics import Moments, cosine
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

REFERENCE_NAME = "reference"


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
  gradients = probing.make_gradients(config, worker.model, params)
  found: list[Gradients] = []
  scores: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
  total = batches + reference_batches
  with Display().counting("batches", total) as count:
    for number in range(total):
      batch = next_batch(collector, params, number)
      chosen = arms if number < batches else {}
      for name, arm in chosen.items():
        scores[name].append(scores_of(np.asarray(arm.advantages(batch)), batch))
      signals = signal_scores(batch) if chosen else {}
      found.append(measure(gradients, batch, chosen, signals, with_reference=not chosen))
      count(number + 1)
  reference = moments_of(batch.of(REFERENCE_NAME) for batch in found[batches:])
  return {
    "batches": batches,
    "reference_batches": reference_batches,
    "reference_noise": reference.noise() / reference_batches,
    "signals": _means([batch.signals for batch in found[:batches]]),
    "arms": {
      name: {
        "cosine": [cosine(batch.of(name), reference.mean) for batch in found[:batches]],
        "noise": moments_of(batch.of(name) for batch in found[:batches]).noise(),
        **_means(scores[name]),
      }
      for name in arms
    },
  }


class Gradients(NamedTuple):
  """The gradients on one batch, or their sketches.

  Attributes:
    names: of the arms, and `REFERENCE_NAME`.
    values: f32[v, s], s numbers of each of the v arms.
    signals: what is known of the batch.
  """

  names: list[str]
  values: np.ndarray
  signals: dict[str, float]

  def save(self, file: Path) -> None:
    """Writes the file under its name only when it is complete."""
    part = file.with_suffix(".part")
    with part.open("wb") as out:
      np.savez(out, names=self.names, values=self.values, signals=[*self.signals.items()])
    part.rename(file)

  @classmethod
  def read(cls, file: Path) -> Gradients:
    """Reads what `save` wrote."""
    with np.load(file) as stored:
      signals = {str(key): float(value) for key, value in stored["signals"]}
      return cls([str(name) for name in stored["names"]], stored["values"], signals)

  def of(self, name: str) -> np.ndarray:
    """Returns the gradient of an arm, f64[s]."""
    return self.values[self.names.index(name)].astype(np.float64)


def measure(
  gradients: probing.Gradients,
  batch: ArmBatch,
  arms: Mapping[str, Arm],
  signals: dict[str, float],
  with_reference: bool = True,
) -> Gradients:
  """Returns the gradients of the arms, and of the reference if asked for, on one batch."""
  chosen = {**arms, **({REFERENCE_NAME: REFERENCE_ARM} if with_reference else {})}
  losses = {name: arm.derivatives(batch) for name, arm in chosen.items()}
  values = probing.gradients_of(gradients, batch.rollouts, losses)
  return Gradients([*values], np.stack([*values.values()]), signals)


def leave_one_out_result(batches: Sequence[Gradients], compared: int) -> dict[str, Any]:
  """Returns what each arm does, in the form of `probe`.

  The reference of a batch is the mean gradient with a leave-one-out baseline over all *other*
  batches, so no batch is compared with itself.

  Args:
    batches: at least 3. Those from `compared` on have the reference only.
    compared: batches on which the arms are compared, at least 2.
  """
  reference = np.stack([batch.of(REFERENCE_NAME) for batch in batches])
  others = [np.delete(reference, i, axis=0).mean(0) for i in range(compared)]
  arms = {}
  for name in batches[0].names:
    if name != REFERENCE_NAME:
      own = [batch.of(name) for batch in batches[:compared]]
      cosines = [cosine(x, y) for x, y in zip(own, others, strict=True)]
      arms[name] = {"cosine": cosines, "noise": moments_of(own).noise()}
  return {
    "batches": compared,
    "reference_batches": len(batches) - 1,
    "reference_noise": moments_of(reference).noise() / (len(batches) - 1),
    "signals": _means([batch.signals for batch in batches]),
    "arms": arms,
  }


def moments_of(vectors: Iterable[np.ndarray]) -> Moments:
  """Returns the moments of vectors."""
  found = Moments()
  for vector in vectors:
    found.add(vector)
  return found


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


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of every key over the rows in which it is a number; NaN without one."""
  columns = {key: np.asarray([row[key] for row in rows]) for key in rows[0]}
  mean = lambda column: float(np.nanmean(column)) if not np.isnan(column).all() else float("nan")
  return {key: mean(column) for key, column in columns.items()}
