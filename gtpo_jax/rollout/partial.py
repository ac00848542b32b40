"""Partial rollouts: groups whose completions are sampled over several steps.

A step ends when enough groups are complete. What is unfinished goes on in the next step, under the
policy of that step, so that no slot waits for the longest completion of a batch (Kimi k1.5,
2501.12599; APRIL, 2509.18521). Every token keeps the log-prob, the entropy and the version of the
policy that drew it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.data.pipeline import Batches
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.groups import Group, append_guided, policy_completions, row_of, stack
from gtpo_jax.rollout.keys import KeyStream, key_for
from gtpo_jax.rollout.scoring import EndedCompletion, PendingRewards, RewardManager
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.host_arrays import CompletionBuffer, pad_prompts


class Advance(NamedTuple):
  """What one round of sampling has added to the pool of groups.

  Attributes:
    groups: the groups of the pool, oldest first, complete or not, without those in `dropped`.
    chosen: the groups among them to train on; None if too few have contrast.
    completed: the groups that became complete, `dropped` included.
    dropped: the groups among them without contrast, if dynamic sampling replaces those.
    metrics: of their rewards, one dict for each time that rewards were awaited.
    begun: generation batches sampled so far; with staleness, groups begun so far.
    tokens: the number of tokens drawn, those of a guide included.
    read_again: the number of tokens of earlier steps that were read again.
    scoring_s: seconds spent waiting for rewards.
  """

  groups: list[Group]
  chosen: list[Group] | None
  completed: list[Group]
  dropped: list[Group]
  metrics: list[dict[str, float]]
  begun: int
  tokens: int
  read_again: int
  scoring_s: float


def choose(
  begun: Sequence[int], complete: Sequence[bool], n: int, version: int, staleness: int
) -> list[int] | None:
  """Returns the n groups to train on, or None as long as sampling has to go on.

  The oldest complete groups are chosen. A group must be trained on at most `staleness` updates
  after its first token was drawn. Sampling therefore goes on until the groups that are due are
  complete, and until the rest can be trained on in time, n at each update.

  Args:
    begun: for each group, oldest first, the number of updates when it began.
    complete: whether each group is complete.
    n: groups per update.
    version: the number of updates so far.
    staleness: the bound, in updates.
  """
  chosen = [i for i, is_complete in enumerate(complete) if is_complete][:n]
  if len(chosen) < n:
    return None
  taken = set(chosen)
  left = [first for i, first in enumerate(begun) if i not in taken]
  for ahead in range(staleness):
    if sum(first + staleness <= version + ahead for first in left) > n * ahead:
      return None
  return chosen


class PartialRollouts:
  """Samples the groups of a pool, which has at most `batch.prompts * (1 + staleness)` of them.

  Group k of a run is row k % n of generation batch k // n, with n = `batch.prompts`. Its problem
  and its PRNG keys are those of that row in a run without staleness.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    reward_manager: RewardManager,
    frozen: FrozenPolicies,
    batches: Batches,
  ):
    """Args:
    config: the run's config.
    worker: samples completions.
    reward_manager: scores them.
    frozen: the guide, if there is one.
    batches: the problems.
    """
    self._config = config
    self._worker = worker
    self._reward_manager = reward_manager
    self._frozen = frozen
    self._batches = batches
    self._n = config.batch.prompts

  def advance(
    self,
    policy: Policy,
    groups: Sequence[Group],
    begun: int,
    version: int,
    stopping: Callable[[], bool],
  ) -> Advance:
    """Samples until `choose` finds a batch, or until all groups are complete.

    New groups begin after those of the pool, as slots become free. With dynamic sampling, rewards
    are awaited once there would be a batch if all groups without rewards had contrast.

    Args:
      policy: the policy to sample from.
      groups: the groups of the pool, oldest first.
      begun: the number of groups that the run has begun.
      version: the number of updates so far.
      stopping: called after each chunk of tokens; True ends sampling.

    Raises:
      Stopped: `stopping` returned True.
    """
    config = self._config
    new = range(begun, begun + config.pool_size - len(groups))
    rows = [*groups, *(self._new_group(number, version) for number in new)]
    work = _Work(config, self._worker, self._reward_manager, policy.engine, rows)
    keys = self._keys(policy.engine, KeyStream.SAMPLE, rows, config.policy_completions)
    stream = policy.engine.resume(
      policy.params, work.prompts, keys, work.buffer, sampling_params=config.sampling_params
    )
    metrics = []
    tokens = 0
    scoring_s = 0.0
    sampling = True
    while True:
      if not sampling or work.choose(version, scored=False):
        if unscored := work.unscored():
          tokens += self._sample_guide(work, unscored)
          began = time.perf_counter()
          metrics.append(work.score(unscored, version, stopping))
          scoring_s += time.perf_counter() - began
        chosen = work.choose(version, scored=True)
        if not sampling or chosen:
          break
      ended = next(stream, None)
      sampling = ended is not None
      work.end(ended or [])
      if stopping():
        raise Stopped
    stream.close()
    work.keep_tokens(version)
    used = work.count_begun(len(groups))
    pool = [i for i in range(used) if i not in work.dropped]
    pick = lambda indices: [work.rows[i] for i in indices]
    return Advance(
      pick(pool),
      None if chosen is None else pick(chosen),
      pick(work.completed),
      pick(work.dropped),
      metrics,
      begun + used - len(groups),
      tokens + work.new_tokens,
      work.read_again,
      scoring_s,
    )

  def _new_group(self, number: int, version: int) -> Group:
    """Returns group `number` of the run, without tokens."""
    config = self._config
    batch, row = divmod(number, self._n)
    problem = self._batches[batch][row]
    pad = self._worker.chat.pad
    prompts = pad_prompts([self._worker.encode(problem)], config.data.max_prompt_tokens, pad)
    empty = CompletionBuffer.empty(1, config.policy_completions, config.sampling.max_tokens, pad)
    rollouts = Rollouts(
      prompts, empty.tokens, empty.mask, empty.log_probs, empty.entropy, empty.finished
    )
    rollouts = rollouts.replace(
      versions=np.zeros_like(empty.tokens),
      drawn=empty.drawn_log_probs if config.needs_drawn_log_probs else None,
    )
    return Group((batch, row), problem, row_of(rollouts, 0), None, [], version)

  def _keys(
    self, engine: Engine, stream: KeyStream, rows: Sequence[Group], group: int
  ) -> np.ndarray:
    """Returns the PRNG key data u32[rows, group, 2] of the rows' completions."""
    seed = self._config.seed
    of_batch = {
      batch: engine.completion_keys(key_for(seed, stream, batch), self._n, group)
      for batch in {row.index[0] for row in rows}
    }
    return np.stack([of_batch[batch][row] for batch, row in (group.index for group in rows)])

  def _sample_guide(self, work: _Work, indices: Sequence[int]) -> int:
    """Samples the guide's completions of some rows, n at a time; returns the number of tokens."""
    if not self._frozen.guide:
      return 0
    engine, params = self._frozen.guide
    config = self._config
    count = config.resolved_algorithm.settings.guide_completions
    tokens = 0
    for start in range(0, len(indices), self._n):
      part = indices[start : start + self._n]
      padded = [*part, *part[-1:] * (self._n - len(part))]
      keys = self._keys(engine, KeyStream.GUIDE, [work.rows[i] for i in padded], count)
      prompts = [work.prompts[i] for i in padded]
      buffer = CompletionBuffer.empty(self._n, count, engine.max_tokens, engine.pad)
      buffer.finished[len(part) :] = True  # the padding is not sampled
      for _ in engine.resume(params, prompts, keys, buffer, sampling_params=config.sampling_params):
        pass
      guided = engine.rollouts(buffer, prompts)
      for row, i in enumerate(part):
        work.add_guided(i, row_of(guided, row))
      tokens += int(buffer.mask.sum())
    return tokens


