"""The ways of assigning credit that the studies of credit compare, and the batches they read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.arrays import Rollouts, Signals
from gtpo_jax.config import Config
from gtpo_jax.logs.credit import batch_signals
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.truth import batch_truth, decides
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.models.params import Params
from gtpo_jax.probing.arms import shuffled_means, shuffled_tokens
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.collector import Collector
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

# All arms sample the same way, normalise over the group and average over tokens.
EQUAL = {"loss_aggregation": "token", "dynamic_sampling": False}
OVER_GROUP = {**EQUAL, "norm_scope": "group"}
BASELINE = "gtpo, alpha2 = 0"


@dataclasses.dataclass(frozen=True)
class ArmBatch:
  """A batch of n groups of g completions, sampled at fixed parameters.

  Attributes:
    rollouts: [n, g, t], on the device.
    signals: what advantages are computed from, host arrays.
    codes: u8[n, g, t], the truth of the tokens (`logs.truth`); 0 where it is unknown.
    key: seeds what is random in an arm.
  """

  rollouts: Rollouts
  signals: Signals
  codes: np.ndarray
  key: int


@contextlib.contextmanager
def opened(config: Config) -> Iterator[tuple[RolloutWorker, RewardManager]]:
  """Yields the worker and the reward manager of a config."""
  with contextlib.closing(RewardManager(config)) as rewards:
    yield RolloutWorker(config), rewards


@functools.cache
def shared_worker(config: Config) -> RolloutWorker:
  """Returns the worker of all runs with a config, so that its programs are compiled once."""
  return RolloutWorker(config)


def open_base(out: Path, name: str, worker: RolloutWorker, config: Config) -> Params:
  """Returns the parameters of a base model, which is trained if OUT does not have it."""
  folder = out / f"base-{name}"
  folder.mkdir(parents=True, exist_ok=True)
  return base_model(config, worker, folder, Display(enabled=False), lambda: False)


def collector_of(
  config: Config, worker: RolloutWorker, rewards: RewardManager, first: int = 0
) -> Collector:
  """Returns a collector whose k-th batch depends only on the config, the parameters and k.

  `first` is the k of the batch that it collects first.
  """
  problems = training_problems(config, worker)
  return Collector(
    config, worker, rewards, problems, FrozenPolicies(None, None, {}, {}), steps=first
  )


def next_batch(collector: Collector, params: Params, key: int) -> ArmBatch:
  """Samples the collector's next batch with these parameters; `key` as in `ArmBatch`."""
  return batch_of(collector.collect(params, 0, print), collector.worker, key)


