"""Collects the batch of one step: prompts, completions, rewards, and the groups to train on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from gtpo_jax.arrays import KeyStream, key_for
from gtpo_jax.config import Config
from gtpo_jax.data.records import Problems
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.batch import Batch, Placement
from gtpo_jax.rollout.continuations import ValueEstimator
from gtpo_jax.rollout.drawing import make_drawing
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.group_metrics import sampled_metrics, source_metrics, staleness_metrics
from gtpo_jax.rollout.group_pool import GroupPool
from gtpo_jax.rollout.groups import Group, restore_groups, save_groups
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.turns import Turns
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.spans import Span


class Collector:
  """Collects the batch of each step from a pool of groups.

  Group k of a run is row k % n of generation batch k // n, with n = `batch.prompts`. It has the
  problem that is drawn for it and is sampled with the PRNG key of that batch. For given parameters
  and problems, completions therefore depend only on the seed and on k.

  A step samples one generation batch and trains on it: the pool has n groups and is emptied. With
  dynamic sampling and `sampling.staleness`, groups stay in the pool for the next step: those that
  were not needed and, with staleness, those whose completions have not all ended.

  Attributes:
    worker: samples completions.
    placement: places the groups of a batch on the mesh.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    reward_manager: RewardManager,
    problems: Sequence[tuple[Problems, float]],
    frozen: FrozenPolicies,
    steps: int = 0,
  ):
    """Args:
    config: the run's config.
    worker: samples completions.
    reward_manager: scores them.
    problems: sources with weights, from `training_problems`.
    frozen: the frozen policies.
    steps: the steps of the run so far, each on one generation batch. `restore` replaces it.
    """
    self._config = config
    self.worker = worker
    self._reward_manager = reward_manager
    self._frozen = frozen
    self._settings = config.resolved_algorithm.settings
    self._n = config.batch.prompts
    self._drawing = make_drawing(config, problems)
    self._staleness = config.sampling.staleness
    self._begun = steps * self._n  # groups
    self._kept: list[Group] = []
    self._pending = self._new_pending()
    self._turns = Turns(worker, config.policy_completions, config.seed)
    self._before = (self._begun, self._kept, self._drawing.state)
    self.placement = Placement(config, worker, frozen.scorers)

  @phase("sampling")
  def collect(
    self,
    params: Params,
    version: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
  ) -> Batch:
    """Samples and scores the next step's batch, with `params` and the guide if there is one.

    Args:
      params: the policy's parameters in training layout.
      version: the number of updates that they have had.
      say: receives a line if dynamic sampling cannot fill the batch.
      stopping: called between chunks of tokens; True discards what was sampled.

    Raises:
      Stopped: `stopping` returned True; the next call samples the same batch.
    """
    self._before = (self._begun, self._kept, self._drawing.state)
    try:
      batch = self._collect(params, version, say, stopping)
      if stopping():
        raise Stopped
      return batch
    except Stopped:
      self.discard()
      raise

  def discard(self) -> None:
    """Forgets the latest batch: the next call of `collect` samples it again."""
    self._begun, self._kept, self._drawing.state = self._before
    self._pending = self._new_pending()
    self._turns.discard()

  def _new_pending(self) -> PendingRewards:
    return PendingRewards(self._reward_manager, {}, self._config.batch.group, self.worker.decode)

  def _collect(
    self, params: Params, version: int, say: Callable[[str], None], stopping: Callable[[], bool]
  ) -> Batch:
    began = time.perf_counter()
    config = self._config
    policy = self.worker.policy(params)
    policies = filter(None, (policy, self._frozen.guide))
    engines = list(dict.fromkeys(policy.engine for policy in policies))
    for engine in engines:
      engine.spans.clear()
    most_rounds = config.batch.max_gen_batches if self._settings.dynamic_sampling else 1
    rounds: list[GroupPool] = []
    chosen = None
    while chosen is None and len(rounds) < most_rounds:
      pool = self._sample(policy, version, stopping)
      rounds.append(pool)
      chosen = pool.choose()
    groups, metrics = self._take(chosen, rounds, version, say)
    if part := config.resolved_algorithm.recipe.continuations:
      estimator = ValueEstimator(
        self.worker, self._reward_manager, policy, config.sampling_params, stopping
      )
      keys = group_keys(config, policy.engine, KeyStream.CONTINUE, groups, config.batch.group)
      gains, measured = estimator.gains(part, groups, keys, config.sampling.max_tokens)
      groups = [
        dataclasses.replace(group, rewards=group.rewards.replace(value_gains=own))
        for group, own in zip(groups, gains, strict=True)
      ]
      metrics |= measured
    sampled = time.perf_counter()
    rollouts, rewards = self.placement.place(params, groups, version)
    scoring_s = sum(pool.scoring_s for pool in rounds)
    spans = [span for engine in engines for span in engine.spans]
    spans.append(Span("reward", sampled - scoring_s, sampled, 0.0))
    metrics |= policy.engine.statistics
    metrics |= {"time/sample": time.perf_counter() - began - scoring_s, "time/reward": scoring_s}
    metrics |= self._turns.metrics(metrics)
    since_began = [span._replace(begin=span.begin - began, end=span.end - began) for span in spans]
    return Batch(groups, rollouts, rewards, metrics, since_began)

  def _sample(self, policy: Policy, version: int, stopping: Callable[[], bool]) -> GroupPool:
    """Samples the groups of the pool and new ones, and scores complete ones.

    Without staleness, a whole generation batch begins and is sampled to its end. With staleness, as
    many groups begin as the pool has space for, and sampling ends as soon as the completions of a
    batch have ended. Only the rewards of its groups are awaited then; the others are scored while
    the policy is updated. With dynamic sampling, sampling continues if some of them lack contrast.
    When a reward comes therefore changes no batch.
    """
    config = self._config
    new = self._n if not self._staleness else config.pool_size - len(self._kept)
    drawn = self._drawing.draw(self._begun, new, self._kept)
    begun = [Group(index, problem, version) for index, problem in drawn]
    groups = self._turns.open([*self._kept, *begun], version, stopping)
    unscored = [x for x in groups if x.rewards is None and x.index not in self._pending]
    rows = policy.engine.completions(
      [self._turns.encode(group) for group in unscored],
      group_keys(config, policy.engine, KeyStream.SAMPLE, unscored, config.policy_completions),
    )
    sampled = {group.index: row for group, row in zip(unscored, rows, strict=True)}
    for group in unscored:
      for completion in sampled[group.index]:
        completion.group = group.index
      for completion, earlier in zip(sampled[group.index], group.completions, strict=False):
        completion.resume(earlier)
    groups = [
      dataclasses.replace(group, completions=sampled.get(group.index, group.completions))
      for group in groups
    ]
    self._pending.open({group.index: group.problem for group in unscored})
    pool = GroupPool(config, groups, self._pending, version)
    ends = self._turns.generate(policy, rows, config.sampling_params, stopping, config.pool_size)
    while not (self._staleness and self._has_batch(pool, stopping)):
      ended = next(ends, None)
      if ended is None:
        self._score(pool, pool.unscored(), stopping)
        break
      pool.end(ended)
    ends.close()
    old = len(self._kept)
    dropped = {group.index for group in pool.dropped}
    begun = self._turns.finish(pool.finish(old))
    self._begun += len(begun) - old
    self._kept = [group for group in begun if group.index not in dropped]
    self._drawing.observe(pool.completed, self._kept)
    return pool

  def _has_batch(self, pool: GroupPool, stopping: Callable[[], bool]) -> bool:
    """Whether the completions of a batch have ended, which is then scored."""
    chosen = pool.choose(scored=False)
    while chosen and (unscored := [group for group in chosen if group.rewards is None]):
      self._score(pool, unscored, stopping)
      chosen = pool.choose(scored=False)
    return bool(chosen)

  def _score(
    self, pool: GroupPool, unscored: Sequence[Group], stopping: Callable[[], bool]
  ) -> None:
    """Completes groups whose own completions have ended, with the guide's and with rewards."""
    if not unscored:
      return
    if guide := self._frozen.guide:
      count = self._settings.guide_completions
      for start in range(0, len(unscored), self._n):
        groups = unscored[start : start + self._n]
        keys = group_keys(self._config, guide.engine, KeyStream.GUIDE, groups, count)
        prompts = [group.completions[0].prompt.tokens for group in groups]
        rows = guide.engine.completions(prompts, keys)
        with jax.profiler.TraceAnnotation("sample"):
          for _ in guide.engine.generate(
            guide.params,
            rows,
            sampling_params=self._config.sampling_params,
            prompts_at_once=self._n,
          ):
            if stopping():
              raise Stopped
        for group, row in zip(groups, rows, strict=True):
          pool.add_guided(group.index, row)
    pool.score(unscored, stopping)

  def _take(
    self,
    chosen: list[Group] | None,
    rounds: Sequence[GroupPool],
    version: int,
    say: Callable[[str], None],
  ) -> tuple[list[Group], dict[str, float]]:
    """Takes the groups to train on out of the pool.

    With dynamic sampling (DAPO, 2503.14476), these are groups that contain correct and incorrect
    completions; see `algorithms.has_contrast`. If `max_gen_batches` batches are not enough, other
    groups fill the batch and are masked out of the loss. The metrics of dynamic sampling describe
    everything that was sampled, not only the batch.

    Args:
      chosen: the groups to train on; None if there are too few with contrast.
      rounds: what was sampled.
      version: the number of updates so far.
      say: receives a line if the batch is not full.

    Returns:
      n groups, and metrics.
    """
    metrics = Tallies.total([x for pool in rounds for x in pool.tallies]).metrics
    metrics |= self._drawing.metrics()
    dynamic = self._settings.dynamic_sampling
    if not (dynamic or self._staleness):
      self._kept = []
      return chosen, metrics | source_metrics(chosen)
    sampled = [group for pool in rounds for group in pool.completed]
    no_contrast = [group for pool in rounds for group in pool.dropped]
    if chosen is None:
      chosen = self._kept[: self._n]
    short = self._n - len(chosen)
    if short:
      say(
        f"dynamic sampling: batch.max_gen_batches = {self._config.batch.max_gen_batches} reached; "
        f"{len(no_contrast)} of {len(sampled)} sampled groups carry no learning signal; "
        f"training on {self._n - short} of {self._n} groups in this step"
      )
    taken = {group.index for group in chosen}
    self._kept = [group for group in self._kept if group.index not in taken]
    filler = [group.as_filler() for group in no_contrast[len(no_contrast) - short :]]
    batch = [*chosen, *filler]
    if dynamic:
      metrics |= sampled_metrics(sampled) if sampled else {}
      metrics |= {
        "groups/sampled": float(len(sampled)),
        "groups/dropped": float(len(no_contrast)),
        "groups/short": float(short),
      }
    metrics |= source_metrics(sampled)
    metrics |= {
      "groups/kept": float(len(self._kept)),
      "tokens/sampled": float(sum(pool.new_tokens for pool in rounds)),
    }
    if self._staleness:
      metrics |= staleness_metrics(batch, version) | {
        "groups/unfinished": float(
          sum(x.rewards is None and x.index not in self._pending for x in self._kept)
        ),
        "tokens/read_again": float(sum(pool.read_again for pool in rounds)),
      }
    return batch, metrics

  def leftovers(self) -> dict[str, np.ndarray] | None:
    """Returns the groups kept for the next step, as arrays of fixed shapes for a checkpoint.

    The success rates of problems are among them, with `data.difficulty`. None if there is nothing
    to keep.
    """
    keeps = self._settings.dynamic_sampling or self._staleness
    arrays = save_groups(self._config, self._kept, self._begun) if keeps else {}
    return arrays | self._drawing.save(self._kept) or None

  def restore(self, leftovers: dict[str, np.ndarray]) -> None:
    """Restores what `leftovers` returned."""
    problem_at = self._drawing.restore(leftovers)
    if "begun" in leftovers:
      decode = self.worker.decode
      self._kept = restore_groups(self._config, leftovers, problem_at, decode)
      self._begun = int(leftovers["begun"])


def group_keys(
  config: Config, engine: Engine, stream: KeyStream, groups: Sequence[Group], count: int
) -> np.ndarray:
  """Returns the PRNG key data u32[groups, count, 2] of `count` completions of each group."""
  of_batch = {
    batch: engine.completion_keys(key_for(config.seed, stream, batch), config.batch.prompts, count)
    for batch in {group.index[0] for group in groups}
  }
  return np.stack([of_batch[batch][row] for batch, row in (group.index for group in groups)])