class _Work:
  """The rows that one call of `advance` samples: groups, their common buffer and their rewards.

  Attributes:
    rows: the groups. They get the new tokens from `score` or `keep_tokens`.
    prompts: their prompts as token ids.
    buffer: the policy's completions [rows, g, ...].
    completed: the rows that became complete and were scored.
    dropped: those among them without contrast, with dynamic sampling.
    read_again: the number of tokens of earlier steps that have to be read again.
  """

  def __init__(
    self,
    config: Config,
    worker: RolloutWorker,
    reward_manager: RewardManager,
    engine: Engine,
    rows: list[Group],
  ):
    self.rows = rows
    self.completed: list[int] = []
    self.dropped: list[int] = []
    self._n = config.batch.prompts
    self._own = config.policy_completions
    self._staleness = config.sampling.staleness
    self._dynamic = config.resolved_algorithm.settings.dynamic_sampling
    self._guided: dict[int, Rollouts] = {}
    sampled = stack([policy_completions(row.rollouts, self._own) for row in rows])
    lengths = sampled.prompts.lengths
    self.prompts = [
      tokens[-length:].tolist()
      for tokens, length in zip(sampled.prompts.tokens, lengths, strict=True)
    ]
    zeros = np.zeros_like(sampled.log_probs)
    self.buffer = CompletionBuffer(
      sampled.tokens,
      sampled.mask,
      sampled.log_probs,
      sampled.entropy,
      zeros if sampled.drawn is None else sampled.drawn,
      zeros.copy(),
      sampled.finished,
    )
    self._before = sampled.mask.copy()
    problems = [row.problem for row in rows]
    self._pending = PendingRewards(reward_manager, problems, config.batch.group, worker.chat.decode)
    going_on = ~engine.ended(lengths, self.buffer)
    self._missing = going_on.sum(1)
    self.read_again = int(self._before.sum(-1)[going_on].sum())
    for i in self.unscored():  # those without space for a completion in the model's context
      self._put_own(i)

  @property
  def new_tokens(self) -> int:
    """The number of tokens that the policy has drawn."""
    return int((self.buffer.mask & ~self._before).sum())

  def end(self, completions: Sequence[tuple[int, int]]) -> None:
    """Takes the (row, index) of completions that have ended; complete rows are being scored."""
    for i, _ in completions:
      self._missing[i] -= 1
      if not self._missing[i]:
        self._put_own(i)

  def unscored(self) -> list[int]:
    """Returns the rows whose own completions have all ended, but that have no rewards yet."""
    ended = np.flatnonzero(self._missing == 0).tolist()
    return [i for i in ended if self.rows[i].rewards is None]

  def choose(self, version: int, scored: bool) -> list[int] | None:
    """Returns the rows to train on; with `scored`, only rows that have rewards are chosen."""
    left = [i for i in range(len(self.rows)) if i not in self.dropped]
    ready = [self.rows[i].rewards is not None or not (scored or self._missing[i]) for i in left]
    begun = [self.rows[i].begun for i in left]
    chosen = choose(begun, ready, self._n, version, self._staleness)
    return None if chosen is None else [left[i] for i in chosen]

  def add_guided(self, i: int, guided: Rollouts) -> None:
    """Adds the guide's completions of row i, and starts scoring them."""
    self._guided[i] = guided
    self._put(i, guided.tokens, guided.mask, guided.finished, self._own)

  def score(
    self, indices: list[int], version: int, stopping: Callable[[], bool]
  ) -> dict[str, float]:
    """Waits for the rewards of some rows, which are then complete; returns their metrics."""
    result = self._pending.result(stopping, indices)
    for k, i in enumerate(indices):
      row = self._with_tokens(i, version)
      if i in self._guided:
        joined = append_guided(row.rollouts, self._guided[i], axis=0)
        row = dataclasses.replace(row, rollouts=joined)
      self.rows[i] = dataclasses.replace(
        row, rewards=row_of(result.rewards, k), texts=self._pending.texts[i]
      )
      if self._dynamic and not self.rows[i].has_contrast:
        self.dropped.append(i)
    self.completed += indices
    return result.metrics

  def keep_tokens(self, version: int) -> None:
    """Gives the rows that are not complete the tokens they have so far."""
    for i, row in enumerate(self.rows):
      if row.rewards is None:
        self.rows[i] = self._with_tokens(i, version)

  def count_begun(self, old: int) -> int:
    """Returns the number of rows up to the last one that has begun, at least `old`."""
    begun = np.flatnonzero(self.buffer.mask.any((1, 2)) | (self._missing == 0))
    return max(int(begun.max(initial=-1)) + 1, old)

  def _with_tokens(self, i: int, version: int) -> Group:
    """Returns row i with the tokens it has so far."""
    buffer = self.buffer
    old = self.rows[i].rollouts
    is_new = buffer.mask[i] & ~self._before[i]
    rollouts = old.replace(
      tokens=buffer.tokens[i],
      mask=buffer.mask[i],
      log_probs=buffer.log_probs[i],
      entropy=buffer.entropy[i],
      finished=buffer.finished[i],
      versions=np.where(is_new, version, old.versions).astype(np.int32),
      drawn=None if old.drawn is None else buffer.drawn_log_probs[i],
    )
    return dataclasses.replace(self.rows[i], rollouts=rollouts)

  def _put_own(self, i: int) -> None:
    """Starts scoring the policy's completions of row i."""
    buffer = self.buffer
    self._put(i, buffer.tokens[i], buffer.mask[i], buffer.finished[i], 0)

  def _put(
    self, i: int, tokens: np.ndarray, mask: np.ndarray, finished: np.ndarray, first: int
  ) -> None:
    self._pending.put(
      [
        EndedCompletion(i, first + j, tokens[j, mask[j]], bool(finished[j]))
        for j in range(len(finished))
      ]
    )