def batch_of(collected: Batch, worker: RolloutWorker, key: int) -> ArmBatch:
  """Returns what the arms read of a collected batch; `key` as in `ArmBatch`."""
  rollouts = collected.rollouts
  codes = batch_truth(collected, worker).tokens
  if codes is None:
    codes = np.zeros(rollouts.tokens.shape, np.uint8)
  return ArmBatch(rollouts, batch_signals(collected), codes, key)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to assign credit.

  Attributes:
    algorithm: its loss, and the credit before `change`.
    change: (algorithm, batch) -> advantages f32[n, g, t]; None for the algorithm's own.
    entropy: batch -> entropies f32[n, g, t] that replace the policy's own; None to keep these.
  """

  algorithm: Algorithm
  change: Callable[[Algorithm, ArmBatch], jax.Array] | None = None
  entropy: Callable[[ArmBatch], np.ndarray] | None = None

  def advantages(self, batch: ArmBatch) -> jax.Array:
    """Returns the advantages f32[n, g, t] of a batch."""
    if self.entropy is not None:
      signals = batch.signals.replace(entropy=self.entropy(batch))
      batch = dataclasses.replace(batch, signals=signals)
    change = self.change or (lambda algorithm, batch: _advantages(algorithm, batch.signals))
    return change(self.algorithm, batch)

  def loss_mask(self, batch: ArmBatch) -> jax.Array:
    """Returns the tokens in the loss, bool[n, g, t]."""
    return _loss_mask(self.algorithm, batch.signals)


@functools.partial(jax.jit, static_argnums=0)
def _advantages(algorithm: Algorithm, signals: Signals) -> jax.Array:
  return algorithm.advantages(signals)


@functools.partial(jax.jit, static_argnums=0)
def _loss_mask(algorithm: Algorithm, signals: Signals) -> jax.Array:
  return algorithm.loss_mask(signals)


def _within_verdict(batch: ArmBatch) -> np.ndarray:
  return shuffled_tokens(batch.signals, np.random.default_rng(batch.key))


def _completions_shuffled(batch: ArmBatch) -> np.ndarray:
  return shuffled_means(batch.signals, np.random.default_rng(batch.key))


def _shuffled(batch: ArmBatch) -> np.ndarray:
  """Permutes the entropies within each completion, which keeps their distribution."""
  rng = np.random.default_rng(batch.key)
  entropy = np.array(batch.signals.entropy)
  for index in np.ndindex(entropy.shape[:2]):
    tokens = np.flatnonzero(batch.signals.mask[index])
    entropy[index][tokens] = entropy[index][rng.permutation(tokens)]
  return entropy


def _oracle(algorithm: Algorithm, batch: ArmBatch) -> jax.Array:
  """Pays only the tokens that decide; completions of unknown truth keep uniform credit."""
  known = (batch.codes > 0).any(-1, keepdims=True)
  return _advantages(algorithm, batch.signals) * (decides(batch.codes) | ~known)


def _by_completion(algorithm: Algorithm, batch: ArmBatch) -> jax.Array:
  """Gives every token the advantage that GRPO-S gives its completion."""
  return _advantages(GRPO_S, batch.signals)


def gtpo(alpha2: float, **settings: Any) -> Algorithm:
  return make("gtpo", alpha2=alpha2, **OVER_GROUP, **settings)


def _grpo_s(beta2: float) -> Algorithm:
  return make("grpo_s", beta2=beta2, **OVER_GROUP)


GRPO_S = _grpo_s(1.0)

ARMS: dict[str, Arm] = {
  BASELINE: Arm(gtpo(0.0)),
  "gtpo, alpha2 = 0.1": Arm(gtpo(0.1)),
  "gtpo, alpha2 = 1": Arm(gtpo(1.0)),
  "alpha2 = 1, entropies shuffled": Arm(gtpo(1.0), entropy=_shuffled),
  "gtpo_v1, alpha = 1": Arm(make("gtpo_v1", alpha=1.0, **OVER_GROUP)),
  "grpo_s, beta2 = 0": Arm(_grpo_s(0.0)),
  "grpo_s, beta2 = 0.1": Arm(_grpo_s(0.1)),
  "grpo_s, beta2 = 1": Arm(GRPO_S),
  "grpo_s, entropies shuffled": Arm(GRPO_S, entropy=_completions_shuffled),
  "ours: rewards of grpo_s, token ratios": Arm(gtpo(0.0), _by_completion),
  "dapo": Arm(make("dapo", **EQUAL)),
  "dapo_forking": Arm(make("dapo_forking", **EQUAL)),
  "oracle mask": Arm(gtpo(0.0), _oracle),
}
# By arm: the same loss without entropy in the reward and, at the stronger weight, with entropies of
# other completions. The first control of `gtpo_v1` is the baseline.
CONTROLS = {
  "grpo_s, beta2 = 0.1": ("grpo_s, beta2 = 0",),
  "grpo_s, beta2 = 1": ("grpo_s, beta2 = 0", "grpo_s, entropies shuffled"),
}

SHUFFLED = "alpha2 = 1, shuffled within verdict"
# Of benchmarks/credit_real.py.
REAL_ARMS: dict[str, Arm] = {
  **{name: ARMS[name] for name in (BASELINE, "gtpo, alpha2 = 1")},
  SHUFFLED: Arm(gtpo(1.0), entropy=_within_verdict),
  **{name: ARMS[name] for name in ("grpo_s, beta2 = 0", "grpo_s, beta2 = 1", "dapo")},
  **{name: Arm(make(name, **EQUAL)) for name in ("empg", "fipo")},
}
REAL_CONTROLS = {
  "gtpo, alpha2 = 1": (SHUFFLED,),
  "grpo_s, beta2 = 1": ("grpo_s, beta2 = 0",),
  "empg": ("dapo",),
  "fipo": ("dapo",),
}
# The arms of each of its tasks, in the order of the runs: what a shorter budget leaves out is last.
TRAINED = {
  "sums": (
    BASELINE,
    "gtpo, alpha2 = 1",
    SHUFFLED,
    "grpo_s, beta2 = 0",
    "grpo_s, beta2 = 1",
    "dapo",
    "empg",
    "fipo",
  ),
  "sums_lora16": (BASELINE, "gtpo, alpha2 = 1"),
  "words": (BASELINE, "gtpo, alpha2 = 1", SHUFFLED),
}
