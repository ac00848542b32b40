"""What the collector does with the turns of completions: nothing, or playing episodes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.environments.runner import EpisodeRunner
from gtpo_jax.environments.turns import Episode
from gtpo_jax.rollout.episodes.driver import EpisodeDriver, Key, Start
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.sampling.buffer import CompletionBuffer, Pair


class Turns:
  """What happens to completions before they are sampled, after their turns, and in the end.

  Here they have one turn each, and nothing answers it.

  Attributes:
    driver: joins further turns; None if there are none.
  """

  driver: EpisodeDriver | None = None

  def __init__(self, worker: RolloutWorker):
    """Args:
    worker: encodes prompts.
    """
    self._worker = worker

  def open(
    self, groups: Sequence[Group], version: int, stopping: Callable[[], bool]
  ) -> list[Group]:
    """Prepares the groups without rewards, and returns all of them.

    Raises:
      Stopped: `stopping` returned True.
    """
    return list(groups)

  def encode(self, group: Group) -> list[int]:
    """Returns the prompt of a group."""
    return self._worker.encode(group.problem)

  def attach(self, buffer: CompletionBuffer, groups: Sequence[Group]) -> None:
    """Takes the buffer whose rows are those of `groups`."""

  def advance(self, turned: Sequence[Pair]) -> Sequence[Pair]:
    """Takes the completions whose turns have ended; returns those that have ended."""
    return turned

  def settle(self, stopping: Callable[[], bool]) -> Sequence[Pair]:
    """Waits until no completion waits for an answer; returns those that have ended."""
    return ()

  def episode(self, row: int, index: int) -> Episode | None:
    """Returns the episode of a completion that has ended, on the first process."""
    return None

  def finish(self, groups: Sequence[Group]) -> list[Group]:
    """Forgets everything but the groups without rewards; returns `groups` as they are saved."""
    return list(groups)

  def reset(self) -> None:
    """Forgets everything. What `finish` has returned can be opened again."""

  def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics since the last call, given the other metrics of the step."""
    return {}


class EpisodeTurns(Turns):
  """Completions whose turns are answered by environments; see `Turns`.

  A group is open in the runner from its first turn until it has rewards. A step may end in between;
  then the group has a snapshot, from which its environments can be made again.
  """

  def __init__(self, worker: RolloutWorker, driver: EpisodeDriver, seed: int):
    """Args:
    worker: encodes prompts.
    driver: connects its runner with what samples.
    seed: the run's seed.
    """
    super().__init__(worker)
    self._seed = seed
    self.driver = driver
    self._added: dict[Key, Any] = {}  # what the environments of each open group add to its prompt

  def open(
    self, groups: Sequence[Group], version: int, stopping: Callable[[], bool]
  ) -> list[Group]:
    """Begins the episodes of new groups, and resumes others that are not open any more.

    A group whose environments do not repeat what they did begins again.
    """
    closed = [group for group in groups if group.rewards is None and group.index not in self._added]
    saved = [group for group in closed if group.rollouts is None or group.snapshot]
    self._open(saved, stopping)
    lost = {group.index for group in closed if self._added.get(group.index) is None}
    new = {
      group.index: Group(group.index, group.problem, None, None, [], version)
      for group in closed
      if group.index in lost
    }
    self._open(list(new.values()), stopping)
    return [new.get(group.index, group) for group in groups]

  def _open(self, groups: Sequence[Group], stopping: Callable[[], bool]) -> None:
    starts = [
      Start(
        group.index, group.problem, episode_seed(self._seed, group.index), group.snapshot or None
      )
      for group in groups
    ]
    self._added |= {start.key: None for start in starts}
    if starts:
      self._added |= self.driver.open(starts, stopping)

  def encode(self, group: Group) -> list[int]:
    """Returns the prompt of a group, with what its environments have added."""
    if group.rollouts is None:
      return self.driver.prompt(self._worker, group.problem, self._added[group.index])
    prompt = group.rollouts.prompts
    return prompt.tokens[len(prompt.tokens) - int(prompt.lengths) :].tolist()

  def attach(self, buffer: CompletionBuffer, groups: Sequence[Group]) -> None:
    """Takes the buffer whose rows are those of `groups`."""
    self.driver.attach(buffer, [group.index for group in groups])

  def advance(self, turned: Sequence[Pair]) -> Sequence[Pair]:
    """Lets environments answer turns; see `EpisodeDriver.advance`."""
    return self.driver.advance(turned)

  def settle(self, stopping: Callable[[], bool]) -> Sequence[Pair]:
    """Waits until no completion waits for an answer; returns those that have ended."""
    return self.driver.settle(stopping)

  def episode(self, row: int, index: int) -> Episode | None:
    """Returns the episode of a completion that has ended, on the first process."""
    return self.driver.episode(row, index)

  def finish(self, groups: Sequence[Group]) -> list[Group]:
    """Adds snapshots to the groups without rewards, and discards all others."""
    left = [group.index for group in groups if group.rewards is None]
    self._discard(self._added.keys() - set(left))
    snapshots = dict(zip(left, self.driver.snapshots(left), strict=True))
    return [dataclasses.replace(group, snapshot=snapshots.get(group.index, "")) for group in groups]

  def reset(self) -> None:
    """Discards all groups."""
    self._discard(set(self._added))

  def _discard(self, keys: set[Key]) -> None:
    self.driver.discard(sorted(keys))
    for key in keys:
      del self._added[key]

  def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of the time in which everything waited, and the tokens read again."""
    driver = self.driver
    idle_s, driver.idle_s = driver.idle_s, 0.0
    read_again, driver.read_again = driver.read_again, 0
    return {
      "env/idle_share": idle_s / metrics["time/sample"],
      "tokens/read_again": read_again + metrics.get("tokens/read_again", 0.0),
    }


def make_turns(worker: RolloutWorker, size: int, seed: int) -> Turns:
  """Returns what answers the turns of a worker's completions.

  Args:
    worker: encodes prompts; has the runner if there is one.
    size: completions of a group.
    seed: the run's seed.
  """
  if not worker.runner:
    return Turns(worker)
  if isinstance(worker.runner, EpisodeRunner):
    return EpisodeTurns(worker, EpisodeDriver(worker.runner, size), seed)
  from gtpo_jax.rollout.agents.driver import AgentDriver  # needs optional packages

  return EpisodeTurns(worker, AgentDriver(worker, size), seed)


def episode_seed(seed: int, key: Key) -> int:
  """Returns the seed of the environments of a group, from 0 to 2**31 - 1."""
  digest = hashlib.blake2b(f"{seed}/{key[0]}/{key[1]}".encode(), digest_size=4).digest()
  return int.from_bytes(digest, "little") >> 1
