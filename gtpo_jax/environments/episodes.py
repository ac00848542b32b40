"""Plays many episodes at once: their coroutines here, and calls of the user's code on threads.

It needs no engine. The turns that episodes ask for are events, and `answer` takes what was sampled.
What an episode contains does not depend on the order in which these come.
"""

from __future__ import annotations

import collections
import copy
import sys
import time
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from typing import Any

from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.turns import Episode, Message, load_episode, save_episode
from gtpo_jax.environments.workers import Outcome, Workers
from gtpo_jax.environments.writers import Ask, Call, Differs, Drawn, End, Recorded, Writer

SAYS_NOTHING = "such completions have no verdict and teach nothing; env/stop counts them"
OTHER_PROMPT = "returned something else than for another completion of the same prompt"

Group = Hashable  # names a prompt with its completions; groups can be sorted
Added = str | Sequence[Message]  # what is added to a prompt, see `add_to_prompt`
Event = tuple[Group, int, Ask | Episode]  # what a completion asks for, or its episode


class Playing:
  """An episode while it is played, and what it waits for.

  Attributes:
    key: its group and its index there.
    writer: writes its turns.
    result: the episode, once it has ended.
    outcome: of its latest call; None if there is none.
    awaits: a turn, a call, or None for any news.
    closes: whether it has ended or is discarded, so that only what it used is to be closed.
    coroutine: `play`, then `close`.
  """

  name = ""  # of the environment, for messages

  def __init__(self, key: tuple[Group, int], writer: Writer | Any, result: Episode | None = None):
    self.key = key
    self.writer = writer
    self.result = result
    self.outcome: Outcome | None = None
    self.awaits: Ask | Call | None = None
    self.closes = result is not None
    self.coroutine: Coroutine[Any, Any, Episode | None] | Any = None

  async def play(self) -> Episode:
    """Plays the episode to its end.

    Raises:
      Differs: its writer repeats turns, but the environment does not repeat its answers.
    """
    raise NotImplementedError

  async def close(self) -> None:
    """Closes what it used, once it has ended or wherever it is."""
    raise NotImplementedError

  def failure(self, reason: str) -> End:
    """Prints why the environment has failed, and returns the end of the episode."""
    raise NotImplementedError


class Rules:
  """What all episodes of a run have in common, of environments or of an agent.

  Attributes:
    limits: the limits.
    schemas: of the tools, for prompts.
    start: the token ids that every prompt consists of; () if the problem says it.
    workers: run the user's code.
    news: the episodes with news, which any thread may add to before it calls `workers.wake`.
  """

  schemas: Sequence[Mapping[str, Any]] = ()
  start: Sequence[int] = ()

  def __init__(self, limits: EpisodeLimits):
    self.limits = limits
    self.workers = Workers(limits.workers)
    self.news: collections.deque[Playing] = collections.deque()
    self._shown: set[str] = set()  # kinds of failures

  def episode(
    self, key: tuple[Group, int], writer: Writer, row: Mapping[str, Any], seed: int
  ) -> Playing:
    """Returns an episode that has not begun; for the arguments, see `Episodes.begin`."""
    raise NotImplementedError

  def policy_truth(
    self, rows: Sequence[Mapping[str, Any]], episodes: Sequence[Sequence[Episode]]
  ) -> Sequence[Sequence[Sequence[float]]] | None:
    """Returns the true advantages of the turns of n groups for the policy that played them.

    Args:
      rows: n rows of the data.
      episodes: [n][g].

    Returns:
      [n][g][turns], NaN for unknown ones; None if the environment has no `policy_truth`.
    """

  def show(self, reason: str, details: str = "", effect: str = SAYS_NOTHING) -> None:
    """Prints a failure of the user's code and its effect, if it is the first of its kind."""
    kind = reason.partition(":")[0]
    if kind not in self._shown:
      self._shown.add(kind)
      print(f"gtpo: {reason}; {effect}\n{details}", file=sys.stderr, end="", flush=True)

  def apart(self) -> Rules:
    """Returns the same rules with threads of their own; only the original closes what both use."""
    other = copy.copy(self)
    other.workers = Workers(self.limits.workers)
    other.news = collections.deque()
    other.close = lambda: None
    return other

  def close(self) -> None:
    """Closes what no episode uses any more."""


