"""The ways of assigning credit that the studies train with, and the batches they read."""

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
from gtpo_jax.arrays import Rewards, Rollouts, Signals
from gtpo_jax.cli.probing.arms import shuffled_means, shuffled_tokens
from gtpo_jax.config import Config
from gtpo_jax.logs.credit import batch_signals
from gtpo_jax.logs.display import Display
from gtpo_jax.logs.truth import batch_truth, decides
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.models.params import Params
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
  """A batch of n groups of g completions.

  Attributes:
    signals: what advantages are computed from, host arrays.
    codes: u8[n, g, t], the truth of the tokens (`logs.truth`); 0 where it is unknown.
    key: seeds what is random in an arm.
  """

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
  """Returns the parameters of a base model; OUT keeps the result of a warm start."""
  folder = out / name
  folder.mkdir(parents=True, exist_ok=True)
  return base_model(config, worker, folder, Display(enabled=False), lambda: False)


def collector_of(config: Config, worker: RolloutWorker, rewards: RewardManager) -> Collector:
  """Returns a collector whose k-th batch depends only on the config, the parameters and k."""
  problems = training_problems(config, worker)
  return Collector(config, worker, rewards, problems, FrozenPolicies(None, None, {}, {}))


def batch_of(collected: Batch, worker: RolloutWorker, key: int) -> ArmBatch:
  """Returns what the arms read of a collected batch; `key` as in `ArmBatch`."""
  codes = batch_truth(collected, worker).tokens
  if codes is None:
    codes = np.zeros(collected.rollouts.tokens.shape, np.uint8)
  return ArmBatch(batch_signals(collected), codes, key)


class Weighted(Algorithm):
  """An algorithm whose advantages are multiplied by `turn_reward`, which no recipe of it reads."""

  def advantages(self, signals: Signals) -> jax.Array:
    """Returns the product; see the base class."""
    return super().advantages(signals) * signals.turn_reward


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to assign credit.

  Attributes:
    algorithm: its advantages and its loss.
    entropy: batch -> entropies f32[n, g, t] that replace the policy's own; None to keep these.
    weights: batch -> f32[n, g, t] for a `Weighted` algorithm; None for others.
  """

  algorithm: Algorithm
  entropy: Callable[[ArmBatch], np.ndarray] | None = None
  weights: Callable[[ArmBatch], np.ndarray] | None = None

  def changed(
    self, rollouts: Rollouts, rewards: Rewards, batch: ArmBatch
  ) -> tuple[Rollouts, Rewards]:
    """Returns a batch with the arm's own entropies and weights."""
    if self.entropy is not None:
      rollouts = rollouts.replace(entropy=jax.numpy.asarray(self.entropy(batch)))
    if self.weights is not None:
      rewards = rewards.replace(turn_reward=jax.numpy.asarray(self.weights(batch)))
    return rollouts, rewards


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


def deciding(batch: ArmBatch) -> np.ndarray:
  """Returns 1 on tokens that decide, and on completions of unknown truth, f32[n, g, t]."""
  known = (batch.codes > 0).any(-1, keepdims=True)
  return (decides(batch.codes) | ~known).astype(np.float32)


def gtpo(alpha2: float, **settings: Any) -> Algorithm:
  return make("gtpo", alpha2=alpha2, **OVER_GROUP, **settings)


def _grpo_s(beta2: float) -> Algorithm:
  return make("grpo_s", beta2=beta2, **OVER_GROUP)


SHUFFLED = "alpha2 = 1, shuffled within verdict"
ARMS: dict[str, Arm] = {
  BASELINE: Arm(gtpo(0.0)),
  "gtpo, alpha2 = 0.1": Arm(gtpo(0.1)),
  "gtpo, alpha2 = 1": Arm(gtpo(1.0)),
  "alpha2 = 1, entropies shuffled": Arm(gtpo(1.0), _shuffled),
  SHUFFLED: Arm(gtpo(1.0), _within_verdict),
  "gtpo_v1, alpha = 1": Arm(make("gtpo_v1", alpha=1.0, **OVER_GROUP)),
  "grpo_s, beta2 = 0": Arm(_grpo_s(0.0)),
  "grpo_s, beta2 = 0.1": Arm(_grpo_s(0.1)),
  "grpo_s, beta2 = 1": Arm(_grpo_s(1.0)),
  "grpo_s, entropies shuffled": Arm(_grpo_s(1.0), _completions_shuffled),
  **{name: Arm(make(name, **EQUAL)) for name in ("dapo", "dapo_forking", "empg", "fipo")},
  # With the published loss and settings, as in the probe.
  **{name: Arm(make(name, dynamic_sampling=False)) for name in ("grpo", "grpo_s")},
  "oracle mask": Arm(Weighted("oracle", gtpo(0.0).recipe), weights=deciding),
}
# By arm: the same loss without entropy in the reward and, at the stronger weight, with entropies of
# other completions. The first control of `gtpo_v1` is the baseline.
CONTROLS = {
  "gtpo, alpha2 = 1": (SHUFFLED,),
  "grpo_s, beta2 = 0.1": ("grpo_s, beta2 = 0",),
  "grpo_s, beta2 = 1": ("grpo_s, beta2 = 0", "grpo_s, entropies shuffled"),
  "empg": ("dapo",),
  "fipo": ("dapo",),
}
_MAIN = (BASELINE, "gtpo, alpha2 = 0.1", "gtpo, alpha2 = 1", "oracle mask")
_BY_COMPLETION = (
  "gtpo_v1, alpha = 1",
  *(f"grpo_s, beta2 = {x}" for x in (0, 0.1, 1)),
  "grpo_s, entropies shuffled",
)
_PLAIN = "alpha2 = 1, entropies shuffled"
# By task and number of steps: the arms that are trained, in the order of the runs. What a shorter
# budget leaves out is last.
TRAINED: dict[tuple[str, int], tuple[str, ...]] = {
  ("filler2", 12): (*_MAIN, _PLAIN, "gtpo_v1, alpha = 1", "dapo_forking", "dapo"),
  ("confident", 12): (*_MAIN, _PLAIN),
  ("countdown", 12): (*_MAIN, _PLAIN, *_BY_COMPLETION),
  ("filler2", 100): _MAIN,
  ("confident", 100): _MAIN,
  ("countdown", 100): (*_MAIN, *_BY_COMPLETION, "grpo", "grpo_s"),
  ("sums", 12): (
    BASELINE,
    "gtpo, alpha2 = 1",
    SHUFFLED,
    "grpo_s, beta2 = 0",
    "grpo_s, beta2 = 1",
    "dapo",
    "empg",
    "fipo",
  ),
  ("sums_lora16", 12): (BASELINE, "gtpo, alpha2 = 1"),
  ("words", 12): (BASELINE, "gtpo, alpha2 = 1", SHUFFLED),
}
