"""The groups that a step samples and scores, until it has chosen the batch to train on.

Without dynamic sampling and staleness, these are the n groups of the batch. With
`sampling.staleness`, a step ends when enough groups are complete. The others continue in the next
step, under its policy, so that no slot waits for the longest completion of a batch (Kimi k1.5,
2501.12599; APRIL, 2509.18521). Every token keeps the log-prob, the entropy and the version of the
policy that drew it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from gtpo_jax.arrays import Rollouts
from gtpo_jax.config import Config
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.environments.turns import Episode
from gtpo_jax.rollout.groups import EndedCompletion, Group, append_guided, row_of
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.scoring.turn_signals import with_turns
from gtpo_jax.sampling.buffer import CompletionBuffer
from gtpo_jax.sampling.engine import Engine


def choose(
  begun: Sequence[int], complete: Sequence[bool], n: int, version: int, staleness: int
) -> list[int] | None:
  """Returns the n groups to train on, or None as long as sampling must continue.

  The oldest complete groups are chosen. A group must be trained on at most `staleness` updates
  after its first token was drawn. Sampling therefore continues until the groups that are due are
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


class GroupPool:
  """The groups of one round of sampling: first from earlier rounds and steps, then new ones.

  Row r of the buffer has the completions of the r-th group without rewards. The groups get its
  tokens when they are scored, and from `finish`.

  Attributes:
    groups: the groups, oldest first.
    buffer: the policy's completions [rows, g, ...] of the groups without rewards.
    completed: the groups that became complete and were scored, in this order.
    dropped: the groups among them without contrast, with dynamic sampling.
    tallies: the metrics of the rewards, each time that rewards were awaited.
    new_tokens: the number of tokens that were drawn, a guide's included; from `finish`.
    read_again: the number of tokens of earlier steps that have to be read again.
    scoring_s: seconds spent waiting for rewards.
  """

  def __init__(
    self,
    config: Config,
    groups: Sequence[Group],
    engine: Engine,
    buffer: CompletionBuffer,
    pending: PendingRewards,
    version: int,
    episode: Callable[[int, int], Episode | None],
  ):
    """Args:
    config: the run's config.
    groups: the groups, oldest first.
    engine: the policy's.
    buffer: an empty row for each group without rewards.
    pending: scores the completions of these rows.
    version: the number of updates so far.
    episode: returns the episode of a completion of the buffer that has ended, if it has one.
    """
    self.groups = list(groups)
    self.buffer = buffer
    self.completed: list[Group] = []
    self.dropped: list[Group] = []
    self.tallies: list[Tallies] = []
    self.new_tokens = 0
    self.scoring_s = 0.0
    self._pending = pending
    self._version = version
    self._episode = episode
    self._n = config.batch.prompts
    self._own = config.policy_completions
    self._staleness = config.sampling.staleness
    self._compares_turns = bool(config.resolved_algorithm.recipe.turns)
    self._env_weight = dict(config.reward.weighted).get("env", 0.0)
    self._dynamic = config.resolved_algorithm.settings.dynamic_sampling
    self._guided: dict[int, Rollouts] = {}
    self._index = [i for i, group in enumerate(groups) if group.rewards is None]
    self._missing = np.full(len(self._index), self._own)
    self._versions = np.zeros_like(buffer.tokens) if self._staleness else None
    for row, i in enumerate(self._index):
      if (begun := groups[i].rollouts) is not None:
        buffer.restore(row, begun)
        self._versions[row] = begun.versions
    self._before = buffer.mask.copy()
    self._rollouts = engine.rollouts(buffer)  # the same arrays, into which the engine writes
    if config.needs_drawn_log_probs:
      self._rollouts = self._rollouts.replace(drawn_log_probs=buffer.drawn_log_probs)
    self.read_again = int(buffer.lengths[~buffer.ended()].sum())

  @property
  def left(self) -> list[Group]:
    """The groups that may be trained on, oldest first, complete or not."""
    dropped = {group.index for group in self.dropped}
    return [group for group in self.groups if group.index not in dropped]

  def end(self, ended: Sequence[tuple[int, int]]) -> None:
    """Takes the (row, index) of completions that have ended, and starts to score them.

    With staleness, completions are scored when all of their group have ended: otherwise those of
    unfinished groups would be scored again in the next step.
    """
    for row, _ in ended:
      self._missing[row] -= 1
    if self._staleness:
      rows = [row for row in dict.fromkeys(row for row, _ in ended) if not self._missing[row]]
      ended = [(row, j) for row in rows for j in range(self._own)]
    of = EndedCompletion.of
    self._pending.put(
      [of(self.buffer, i, j, problem=i, episode=self._episode(i, j)) for i, j in ended]
    )

  def unscored(self) -> dict[int, Group]:
    """Returns the groups whose own completions have all ended, but that have no rewards, by row."""
    ended = np.flatnonzero(self._missing == 0).tolist()
    groups = {row: self.groups[self._index[row]] for row in ended}
    return {row: group for row, group in groups.items() if group.rewards is None}

  def choose(self, scored: bool = True) -> list[Group] | None:
    """Returns the groups to train on, or None if there are too few.

    Args:
      scored: whether only groups that have rewards are chosen; otherwise those whose completions
        have ended are assumed to have contrast.
    """
    groups = self.left
    ready = {group.index for group in groups if group.rewards is not None}
    if not scored:
      ready |= {group.index for group in self.unscored().values()}
    chosen = choose(
      [group.version for group in groups],
      [group.index in ready for group in groups],
      self._n,
      self._version,
      self._staleness,
    )
    return None if chosen is None else [groups[i] for i in chosen]

  def add_guided(self, rows: Sequence[int], buffer: CompletionBuffer, guided: Rollouts) -> None:
    """Adds the guide's completions of some rows, and starts to score them.

    Args:
      rows: the rows.
      buffer: the completions, a row for each of `rows`.
      guided: the same as rollouts.
    """
    for k, row in enumerate(rows):
      self._guided[row] = row_of(guided, k)
    of = EndedCompletion.of
    guides = list(np.ndindex(buffer.finished.shape))
    self._pending.put([of(buffer, i, j, problem=rows[i], first=self._own) for i, j in guides])
    self.new_tokens += int(buffer.mask.sum())

  def score(self, rows: list[int], stopping: Callable[[], bool]) -> None:
    """Waits for the rewards of some rows, whose groups are then complete.

    Raises:
      Stopped: `stopping` returned True.
    """
    began = time.perf_counter()
    result = self._pending.result(stopping, rows)
    self.scoring_s += time.perf_counter() - began
    for k, row in enumerate(rows):
      i = self._index[row]
      group = self._with_tokens(row)
      if row in self._guided:
        joined = append_guided(group.rollouts, self._guided[row])
        group = dataclasses.replace(group, rollouts=joined)
      episodes = self._pending.episodes[row] if self._pending.episodes else None
      rewards = row_of(result.rewards, k)
      if self._compares_turns:
        total = result.reward[k] + result.penalty[k]
        rewards = with_turns(rewards, total, self._env_weight, group.rollouts.mask, episodes)
      group = dataclasses.replace(
        group, rewards=rewards, texts=self._pending.texts[row], episodes=episodes
      )
      self.groups[i] = group
      self.completed.append(group)
      if self._dynamic and not group.has_contrast:
        self.dropped.append(group)
    self.tallies.append(result.tallies)

  def finish(self, old: int) -> None:
    """Gives the groups that are not complete their tokens, and removes groups that have not begun.

    Args:
      old: the number of groups that had begun in earlier rounds and steps.
    """
    for row, i in enumerate(self._index):
      if self.groups[i].rewards is None:
        self.groups[i] = self._with_tokens(row)
    self.new_tokens += int((self.buffer.mask & ~self._before).sum())
    begun = np.flatnonzero(self.buffer.present.any((1, 2)) | (self._missing == 0))
    del self.groups[max(old, self._index[begun[-1]] + 1 if begun.size else 0) :]

  def _with_tokens(self, row: int) -> Group:
    """Returns the group of a row with the tokens it has so far."""
    rollouts = row_of(self._rollouts, row)
    if self.buffer.begins is not None:
      rollouts = rollouts.replace(begins=self.buffer.begins[row])
    if self._versions is not None:
      is_new = self.buffer.mask[row] & ~self._before[row]
      versions = np.where(is_new, np.int32(self._version), self._versions[row])
      rollouts = rollouts.replace(versions=versions)
    return dataclasses.replace(self.groups[self._index[row]], rollouts=rollouts)