class Episodes:
  """Plays the episodes of a run, on the thread that calls it.

  Attributes:
    rules: what they have in common.
  """

  def __init__(self, rules: Rules):
    self.rules = rules
    self._groups: dict[Group, list[Playing]] = {}
    self._opening: dict[Group, None] = {}
    self._opened: list[tuple[Group, Added | None, str]] = []
    self._running: set[Playing] = set()  # those whose coroutines have not ended
    self._events: list[Event] = []

  def begin(
    self, group: Group, row: Mapping[str, Any], seed: int, writers: Sequence[Writer | Episode]
  ) -> None:
    """Begins the episodes of a prompt; `opened` says when it can be sampled.

    Args:
      group: names the prompt; groups are sorted by it.
      row: what the environment or the agent gets, each time a copy.
      seed: the same.
      writers: one for each completion, or its episode if that has ended already.
    """
    self._groups[group] = []
    self._opening[group] = None
    for index, writer in enumerate(writers):
      key = (group, index)
      if isinstance(writer, Episode):
        self._groups[group].append(Playing(key, None, writer))
        continue
      playing = self.rules.episode(key, writer, row, seed)
      playing.coroutine = playing.play()
      self._groups[group].append(playing)
      self._running.add(playing)
      self._resume(playing)

  def opened(self) -> list[tuple[Group, Added | None, str]]:
    """Returns the groups whose episodes have all reached their first new turn, or their ends.

    Each comes with what is added to its prompt, or with None and why it has to begin again: the
    environments do not repeat what they did before they were saved.
    """
    self._take_news()
    for group in list(self._opening):
      playing = [x for x in self._groups[group] if x.result is None]
      if any(x.writer.added is None for x in playing):
        continue
      del self._opening[group]
      added = playing[0].writer.added if playing else ""
      for other in playing:
        if other.writer.added != added:
          reason = f"{other.name}.reset {OTHER_PROMPT}; let it depend on row and seed only"
          self._resume(other, error=other.failure(reason))
      self._opened.append((group, added, ""))
    opened, self._opened = self._opened, []
    return opened

  def poll(self) -> list[Event]:
    """Returns what has happened since the last poll.

    An ask without tokens is no event: the completion's first turn, or the one that it was saved in.

    Raises:
      FunctionError: the user's code raised KeyboardInterrupt or the like.
      RunError: too many calls hang.
    """
    self._take_news()
    events, self._events = self._events, []
    return events

  def wait(self, timeout_s: float) -> None:
    """Waits until a poll may have events, at most `timeout_s` seconds."""
    if not self._events:
      self.rules.workers.wait(timeout_s)

  def answer(self, group: Group, index: int, drawn: Drawn) -> None:
    """Takes the turn that a completion has asked for."""
    playing = self._groups[group][index]
    if not isinstance(playing.awaits, Ask):
      raise ValueError(f"completion {index} of {group!r} waits for no turn")
    self._resume(playing, drawn)

  def results(self, group: Group) -> list[Episode | None]:
    """Returns the episode of each completion; None for one that has not ended.

    An agent's has not until `poll` has said so: its conversations are joined then.
    """
    unsaid = {event[:2] for event in self._events if self.rules.start}
    return [None if x.key in unsaid else x.result for x in self._groups[group]]

  def snapshot(self, group: Group) -> dict[str, Any]:
    """Returns what `saved_writers` needs, as JSON values.

    What the environment has answered since the last `poll` is left out: no completion has it.
    """
    unsaid = {event[:2] for event in self._events}
    episodes = self._groups[group]
    said = lambda x: (
      [*x.writer.turns[:-1], [*x.writer.turns[-1][:-1], None]]
      if x.key in unsaid
      else x.writer.turns
    )
    saved = [
      {"episode": save_episode(x.result)} if x.result else {"turns": said(x)} for x in episodes
    ]
    added = next((x.writer.added for x in episodes if x.result is None), None)
    return {"added": added, "episodes": saved}

  def discard(self, group: Group) -> None:
    """Forgets a group, if there is one, and closes the episodes that have not ended."""
    for playing in self._groups.pop(group, ()):
      if not playing.closes:
        self._close(playing)
    self._opening.pop(group, None)
    self._events = [event for event in self._events if event[0] != group]

  def close(self, timeout_s: float = 5.0) -> None:
    """Discards all groups, and gives what their episodes used some time to close."""
    for group in list(self._groups):
      self.discard(group)
    until = time.monotonic() + timeout_s
    while self._running and (left := until - time.monotonic()) > 0:
      self.rules.workers.wait(left)
      self._take_news()
    self.rules.close()

  def _take_news(self) -> None:
    """Resumes the episodes whose calls have ended, in their order, and others with news."""
    outcomes: list[Any] = self.rules.workers.poll()
    for outcome in sorted(outcomes, key=lambda outcome: outcome.key.key):
      playing = outcome.key
      playing.outcome = outcome
      self.rules.news.append(playing)
    while self.rules.news:
      playing = self.rules.news.popleft()
      if playing in self._running and not isinstance(playing.awaits, Ask):
        self._resume(playing, playing.outcome)

  def _resume(
    self, playing: Playing, value: Drawn | Outcome | None = None, error: Exception | None = None
  ) -> None:
    """Runs an episode until it waits again, and closes it once it has ended."""
    coroutine = playing.coroutine
    playing.awaits = None
    try:
      awaited = coroutine.throw(error) if error else coroutine.send(value)
    except StopIteration as end:
      if playing.closes:
        self._running.remove(playing)
      else:
        playing.result = end.value
        self._events.append((*playing.key, end.value))
        self._close(playing)
    except Differs as differs:
      self._opened.append((playing.key[0], None, str(differs)))
      self.discard(playing.key[0])
    else:
      playing.awaits = awaited
      if isinstance(awaited, Call):
        playing.outcome = None
        self.rules.workers.submit(playing, *awaited)
      elif awaited and awaited.tokens:
        self._events.append((*playing.key, awaited))

  def _close(self, playing: Playing) -> None:
    """Leaves an episode where it is, and begins to close what it used."""
    playing.closes = True
    playing.coroutine.close()
    playing.coroutine = playing.close()
    self._resume(playing)


def saved_writers(snapshot: Mapping[str, Any]) -> list[Recorded | Episode]:
  """Returns what continues the episodes of a snapshot, by repeating their turns."""
  return [
    load_episode(saved["episode"])
    if "episode" in saved
    else Recorded(snapshot["added"], saved["turns"])
    for saved in snapshot["episodes"]
  ]
