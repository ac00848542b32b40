"""The turns of completions: each has one, or it is an episode.

When a turn has ended, its episode resumes, and later asks for the next turn; other completions are
sampled meanwhile. With several processes, only the first has the episodes. After each chunk it
sends their requests to the others, so that all continue in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.environments.episodes import Added, Episodes, saved_writers
from gtpo_jax.environments.turns import Episode, Stop
from gtpo_jax.environments.writers import Ask, Drawn, Recorded
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.worker import Policy, RolloutWorker
from gtpo_jax.runtime.distributed import broadcast_from_first, is_first_process
from gtpo_jax.runtime.signals import Stopped
from gtpo_jax.sampling.completion import Completion
from gtpo_jax.sampling.session import Session
from gtpo_jax.sampling.settings import SamplingParams
from gtpo_jax.serving.choices import new_search

# Turns that have just ended wait so long for what follows before other completions are sampled.
# Without it, a tool that takes no time would delay its turn by a chunk of tokens.
GRACE_S = 0.003
POLL_S = 0.5  # between two checks for a stop request while everything waits for environments

Place = tuple[Any, int]  # the group of a completion, and its index there
Key = tuple[int, int]  # the index of a group


class Turns:
  """The turns of the completions of a batch. Without episodes, a completion is one turn.

  A group's episodes are played from its first turn until it has rewards. If a step ends in between,
  they stay in flight: environments and agents work while the policy is updated, and what they have
  asked for by then is drawn first in the next step. Environments can also be played again from the
  group's snapshot. Agents cannot: after an interruption, their group begins again.
  """

  def __init__(
    self, worker: RolloutWorker, size: int, seed: int = 0, episodes: Episodes | None = None
  ):
    """Args:
    worker: encodes prompts, and has the episodes if there are any.
    size: completions of a group.
    seed: the run's seed.
    episodes: plays them; None for the worker's.
    """
    self._worker = worker
    self._episodes = episodes or worker.episodes
    self._size = size
    self._seed = seed
    self._added: dict[Key, Added | None] = {}  # of each open group, what is added to its prompt
    self._version = 0
    self._queues: list[TurnQueue] = []  # since the last metrics
    self._opening_s = 0.0  # since then

  def open(
    self, groups: Sequence[Group], version: int, stopping: Callable[[], bool]
  ) -> list[Group]:
    """Begins the episodes of new groups, and resumes others that are not played any more.

    A group whose environments do not repeat what they did begins again.
    """
    self._version = version
    if not self._episodes:
      return list(groups)
    began = time.perf_counter()
    closed = [group for group in groups if group.rewards is None and group.index not in self._added]
    self._begin([x for x in closed if not x.completions or x.snapshot], stopping)
    new = {
      group.index: Group(group.index, group.problem, version)
      for group in closed
      if self._added.get(group.index) is None
    }
    again = [x.index for x in closed if x.completions and not x.snapshot]
    if self._episodes.rules.start and again:
      names = ", ".join(f"{batch}/{row}" for batch, row in sorted(again))
      if is_first_process():
        print(f"gtpo: agents were interrupted; their groups begin again: {names}", flush=True)
    self._begin(list(new.values()), stopping)
    self._opening_s += time.perf_counter() - began
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
    """
    session = policy.engine.session(
      policy.params, rows, sampling_params, prompts_at_once=prompts_at_once
    )
    queue = TurnQueue(self._episodes, self._worker.chat, session, rows, self._version)
    self._queues.append(queue)
    with jax.profiler.TraceAnnotation("sample"):
      while queue.busy:
        yield queue.step()
        if stopping():
          raise Stopped

  def finish(self, groups: Sequence[Group]) -> list[Group]:
    """Adds snapshots of environments to the groups without rewards, and discards all others."""
    if not self._episodes:
      return list(groups)
    left = [group.index for group in groups if group.rewards is None]
    self.discard(self._added.keys() - set(left))
    repeats = lambda key: not self._episodes.rules.start or all(self._episodes.results(key))
    make = lambda: [json.dumps(self._episodes.snapshot(x)) if repeats(x) else "" for x in left]
    snapshots = dict(zip(left, broadcast_from_first(make) if left else [], strict=True))
    return [dataclasses.replace(group, snapshot=snapshots.get(group.index, "")) for group in groups]

  def discard(self, keys: Iterable[Key] | None = None) -> None:
    """Forgets groups, by default all. What `finish` has returned can be opened again."""
    for key in sorted(self._added if keys is None else keys):
      del self._added[key]
      if is_first_process():
        self._episodes.discard(key)

  def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns how long everything waited, and the tokens read again.

    Args:
      metrics: the other metrics of the step.
    """
    queues, self._queues = self._queues, []
    opening_s, self._opening_s = self._opening_s, 0.0
    if not self._episodes:
      return {}
    read_again = sum(queue.read_again for queue in queues)
    idle_s = sum(queue.idle_s for queue in queues)
    return {
      "env/idle_share": idle_s / metrics["time/sample"],
      "time/waiting": idle_s + opening_s + metrics["time/reward"],
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


class TurnQueue:
  """The turns of the completions that are sampled together.

  Attributes:
    waiting: the completions whose turns have ended, but not their episodes, by group and index.
    idle_s: seconds in which no completion was sampled because all were waiting.
    read_again: the number of tokens of completions that were read again before a turn.
  """

  def __init__(
    self,
    episodes: Episodes | None,
    chat: Chat,
    session: Session,
    rows: Sequence[Sequence[Completion]],
    version: int,
  ):
    """Args:
    episodes: plays them; None if each completion is one turn.
    chat: the tokenizer.
    session: samples the completions.
    rows: the completions, each row with one prompt.
    version: the number of updates of the policy.
    """
    self.waiting: dict[Place, Completion] = {}
    self.idle_s = 0.0
    self.read_again = 0
    self._episodes = episodes
    self._chat = chat
    self._session = session
    self._version = version
    self._playing: dict[Place, Completion] = {}  # completions whose episodes have not ended
    drawing = {_place(x): x for row in rows for x in row}  # completions, or conversations of agents
    if episodes:
      results = lambda: [[x is None for x in episodes.results(row[0].group)] for row in rows]
      for row, of_row in zip(rows, broadcast_from_first(results), strict=True):
        for completion, plays in zip(row, of_row, strict=True):
          if plays:
            self._playing[_place(completion)] = completion
          else:
            self._end(completion)
            completion.limit = completion.limit if completion.ended else 0
      for place, completion in self._playing.items():
        parts = completion.conversations if episodes.rules.start else [completion]
        turn = next((x for x in parts if not x.ended), None)
        if turn is None:
          self.waiting[place] = drawing.pop(place)
        elif turn is not completion:
          drawing[place] = turn
          self.read_again += turn.length
    self._asked_before = set(self.waiting)  # their turns, if they are asked for, are drawn first
    for row in rows:
      session.submit(row[0].prompt, [drawing[_place(x)] for x in row if _place(x) in drawing])

  @property
  def busy(self) -> bool:
    """Whether any completion or its episode has not ended."""
    return self._session.busy or bool(self.waiting)

  def step(self) -> list[Completion]:
    """Samples a chunk of tokens, passes turns on that have ended, and submits the next ones.

    If no completion can be sampled, it waits for a turn, about half a second at most.

    Returns:
      The completions that have ended, with their episodes on the first process.
    """
    ended: list[Completion] = []
    if answered := self._asked_before:
      self._asked_before = set()
      ended += self._take(lambda: self._news([], answered, False))
    turned = self._session.step(more_may_come=bool(self.waiting))
    ended += [completion for completion in turned if _place(completion) not in self._playing]
    new = [completion for completion in turned if _place(completion) in self._playing]
    self.waiting |= {_place(x): self._playing[_place(x)] for x in new}
    if not self.waiting:
      return ended
    idle = len(self.waiting) == len(self._playing)
    began = time.perf_counter()
    ended += self._take(lambda: self._news(new, set(map(_place, new)), idle))
    if idle:
      self.idle_s += time.perf_counter() - began
    return ended

  def _news(self, turned: Sequence[Completion], answered: set[Place], idle: bool) -> dict[str, Any]:
    """Delivers finished turns to their episodes; returns new requests and ended episodes.

    It runs on the first process.

    Args:
      turned: the completions, or conversations of agents, whose turns have ended.
      answered: those that get a moment to ask for their next turns.
      idle: whether there is nothing to sample.
    """
    for completion in turned:
      turn = completion.arrays(completion.turn_begin)
      drawn = Drawn(
        turn["tokens"].tolist(),
        completion.finished,
        completion.limit - completion.length,
        turn["plain_log_probs"].tolist(),
      )
      self._episodes.answer(completion.group, completion.index, drawn)
    events = self._events()
    if idle and not events:
      self._episodes.wait(POLL_S)
      events = self._events()
    until = time.perf_counter() + GRACE_S
    while (missing := answered - events.keys()) and (left := until - time.perf_counter()) > 0:
      self._episodes.wait(left)
      more = self._events()
      if missing & more.keys():
        until = time.perf_counter() + GRACE_S
      events |= more
    asked = {place: event for place, event in events.items() if isinstance(event, Ask)}
    return {
      "asked": [[list(k), j, *ask[:-1], list(ask.stop)] for (k, j), ask in sorted(asked.items())],
      "ended": [
        [list(k), j, str(x.stop)] for (k, j), x in events.items() if isinstance(x, Episode)
      ],
    }

  def _events(self) -> dict[Place, Ask | Episode]:
    """Returns what has happened to completions since the last call."""
    events = {(group, j): event for group, j, event in self._episodes.poll()}
    return {place: event for place, event in events.items() if place in self._playing}

  def _take(self, make: Callable[[], dict[str, Any]]) -> list[Completion]:
    """Submits the turns that episodes ask for; returns the completions that have ended."""
    news = broadcast_from_first(make)
    for group, j, *ask in reversed(news["asked"]):  # each joins before those that wait
      completion = self._next_turn((tuple(group), j), *ask)
      self.read_again += completion.length
      self._session.join(completion)
      del self.waiting[tuple(group), j]
    ended = []
    for group, j, stop in news["ended"]:
      place = (tuple(group), j)
      completion = self._playing.pop(place)
      self.waiting.pop(place, None)
      if self._episodes.rules.start:
        completion.mark_version(self._version)
        _join_conversations(completion, stop != Stop.MAX_TOKENS)
      self._end(completion)
      ended.append(completion)
    return ended

  def _next_turn(
    self, place: Place, tokens: list[int], number: int, limit: int | None, stop: Sequence[str]
  ) -> Completion:
    """Returns the completion or conversation that has another turn; see `Ask`."""
    completion = self._playing[place]
    if limit is not None:  # of an agent
      completion = self._conversation(completion, number, tokens)
      completion.limit = completion.length + len(tokens) + limit
      completion.stop = new_search(self._chat, stop)
    completion.read(tokens)
    return completion

  def _conversation(self, episode: Completion, number: int, tokens: list[int]) -> Completion:
    """Returns a conversation of an agent, which begins with `tokens` if there is none yet."""
    conversations = episode.conversations
    if number == len(conversations):
      twins = sum(_opening(x) == tokens for x in conversations)
      key = conversation_key(episode.key, tokens, twins)
      conversations.append(dataclasses.replace(episode, key=key))
    return conversations[number]

  def _end(self, completion: Completion) -> None:
    """Gives a completion its episode, on the first process."""
    if is_first_process():
      completion.episode = self._episodes.results(completion.group)[completion.index]


def _place(completion: Completion) -> Place:
  return completion.group, completion.index


def _opening(conversation: Completion) -> list[int]:
  """Returns the tokens that a conversation begins with, before its first turn."""
  mask = conversation.mask
  return conversation.tokens[: mask.argmax() if mask.any() else len(mask)].tolist()


def _join_conversations(completion: Completion, finished: bool) -> None:
  """Joins an agent's conversations, the longest first, without regard to their requests' times."""
  order = lambda x: (-x.length, x.key.tobytes())
  parts = sorted(completion.conversations, key=order)
  completion.conversations = []
  if parts:
    arrays = [part.arrays() for part in parts]
    joined = {name: np.concatenate([x[name] for x in arrays]) for name in arrays[0]}
    completion.begins = [0, *np.cumsum([part.length for part in parts[:-1]]).tolist()]
    completion.replace(joined, finished)
    completion.versions = np.concatenate([part.versions for part in parts])
  completion.limit = completion.length


def conversation_key(episode: np.ndarray, tokens: Sequence[int], twins: int) -> np.ndarray:
  """Returns the PRNG key data u32[2] of a conversation.

  It depends on what the conversation begins with, and not on when its request came.

  Args:
    episode: u32[2], the key of the episode.
    tokens: what the conversation begins with.
    twins: how many earlier conversations of the episode begin with the same.
  """
  content = episode.tobytes() + np.asarray([twins, *tokens], np.int64).tobytes()
  return np.frombuffer(hashlib.blake2b(content, digest_size=8).digest(), np.uint32)
