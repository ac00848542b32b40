"""Collects the batch of one step: samples, scores and, with dynamic sampling, resamples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Rewards, Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.data.records import Problem, Problems
from gtpo_jax.models.causal import attention_kind
from gtpo_jax.models.params import Params
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.groups import Group, restore_groups, save_groups, split_groups, stack
from gtpo_jax.rollout.keys import KeyStream, key_for
from gtpo_jax.rollout.scoring import PendingRewards, RewardManager, RewardResult
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import axis_size, shard_batch
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.training.log_probs import make_scorer
from gtpo_jax.training.packing import plan_rows


@dataclasses.dataclass(frozen=True)
class Experience:
  """A step's batch.

  Attributes:
    rollouts: [n, g, ...], on the mesh.
    rewards: [n, g], on the mesh.
    problems: n problems.
    texts: [n][g], decoded completions.
    correct: bool[n, g], on the host.
    metrics: statistics of all sampled completions, dropped ones included, and the time spent.
  """

  rollouts: Rollouts
  rewards: Rewards
  problems: list[Problem]
  texts: list[list[str]]
  correct: np.ndarray
  metrics: dict[str, float]

  def first_completion(self, i: int) -> tuple[str, str, bool]:
    """Returns problem i, its first completion, and whether that is correct."""
    prompt = self.problems[i].messages[-1]["content"]
    return prompt, self.texts[i][0], bool(self.correct[i, 0])

  def add_metrics(self, update: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the update together with `metrics`.

    With dynamic sampling, some exist for both. Those of all sampled groups keep their name; those
    of the groups that the update trained on are called `kept/NAME`.
    """
    renamed = {f"kept/{name}" if name in self.metrics else name: update[name] for name in update}
    return {**renamed, **self.metrics}

  def to_arrays(self) -> dict[str, np.ndarray]:
    """Returns the problems' ids and everything the update reads, as host arrays by dotted name.

    Every process must call it.
    """
    batch = fetch({"rollouts": self.rollouts, "rewards": self.rewards})
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {"problems": np.asarray([problem.id for problem in self.problems]), **arrays}


class _GenerationBatch(NamedTuple):
  """One generation batch, sampled and scored."""

  number: int
  problems: list[Problem]
  rollouts: Rollouts  # on the mesh
  scores: RewardResult
  texts: list[list[str]]  # [n][g]
  scoring_s: float  # seconds spent waiting for scores after the last completion ended


