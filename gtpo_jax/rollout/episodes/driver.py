"""Connects the environments of episodes with the completions that the engine samples.

An `EpisodeRunner` is told when turns end, and answers with tokens to append, or with the end of an
episode. The next turn is a request of its own; other completions are sampled meanwhile. With
several processes, only the first one has environments. After each chunk it sends what they have
answered to the others, so that all of them continue in the same way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.environments.runner import EpisodeRunner
from gtpo_jax.environments.turns import Differs, Ended, Episode, Message, Observed, Opened
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.buffer import CompletionBuffer, Pair
from gtpo_jax.sampling.engine import Sampling
from gtpo_jax.sampling.session import Request

if TYPE_CHECKING:
  from gtpo_jax.rollout.worker import RolloutWorker

# Turns that have just ended wait so long for the next of their answers before other completions are
# sampled. Without it, a tool that takes no time would delay its turn by a chunk of tokens.
GRACE_S = 0.003
POLL_S = 0.5  # between two checks for a stop request while everything waits for environments

Key = tuple[int, int]  # names a group for the runner


class Start(NamedTuple):
  """A group whose episodes begin, or go on after a resume.

  Attributes:
    key: names the group.
    problem: what the environments are reset with.
    seed: the same.
    snapshot: what it has had before, from `EpisodeDriver.snapshots`; None if it begins.
  """

  key: Key
  problem: Problem
  seed: int
  snapshot: str | None = None


class EpisodeDriver:
  """The episodes of the completions of one buffer.

  Attributes:
    idle_s: seconds in which no completion was sampled because all waited for their environments.
    read_again: the number of tokens of completions that were read again after a turn.
    sampling: gets the next turns of completions.
  """

  sampling: Sampling

  def __init__(self, runner: EpisodeRunner, size: int):
    """Args:
    runner: runs the episodes; used on the first process only.
    size: completions of a group.
    """
    self.idle_s = 0.0
    self.read_again = 0
    self._runner = runner
    self._size = size
    self._playing: set[Pair] = set()  # completions whose episodes have not ended
    self._asked: set[Pair] = set()  # those of them whose turns wait for an answer

  def open(
    self, starts: Sequence[Start], stopping: Callable[[], bool]
  ) -> dict[Key, str | list[Message] | None]:
    """Begins the episodes of groups, and waits for their environments.

    Returns:
      What the environments of each group add to its prompt; None if those of a resumed group did
      not repeat what they did before, so that it must begin again.

    Raises:
      Stopped: `stopping`, which is called about twice a second, returned True.
    """
    if is_first_process():
      for start in starts:
        row = start.problem.row
        if start.snapshot is None:
          self._runner.begin(start.key, row, start.seed, self._size)
        else:
          self._runner.restore(start.key, row, start.seed, json.loads(start.snapshot))
    added: dict[Key, Any] = {}
    while len(added) < len(starts):
      for key, value, reason in broadcast_from_first(self._opened):
        added[tuple(key)] = value
        if reason and is_first_process():
          print(f"gtpo: {reason}; the episodes of a prompt begin again", flush=True)
      if len(added) < len(starts) and stopping():
        raise Stopped
    return added

  def prompt(self, worker: RolloutWorker, problem: Problem, added: Any) -> list[int]:
    """Returns the prompt of a group, given what `open` has returned for it."""
    return worker.encode(problem, added)

  @property
  def waiting(self) -> bool:
    """Whether any turn waits for an answer."""
    return bool(self._asked)

  def attach(self, buffer: CompletionBuffer, keys: Sequence[Key]) -> None:
    """Takes the buffer whose rows have the completions of the groups `keys`, which are open."""
    self._buffer = buffer
    self._keys = list(keys)
    self._rows = {key: row for row, key in enumerate(keys)}
    self._asked = set()
    playing = broadcast_from_first(
      lambda: [[episode is None for episode in self._runner.episodes(key)] for key in keys]
    )
    playing = np.asarray(playing, bool).reshape(buffer.finished.shape)
    self._playing = {(i, j) for i, j in np.argwhere(playing).tolist()}
    buffer.limits[~playing & ~buffer.ended()] = 0  # their environments failed before a first turn

  def advance(self, turned: Sequence[Pair]) -> list[Pair]:
    """Passes turns that have ended on, and takes what environments have answered.

    If no completion can be sampled, it waits for an answer, about half a second at most.

    Args:
      turned: what `Sampling.step` has returned.

    Returns:
      The completions that have ended.
    """
    ended = [pair for pair in turned if pair not in self._playing]
    new = [pair for pair in turned if pair in self._playing and pair not in self._asked]
    self._asked.update(new)
    self._keep(new)
    if not self._asked:
      return ended
    idle = len(self._asked) == len(self._playing)
    began = time.perf_counter()
    ended += self._take(lambda: self._answers(new, idle))
    if idle:
      self.idle_s += time.perf_counter() - began
    return ended

  def settle(self, stopping: Callable[[], bool]) -> list[Pair]:
    """Waits for the answers to all turns that have ended; returns the completions that have ended.

    Raises:
      Stopped: `stopping`, which is called about twice a second, returned True.
    """
    ended: list[Pair] = []
    while self._asked:
      ended += self._take(lambda: self._answers([], True))
      if self._asked and stopping():
        raise Stopped
    return ended

  def episode(self, row: int, index: int) -> Episode | None:
    """Returns the episode of a completion that has ended; None on other processes."""
    return self._runner.episodes(self._keys[row])[index] if is_first_process() else None

  def snapshots(self, keys: Sequence[Key]) -> list[str]:
    """Returns what `open` needs to resume groups, as JSON texts. All must be settled."""
    make = lambda: [json.dumps(self._runner.snapshot(key)) for key in keys]
    return broadcast_from_first(make) if keys else []

  def discard(self, keys: Sequence[Key]) -> None:
    """Forgets groups, and closes their environments."""
    if is_first_process():
      for key in keys:
        self._runner.discard(key)

  def _keep(self, turned: Sequence[Pair]) -> None:
    """Takes turns that have ended, on every process."""

  def _opened(self) -> list[list[Any]]:
    """Returns the (group, what is added to its prompt, why not) of groups that have opened."""
    self._runner.wait(POLL_S)
    opened = []
    for event in self._runner.poll():
      if isinstance(event, Opened):
        opened.append([list(event.group), _plain(event.added), ""])
      elif isinstance(event, Differs):
        opened.append([list(event.group), None, event.reason])
    return opened

  def _answers(self, turned: Sequence[Pair], idle: bool) -> dict[str, Any]:
    """Ends turns, and returns the events that follow soon; on the first process."""
    runner = self._runner
    for pair in turned:
      self._end_turn(*pair)
    events = self._events()
    missing = set(turned) - events.keys()
    if idle and not events:
      runner.wait(POLL_S)
      events = self._events()
      missing -= events.keys()
    while missing:
      more = self._events_soon(missing)
      events |= more
      if not missing & more.keys():
        break
      missing -= more.keys()
    return {
      "observed": [
        [*pair, *self._plain(event)] for pair, event in events.items() if _goes_on(event)
      ],
      "ended": [
        [*pair, str(event.episode.stop)] for pair, event in events.items() if not _goes_on(event)
      ],
    }

  def _end_turn(self, i: int, j: int) -> None:
    """Passes a turn on to the runner."""
    buffer = self._buffer
    length = buffer.length(i, j)
    tokens = buffer.tokens[i, j, buffer.turn_begin(i, j) : length].tolist()
    left = int(buffer.limits[i, j]) - length
    self._runner.end_turn(self._keys[i], j, tokens, bool(buffer.finished[i, j]), left)

  def _plain(self, event: Observed) -> list[Any]:
    """Returns what other processes need of an answer."""
    return [event.tokens]

  def _request(self, i: int, j: int, tokens: list[int]) -> Request:
    """Returns the request for the next turn of a completion, given the rest of `_plain`."""
    self._buffer.read(i, j, tokens)
    return self._buffer.request(i, j)

  def _end(self, i: int, j: int, stop: str) -> None:
    """Takes the end of an episode."""

  def _events(self) -> dict[Pair, Observed | Ended]:
    """Returns what has happened to completions since the last call."""
    events = self._runner.poll()
    return {(self._rows[event.group], event.index): event for event in events}

  def _events_soon(self, missing: set[Pair]) -> dict[Pair, Observed | Ended]:
    """Returns what happens to completions until one of `missing` is among them, or in a while."""
    events: dict[Pair, Observed | Ended] = {}
    until = time.perf_counter() + GRACE_S
    while not missing & events.keys() and (left := until - time.perf_counter()) > 0:
      self._runner.wait(left)
      events |= self._events()
    return events

  def _take(self, make: Callable[[], dict[str, Any]]) -> list[Pair]:
    """Submits the turns that follow answers; returns the completions that have ended."""
    answers = broadcast_from_first(make)
    requests = [self._request(i, j, *rest) for i, j, *rest in answers["observed"]]
    self.sampling.join(requests)
    self.read_again += sum(len(request.tokens) for request in requests)
    ended = [(i, j) for i, j, _ in answers["ended"]]
    for i, j, stop in answers["ended"]:
      self._end(i, j, stop)
    self._asked -= {*ended, *(request.name for request in requests)}
    self._playing -= set(ended)
    return ended


def _goes_on(event: Observed | Ended) -> bool:
  return not isinstance(event, Ended)


def _plain(added: str | Sequence[Message]) -> str | list[dict[str, str]]:
  return added if isinstance(added, str) else [dict(message) for message in added]
