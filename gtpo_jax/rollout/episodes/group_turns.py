"""The turns of completions: each has one, or it is an episode."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gtpo_jax.environments.episodes import Added, Episodes, saved_writers
from gtpo_jax.environments.writers import Recorded
from gtpo_jax.rollout.episodes.turn_queue import POLL_S, TurnQueue
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.completion import Completion
from gtpo_jax.sampling.settings import SamplingParams

Key = tuple[int, int]  # the index of a group


class Turns:
  """The turns of the completions of a batch. Without episodes, a completion is one turn.

  A group's episodes are played from its first turn until it has rewards. A step may end in between;
  then the group has a snapshot, from which they can be played again.
  """

  def __init__(self, worker: RolloutWorker, size: int, seed: int = 0):
    """Args:
    worker: encodes prompts, and has the episodes if there are any.
    size: completions of a group.
    seed: the run's seed.
    """
    self._worker = worker
    self._episodes = worker.episodes
    self._size = size
    self._seed = seed
    self._added: dict[Key, Added | None] = {}  # of each open group, what is added to its prompt
    self._queues: list[TurnQueue] = []  # since the last metrics

  def open(
    self, groups: Sequence[Group], version: int, stopping: Callable[[], bool]
  ) -> list[Group]:
    """Begins the episodes of new groups, and resumes others that are not played any more.

    A group whose environments do not repeat what they did begins again.

    Raises:
      Stopped: `stopping`, which is called about twice a second, returned True.
    """
    if not self._episodes:
      return list(groups)
    closed = [group for group in groups if group.rewards is None and group.index not in self._added]
    self._begin([x for x in closed if not x.completions or x.snapshot], stopping)
    new = {
      group.index: Group(group.index, group.problem, version)
      for group in closed
      if self._added.get(group.index) is None
    }
    self._begin(list(new.values()), stopping)
    return [new.get(group.index, group) for group in groups]

  def encode(self, group: Group) -> list[int]:
    """Returns the prompt of a group, with what its environments have added."""
    if group.completions and self._episodes:
      return list(group.completions[0].prompt.tokens)
    if self._episodes and self._episodes.rules.start:
      return list(self._episodes.rules.start)
    return self._worker.encode(group.problem, self._added.get(group.index, ""))

  def generate(
    self,
    policy: Policy,
    rows: Sequence[Sequence[Completion]],
    sampling_params: SamplingParams,
    stopping: Callable[[], bool],
    prompts_at_once: int | None = None,
  ) -> Iterator[list[Completion]]:
    """Samples the completions of open groups to their ends, and yields those that have ended.

    After this has yielded, the caller may stop iterating.

    Raises:
      Stopped: `stopping`, which all processes call after each chunk of tokens, returned True.
    """
    session = policy.engine.session(
      policy.params, rows, sampling_params, prompts_at_once=prompts_at_once
    )
    queue = TurnQueue(self._episodes, self._worker.chat, session, rows)
    self._queues.append(queue)
    with jax.profiler.TraceAnnotation("sample"):
      while queue.busy:
        yield queue.step()
        if stopping():
          raise Stopped

  def settle(self, stopping: Callable[[], bool]) -> list[Completion]:
    """Waits until no completion waits for its episode; see `TurnQueue.settle`."""
    return self._queues[-1].settle(stopping)

  def finish(self, groups: Sequence[Group]) -> list[Group]:
    """Adds snapshots to the groups without rewards, and discards all others."""
    if not self._episodes:
      return list(groups)
    left = [group.index for group in groups if group.rewards is None]
    self.discard(self._added.keys() - set(left))
    make = lambda: [json.dumps(self._episodes.snapshot(key)) for key in left]
    snapshots = dict(zip(left, broadcast_from_first(make) if left else [], strict=True))
    return [dataclasses.replace(group, snapshot=snapshots.get(group.index, "")) for group in groups]

  def discard(self, keys: Iterable[Key] | None = None) -> None:
    """Forgets groups, by default all. What `finish` has returned can be opened again."""
    for key in sorted(self._added if keys is None else keys):
      del self._added[key]
      if is_first_process():
        self._episodes.discard(key)

  def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of the time in which everything waited, and the tokens read again.

    Args:
      metrics: the other metrics of the step.
    """
    queues, self._queues = self._queues, []
    if not self._episodes:
      return {}
    read_again = sum(queue.read_again for queue in queues)
    return {
      "env/idle_share": sum(queue.idle_s for queue in queues) / metrics["time/sample"],
      "tokens/read_again": read_again + metrics.get("tokens/read_again", 0.0),
    }

  def _begin(self, groups: Sequence[Group], stopping: Callable[[], bool]) -> None:
    """Begins or resumes episodes, and waits until all can be sampled or have to begin again."""
    if is_first_process():
      for group in groups:
        saved = saved_writers(json.loads(group.snapshot)) if group.snapshot else None
        writers = saved or [Recorded() for _ in range(self._size)]
        seed = episode_seed(self._seed, group.index)
        self._episodes.begin(group.index, group.problem.row, seed, writers)
    missing = {group.index for group in groups}
    self._added |= dict.fromkeys(missing)
    while missing:
      for key, added, reason in broadcast_from_first(lambda: _opened(self._episodes)):
        missing.remove(tuple(key))
        self._added[tuple(key)] = added
        if reason and is_first_process():
          print(f"gtpo: {reason}; the episodes of a prompt begin again", flush=True)
      if missing and stopping():
        raise Stopped


def _opened(episodes: Episodes) -> list[list[Any]]:
  """Returns what `Episodes.opened` does, as plain values, or [] after a while."""
  opened = episodes.opened()
  if not opened:
    episodes.wait(POLL_S)
    opened = episodes.opened()
  plain = lambda x: x if x is None or isinstance(x, str) else list(map(dict, x))
  return [[list(key), plain(added), reason] for key, added, reason in opened]


def episode_seed(seed: int, key: Key) -> int:
  """Returns the seed of the environments of a group, from 0 to 2**31 - 1."""
  digest = hashlib.blake2b(f"{seed}/{key[0]}/{key[1]}".encode(), digest_size=4).digest()
  return int.from_bytes(digest, "little") >> 1
