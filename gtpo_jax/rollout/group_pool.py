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

from gtpo_jax.config import Config
from gtpo_jax.environments.metrics import Tallies
from gtpo_jax.rollout.groups import Group, row_of
from gtpo_jax.rollout.scoring.pending import PendingRewards
from gtpo_jax.rollout.scoring.turn_signals import with_turns
from gtpo_jax.sampling.completion import Completion


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

  Attributes:
    completed: the groups that became complete and were scored, in this order.
    dropped: the groups among them without contrast, with dynamic sampling.
    tallies: the metrics of the rewards, each time that rewards were awaited.
    new_tokens: the number of tokens that were drawn, a guide's included; from `finish`.
    read_again: the number of tokens of earlier steps that have to be read again.
    scoring_s: seconds spent waiting for rewards.
  """

  def __init__(
    self, config: Config, groups: Sequence[Group], pending: PendingRewards, version: int
  ):
    """Args:
    config: the run's config.
    groups: the groups, oldest first. Those without rewards have the policy's completions.
    pending: scores these completions. Groups that it has are not sampled any more.
    version: the number of updates so far.
    """
    self.completed: list[Group] = []
    self.dropped: list[Group] = []
    self.tallies: list[Tallies] = []
    self.scoring_s = 0.0
    self._groups = {group.index: group for group in groups}  # oldest first
    self._pending = pending
    self._version = version
    self._config = config
    self._compares_turns = bool(config.resolved_algorithm.recipe.turns)
    self._dynamic = config.resolved_algorithm.settings.dynamic_sampling
    unscored = [group for group in groups if group.rewards is None]
    own = [x for group in unscored if group.index not in pending for x in group.completions]
    self._missing = dict.fromkeys((group.index for group in unscored), 0)
    for completion in own:
      self._missing[completion.group] += 1
    self.new_tokens = -sum(map(_drawn, own))
    self.read_again = sum(completion.length for completion in own if not completion.ended)
    self._own = own

  @property
  def groups(self) -> list[Group]:
    """The groups, oldest first."""
    return list(self._groups.values())

  @property
  def left(self) -> list[Group]:
    """The groups that may be trained on, oldest first, complete or not."""
    dropped = {group.index for group in self.dropped}
    return [group for group in self.groups if group.index not in dropped]

  def end(self, ended: Sequence[Completion]) -> None:
    """Takes completions that have ended, and starts to score them.

    With staleness, completions are scored when all of their group have ended: otherwise those of
    unfinished groups would be scored again in the next step.
    """
    for completion in ended:
      completion.mark_version(self._version)
      self._missing[completion.group] -= 1
    if self._config.sampling.staleness:
      whole = dict.fromkeys(x.group for x in ended if not self._missing[x.group])
      ended = [completion for index in whole for completion in self._groups[index].completions]
    self._pending.put(ended)

  def unscored(self) -> list[Group]:
    """Returns the groups whose own completions have all ended, but that have no rewards."""
    ended = [self._groups[index] for index, missing in self._missing.items() if not missing]
    return [group for group in ended if group.rewards is None]

  def choose(self, scored: bool = True) -> list[Group] | None:
    """Returns the groups to train on, or None if there are too few.

    Args:
      scored: whether only groups that have rewards are chosen; otherwise those whose completions
        have ended are assumed to have contrast.
    """
    groups = self.left
    ready = {group.index for group in groups if group.rewards is not None}
    if not scored:
      ready |= {group.index for group in self.unscored()}
    chosen = choose(
      [group.version for group in groups],
      [group.index in ready for group in groups],
      self._config.batch.prompts,
      self._version,
      self._config.sampling.staleness,
    )
    return None if chosen is None else [groups[i] for i in chosen]

  def add_guided(self, index: tuple[int, int], guided: Sequence[Completion]) -> None:
    """Adds the guide's completions of a group, and starts to score them."""
    group = self._groups[index]
    own = group.completions
    newest = max((x.versions.max(initial=0) for x in own), default=0)
    for j, completion in enumerate(guided, len(own)):
      completion.group = index
      completion.index = j
      completion.guided = True
      completion.mark_version(newest)
    self._groups[index] = dataclasses.replace(group, completions=[*own, *guided])
    self._pending.put(guided)
    self.new_tokens += sum(completion.length for completion in guided)

  def score(self, groups: Sequence[Group], stopping: Callable[[], bool]) -> None:
    """Waits for the rewards of some groups, which are then complete."""
    began = time.perf_counter()
    result = self._pending.result(stopping, [group.index for group in groups])
    self.scoring_s += time.perf_counter() - began
    t = self._config.sampling.max_tokens
    env_weight = dict(self._config.reward.weighted).get("env", 0.0)
    for k, index in enumerate(group.index for group in groups):
      group = self._groups[index]
      rewards = row_of(result.rewards, k)
      if self._compares_turns:
        total = result.reward[k] + result.penalty[k]
        rewards = with_turns(rewards, total, env_weight, group.mask(t), group.episodes)
      group = dataclasses.replace(group, rewards=rewards)
      self._groups[index] = group
      self.completed.append(group)
      if self._dynamic and not group.has_contrast:
        self.dropped.append(group)
    self.tallies.append(result.tallies)

  def finish(self, old: int) -> list[Group]:
    """Returns the groups that have begun.

    Args:
      old: the number of groups that had begun in earlier rounds and steps.
    """
    for completion in self._own:
      completion.mark_version(self._version)
    self.new_tokens += sum(map(_drawn, self._own))
    # An agent is at work from the beginning of its group.
    begun = {x.group for x in self._own if x.length or self._config.env.agent}
    begun |= {index for index, missing in self._missing.items() if not missing}
    last = max((i for i, index in enumerate(self._groups, 1) if index in begun), default=0)
    for index in list(self._groups)[max(old, last) :]:
      del self._groups[index]
    return self.groups


def _drawn(completion: Completion) -> int:
  """Returns how many tokens of a completion and of its conversations the policy has drawn."""
  return sum(int(x.mask.sum()) for x in (completion, *completion.conversations))
