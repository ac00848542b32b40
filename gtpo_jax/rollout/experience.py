"""Collects the batch of one step: samples, scores, and keeps groups for the next step."""

from __future__ import annotations

import dataclasses
import functools
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
from gtpo_jax.models.params import Params
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.group_metrics import combine_metrics, sampled_metrics, staleness_metrics
from gtpo_jax.rollout.groups import (
  Group,
  append_guided,
  restore_groups,
  save_groups,
  split_groups,
  stack,
)
from gtpo_jax.rollout.keys import KeyStream, key_for
from gtpo_jax.rollout.partial import Advance, PartialRollouts
from gtpo_jax.rollout.scoring import PendingRewards, RewardManager, RewardResult
from gtpo_jax.rollout.token_truth import token_truth
from gtpo_jax.rollout.worker import Policy, RolloutWorker, Workload
from gtpo_jax.runtime.device_errors import phase
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.mesh import axis_size, shard_batch
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.runtime.spans import Span
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
    scored: bool[n, g], on the host; False if there is no verdict.
    truth: u8[n, g, t], on the host: the tokens' truth codes (`rollout.token_truth`); None if no
      problem of the batch knows them.
    metrics: statistics of all sampled completions, dropped ones included, and the time spent.
    spans: when the step's prompts were prefilled, its tokens decoded and its rewards awaited, in
      seconds since the beginning of the step.
  """

  rollouts: Rollouts
  rewards: Rewards
  problems: list[Problem]
  texts: list[list[str]]
  correct: np.ndarray
  scored: np.ndarray
  truth: np.ndarray | None
  metrics: dict[str, float]
  spans: list[Span]

  def first_completion(self, i: int) -> tuple[str, str, bool | None]:
    """Returns problem i, its first completion, and whether it is correct (None: no verdict)."""
    prompt = self.problems[i].messages[-1]["content"]
    verdict = bool(self.correct[i, 0]) if self.scored[i, 0] else None
    return prompt, self.texts[i][0], verdict

  def add_metrics(self, update: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the update together with `metrics`.

    With dynamic sampling, some names occur in both. Metrics of all sampled groups keep the name;
    those of the groups that the update trained on become `kept/NAME`.
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

  Generation batch k contains the k-th batch of problems and is sampled with PRNG key k. For given
  parameters, the completions therefore depend only on the seed and on k. By default there is one
  generation batch per step, and k is the step's index.

  Dynamic sampling and `sampling.staleness` have a pool of groups that are kept for the next step:
  groups that were not needed, and, with staleness, groups whose completions have not all ended.
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
    drawn: updates so far, each on one generation batch.
    """
    self._config = config
    self._worker = worker
    self._reward_manager = reward_manager
    self._frozen = frozen
    self._settings = config.resolved_algorithm.settings
    self._n = config.batch.prompts
    self._batches = Batches(problems, self._n, config.seed)
    self._staleness = config.sampling.staleness
    self._partial = PartialRollouts(config, worker, reward_manager, frozen, self._batches)
    # The generation batches sampled so far; with staleness, the groups begun so far.
    self._drawn = drawn * self._n if self._staleness else drawn
    self._kept: list[Group] = []
    self._before = (self._drawn, self._kept)
    self._rescore = self._make_scorer(worker.model) if self._settings.needs_rescoring else None
    self._score_reference = self._make_scorer(frozen.reference[0]) if frozen.reference else None
    self._append_guided = jax.jit(functools.partial(append_guided, axis=1, xp=jnp))
    self._keep_guided = jax.jit(
      lambda log_probs, rollouts: jnp.where(
        rollouts.guided[..., None], rollouts.log_probs, log_probs
      )
    )

  def _make_scorer(self, model: Transformer) -> Callable[[Params, Rollouts], jax.Array]:
    batch = self._config.batch
    return make_scorer(model, self._config.sampling.temperature, batch.parts, batch.head_chunk)

  def workloads(self, policy: Policy) -> list[Workload]:
    """Returns the workloads, to be compiled ahead of time, of `policy` and of the guide."""
    sampling_params = self._config.sampling_params
    own = self._config.policy_completions
    resumes = self._staleness > 0
    workloads = [Workload(policy, self._config.pool_size, own, sampling_params, resumes)]
    if guide := self._frozen.guide:
      group = self._settings.guide_completions
      workloads.append(Workload(guide, self._n, group, sampling_params))
    return workloads

  @phase("sampling")
  def collect(
    self,
    params: Params,
    version: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
  ) -> Experience:
    """Samples and scores the next step's batch, with `params` and the guide if there is one.

    Args:
      params: the policy's parameters in training layout.
      version: the number of updates that they have had.
      say: receives a line if dynamic sampling cannot fill the batch.
      stopping: called between chunks of tokens; True discards what was sampled.

    Raises:
      Stopped: `stopping` returned True; the next call samples the same batch.
    """
    self._before = (self._drawn, self._kept)
    try:
      experience = self._collect(params, version, say, stopping)
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
    self, params: Params, version: int, say: Callable[[str], None], stopping: Callable[[], bool]
  ) -> Experience:
    began = time.perf_counter()
    policy = self._worker.policy(params)
    policies = filter(None, (policy, self._frozen.guide))
    engines = list(dict.fromkeys(policy.engine for policy in policies))
    for engine in engines:
      engine.spans.clear()
    if self._settings.dynamic_sampling or self._staleness:
      groups, metrics, scoring_s = self._sample_groups(params, policy, version, say, stopping)
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
    sampled = time.perf_counter()
    if self._rescore and self._staleness:
      rollouts = self._with_rescored(params, rollouts)
    rollouts = self._pack(rollouts)
    if self._score_reference:
      log_probs = self._score_reference(self._frozen.reference[1], rollouts)
      rollouts = rollouts.replace(reference=jax.block_until_ready(log_probs))
    metrics |= policy.engine.statistics
    spans = [span for engine in engines for span in engine.spans]
    spans.append(Span("reward", sampled - scoring_s, sampled, 0.0))
    own_verifier = self._reward_manager.has_own_verifier
    truth = token_truth(problems, texts, rollouts, self._worker.chat, own_verifier)
    metrics |= {"time/sample": time.perf_counter() - began - scoring_s, "time/reward": scoring_s}
    return Experience(
      rollouts,
      shard_batch(rewards, self._mesh),
      problems,
      texts,
      rewards.correct,
      rewards.scored,
      truth,
      metrics,
      [span._replace(begin=span.begin - began, end=span.end - began) for span in spans],
    )

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
      rollouts = self._with_rescored(params, rollouts)
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

  def _with_rescored(self, params: Params, rollouts: Rollouts) -> Rollouts:
    """Adds the trainer's log-probs. A guide's tokens keep those of the guide."""
    log_probs = jax.block_until_ready(self._rescore(params, self._pack(rollouts)))
    if rollouts.guided is not None:
      log_probs = self._keep_guided(log_probs, rollouts)
    return rollouts.replace(rescored=log_probs)

  def _pack(self, rollouts: Rollouts) -> Rollouts:
    """Adds the packing: which completions share a row in the trainer's forward pass."""
    if not self._config.batch.pack:
      return rollouts
    model = self._worker.model
    shards = axis_size(model.mesh, "position")
    packing = plan_rows(fetch(rollouts.lengths), rollouts.tokens.shape[2], shards)
    return rollouts.replace(packing=packing and shard_batch(packing, model.mesh))

  def _sample_groups(
    self,
    params: Params,
    policy: Policy,
    version: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool],
  ) -> tuple[list[Group], dict[str, float], float]:
    """Samples until there are n groups to train on; those kept from the previous step come first.

    With dynamic sampling (DAPO, 2503.14476), these are groups that contain correct and incorrect
    completions; see `algorithms.has_contrast`. If `max_gen_batches` batches are not enough, other
    groups fill the batch and are masked out of the loss. The metrics of dynamic sampling describe
    everything that was sampled, not only the batch.

    Returns:
      n groups, the metrics, and the seconds spent waiting for scores.
    """
    n = self._n
    dynamic = self._settings.dynamic_sampling
    advances: list[Advance] = []
    pool = self._kept
    chosen = None
    for _ in range(self._config.batch.max_gen_batches if dynamic else 1):
      if self._staleness:
        advance = self._partial.advance(policy, pool, self._drawn, version, stopping)
      else:
        advance = self._sample_whole(params, policy, pool, stopping)
      advances.append(advance)
      self._drawn = advance.begun
      pool = advance.groups
      chosen = advance.chosen
      if chosen is not None:
        break
    sampled = [group for advance in advances for group in advance.completed]
    no_contrast = [group for advance in advances for group in advance.dropped]
    if chosen is None:
      chosen = pool[:n]
    short = n - len(chosen)
    if short:
      say(
        f"dynamic sampling: batch.max_gen_batches = {self._config.batch.max_gen_batches} reached; "
        f"{len(no_contrast)} of {len(sampled)} sampled groups carry no learning signal; "
        f"training on {n - short} of {n} groups in this step"
      )
    taken = {group.index for group in chosen}
    kept = [group for group in pool if group.index not in taken]
    filler = [group.as_filler() for group in no_contrast[len(no_contrast) - short :]]
    batch = chosen + filler
    metrics = combine_metrics([x for advance in advances for x in advance.metrics])
    if dynamic:
      metrics |= sampled_metrics(sampled) if sampled else {}
      metrics |= {
        "groups/sampled": float(len(sampled)),
        "groups/dropped": float(len(no_contrast)),
        "groups/short": float(short),
      }
    metrics |= {
      "groups/kept": float(len(kept)),
      "tokens/sampled": float(sum(advance.tokens for advance in advances)),
    }
    if self._staleness:
      batch = [group.stale_since(version) for group in batch]
      metrics |= staleness_metrics(batch, version) | {
        "groups/unfinished": float(sum(group.rewards is None for group in kept)),
        "tokens/read_again": float(sum(advance.read_again for advance in advances)),
      }
      self._kept = kept
    else:
      self._kept = [group.as_stale() for group in kept]
    return batch, metrics, sum(advance.scoring_s for advance in advances)

  def _sample_whole(
    self, params: Params, policy: Policy, pool: list[Group], stopping: Callable[[], bool]
  ) -> Advance:
    """Samples a generation batch to its end, and adds its groups with contrast to the pool."""
    batch = self._sample_batch(params, policy, stopping)
    completed = split_groups(
      batch.number, batch.problems, fetch(batch.rollouts), batch.scores.rewards, batch.texts
    )
    pool = [*pool, *(group for group in completed if group.has_contrast)]
    return Advance(
      groups=pool,
      chosen=pool[: self._n] if len(pool) >= self._n else None,
      completed=completed,
      dropped=[group for group in completed if not group.has_contrast],
      metrics=[batch.scores.metrics],
      begun=self._drawn,
      tokens=int(sum(group.rollouts.mask.sum() for group in completed)),
      read_again=0,
      scoring_s=batch.scoring_s,
    )

  def leftovers(self) -> dict[str, np.ndarray] | None:
    """Returns the groups kept for the next step, as arrays of fixed shapes for a checkpoint.

    None if no groups are kept.
    """
    if not self._settings.dynamic_sampling and not self._staleness:
      return None
    return save_groups(self._config, self._kept, self._drawn)

  def restore(self, leftovers: dict[str, np.ndarray]) -> None:
    """Restores what `leftovers` returned.

    Raises:
      UserError: it was saved under a config with other shapes.
    """
    problem_at = lambda index: self._batches[index[0]][index[1]]
    decode = self._worker.chat.decode
    self._kept = restore_groups(self._config, leftovers, problem_at, decode)
    self._drawn = int(leftovers["drawn"])