class Collector:
  """Samples and scores each step's batch.

  Generation batch k has the k-th batch of the data order and is sampled with PRNG key k. For given
  parameters, the completions therefore depend only on the seed and on k. Without dynamic sampling
  there is one generation batch per step, and k is the step's index.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    reward_manager: RewardManager,
    problems: Sequence[tuple[Problems, float]],
    frozen: FrozenPolicies,
    drawn: int = 0,
  ):
    """Args:
    config: the run's config.
    worker: samples completions.
    reward_manager: scores them.
    problems: sources with weights, from `training_problems`.
    frozen: the guide and the reference.
    drawn: generation batches sampled so far.
    """
    self._config = config
    self._worker = worker
    self._reward_manager = reward_manager
    self._frozen = frozen
    self._settings = config.resolved_algorithm.settings
    self._n = config.batch.prompts
    self._batches = Batches(problems, self._n, config.seed)
    self._drawn = drawn
    self._kept: list[Group] = []
    self._before = (self._drawn, self._kept)
    self._rescore = self._make_scorer(worker.model) if self._settings.tis_cap else None
    self._score_reference = self._make_scorer(frozen.reference[0]) if frozen.reference else None
    self._append_guided = jax.jit(_append_guided)

  def _make_scorer(self, model: Qwen2) -> Callable[[Params, Rollouts], jax.Array]:
    batch = self._config.batch
    return make_scorer(model, self._config.sampling.temperature, batch.parts, batch.head_chunk)

  def warm_up(self, policy: Policy) -> None:
    """Compiles every program that sampling a batch from `policy` and the guide may need."""
    policies = [(policy, self._config.policy_completions)]
    if self._frozen.guide:
      policies.append((self._frozen.guide, self._settings.guide_completions))
    for (engine, params), group in policies:
      engine.programs.warm_up(
        params, self._n, group=group, sampling_params=self._config.sampling_params
      )

  @phase("sampling")
  def collect(
    self, params: Params, say: Callable[[str], None], stopping: Callable[[], bool] = lambda: False
  ) -> Experience:
    """Samples and scores the next step's batch, with `params` and the guide if there is one.

    Args:
      params: the policy's parameters in training layout.
      say: receives a line if dynamic sampling cannot fill the batch.
      stopping: called between chunks of tokens; True discards what was sampled.

    Raises:
      Stopped: `stopping` returned True; the next call samples the same batch.
    """
    self._before = (self._drawn, self._kept)
    try:
      experience = self._collect(params, say, stopping)
      if stopping():
        raise Stopped
      return experience
    except Stopped:
      self.discard()
      raise

  def discard(self) -> None:
    """Forgets the latest batch: the next call of `collect` samples it again."""
    self._drawn, self._kept = self._before

  def _collect(
    self, params: Params, say: Callable[[str], None], stopping: Callable[[], bool]
  ) -> Experience:
    began = time.perf_counter()
    policy = self._worker.policy(params)
    if self._settings.dynamic_sampling:
      groups, metrics, scoring_s = self._sample_groups(params, policy, say, stopping)
      rollouts = shard_batch(stack([group.rollouts for group in groups]), self._mesh)
      rewards = stack([group.rewards for group in groups])
      problems = [group.problem for group in groups]
      texts = [group.texts for group in groups]
    else:
      batch = self._sample_batch(params, policy, stopping)
      rollouts = batch.rollouts
      rewards = batch.scores.rewards
      problems = batch.problems
      texts = batch.texts
      metrics = batch.scores.metrics
      scoring_s = batch.scoring_s
    rollouts = self._pack(rollouts)
    if self._score_reference:
      log_probs = self._score_reference(self._frozen.reference[1], rollouts)
      rollouts = rollouts.replace(reference=jax.block_until_ready(log_probs))
    metrics |= {"time/sample": time.perf_counter() - began - scoring_s, "time/reward": scoring_s}
    correct = rewards.correct
    return Experience(rollouts, shard_batch(rewards, self._mesh), problems, texts, correct, metrics)

  @property
  def _mesh(self) -> jax.sharding.Mesh:
    return self._worker.model.mesh

  def _sample_batch(
    self, params: Params, policy: Policy, stopping: Callable[[], bool]
  ) -> _GenerationBatch:
    """Samples and scores the next generation batch."""
    config = self._config
    worker = self._worker
    number = self._drawn
    problems = self._batches[number]
    pending = PendingRewards(self._reward_manager, problems, config.batch.group, worker.chat.decode)
    own = config.policy_completions
    key = key_for(config.seed, KeyStream.SAMPLE, number)
    rollouts = worker.generate(
      policy, problems, key, own, config.sampling_params, pending, stopping=stopping
    )
    rollouts = shard_batch(rollouts, self._mesh)
    if self._rescore:
      log_probs = self._rescore(params, self._pack(rollouts))
      rollouts = rollouts.replace(rescored=jax.block_until_ready(log_probs))
    if guide := self._frozen.guide:
      key = key_for(config.seed, KeyStream.GUIDE, number)
      group = self._settings.guide_completions
      guided = worker.generate(
        guide, problems, key, group, config.sampling_params, pending, own, stopping
      )
      rollouts = self._append_guided(rollouts, shard_batch(guided, self._mesh))
    self._drawn += 1
    began = time.perf_counter()
    scores = pending.result(stopping)
    scoring_s = time.perf_counter() - began
    return _GenerationBatch(number, problems, rollouts, scores, pending.texts, scoring_s)

  def _pack(self, rollouts: Rollouts) -> Rollouts:
    """Adds the packing: which completions share a row in the trainer's forward pass."""
    if not self._config.batch.pack:
      return rollouts
    model = self._worker.model
    share_rows = (
      attention_kind(model.config, model.mesh) != "cudnn"
    )  # cuDNN attention has no segment masks
    packing = plan_rows(
      fetch(rollouts.lengths),
      rollouts.tokens.shape[2],
      share_rows,
      axis_size(model.mesh, "position"),
    )
    return rollouts.replace(packing=packing and shard_batch(packing, model.mesh))

  def _sample_groups(
    self, params: Params, policy: Policy, say: Callable[[str], None], stopping: Callable[[], bool]
  ) -> tuple[list[Group], dict[str, float], float]:
    """Samples until n groups carry a learning signal: DAPO's dynamic sampling (2503.14476).

    Such groups contain correct and incorrect completions; see `algorithms.has_contrast`. Groups
    kept from the previous step come first. If `max_gen_batches` batches are not enough, other
    groups fill the batch and are masked out of the loss. The metrics describe everything that was
    sampled, not only the batch.

    Returns:
      n groups, the metrics, and the seconds spent waiting for scores.
    """
    n = self._n
    contrast = list(self._kept)
    no_contrast: list[Group] = []
    sampled: list[Group] = []
    batch_metrics = []
    scoring_s = 0.0
    for _ in range(self._config.batch.max_gen_batches):
      batch = self._sample_batch(params, policy, stopping)
      groups = split_groups(
        batch.number, batch.problems, fetch(batch.rollouts), batch.scores.rewards, batch.texts
      )
      sampled += groups
      scoring_s += batch.scoring_s
      batch_metrics.append(batch.scores.metrics)
      for group in groups:
        (contrast if group.has_contrast else no_contrast).append(group)
      if len(contrast) >= n:
        break
    short = max(n - len(contrast), 0)
    if short:
      say(
        f"dynamic sampling: batch.max_gen_batches = {self._config.batch.max_gen_batches} reached; "
        f"{len(no_contrast)} of {len(sampled)} sampled groups carry no learning signal; "
        f"training on {n - short} of {n} groups in this step"
      )
    filler = [group.as_filler() for group in no_contrast[len(no_contrast) - short :]]
    self._kept = [group.as_stale() for group in contrast[n:]]
    metrics = {
      **_sampled_metrics(sampled),
      "groups/sampled": float(len(sampled)),
      "groups/dropped": float(len(no_contrast)),
      "groups/kept": float(len(self._kept)),
      "groups/short": float(short),
      **_combine_metrics(batch_metrics),
    }
    return contrast[:n] + filler, metrics, scoring_s

  def leftovers(self) -> dict[str, np.ndarray] | None:
    """Returns the groups kept for the next step, as arrays of fixed shapes for a checkpoint.

    None without dynamic sampling.
    """
    if not self._settings.dynamic_sampling:
      return None
    return save_groups(self._config, self._kept, self._drawn)

  def restore(self, leftovers: dict[str, np.ndarray]) -> None:
    """Restores what `leftovers` returned.

    Raises:
      UserError: it was saved under a config with other shapes.
    """
    kept = []
    for index, rollouts, rewards in restore_groups(self._config, leftovers):
      batch, row = index
      tokens = [x[mask] for x, mask in zip(rollouts.tokens, rollouts.mask, strict=True)]
      texts = self._worker.chat.decode(tokens)
      kept.append(Group(index, self._batches[batch][row], rollouts, rewards, texts))
    self._kept = kept
    self._drawn = int(leftovers["drawn"])


def _append_guided(rollouts: Rollouts, guided: Rollouts) -> Rollouts:
  """Returns the policy's completions followed by the guide's, [n, g_policy + g_guide, ...]."""
  own = rollouts.replace(prompts=None, guided=jnp.zeros(rollouts.finished.shape, bool))
  added = guided.replace(prompts=None, guided=jnp.ones(guided.finished.shape, bool))
  if rollouts.rescored is not None:  # a guide's ratio is to its own log-probs in any case
    added = added.replace(rescored=guided.log_probs)
  joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), own, added)
  return joined.replace(prompts=rollouts.prompts)


def _sampled_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Returns metrics over the policy's own completions of all sampled groups.

  `batch_metrics` computes metrics of the same names over the groups that are trained on.
  """
  rewards = stack([group.rewards for group in groups])
  rollouts = stack([group.rollouts for group in groups])
  own = np.ones(rewards.correct.shape, bool) if rollouts.guided is None else ~rollouts.guided
  judged = own & rewards.scored
  correct = rewards.correct
  lengths = rollouts.mask.sum(-1)
  own_tokens = rollouts.mask & own[..., None]
  entropy_of = lambda side: _mean(rollouts.entropy, own_tokens & side[..., None])
  return {
    "reward/accuracy": _mean(correct, judged),
    "reward/mean": _mean(rewards.reward + rewards.penalty, judged),
    "tokens/sampled": float(rollouts.mask.sum()),
    "groups/all_correct": float((correct | ~judged).all(1).mean(where=judged.any(1))),
    "groups/all_wrong": float((~correct | ~judged).all(1).mean(where=judged.any(1))),
    "entropy/mean": entropy_of(own),
    "entropy/correct": entropy_of(judged & correct),
    "entropy/incorrect": entropy_of(judged & ~correct),
    "length/mean": _mean(lengths, own),
    "length/min": float(lengths[own].min()),
    "length/max": float(lengths[own].max()),
    "length/cut_off": _mean(~rollouts.finished, own),
  }


def _mean(x: np.ndarray, mask: np.ndarray) -> float:
  """Returns the mean of x where `mask` is True, in float64; NaN if it is False everywhere."""
  return float(x[mask].mean(dtype=np.float64)) if mask.any() else float("nan")


def _combine_metrics(batches: Sequence[dict[str, float]]) -> dict[str, float]:
  """Returns the metrics of several generation batches: counts are added, the rest averaged."""
  combine = lambda name: np.nansum if name == "reward/no_verdict" else np.nanmean
  return {name: float(combine(name)([metrics[name] for metrics in batches])) for name in batches[0]}
