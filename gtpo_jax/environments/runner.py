"""Drives many episodes at once: a state machine that is told when turns end, and then polled.

It needs no engine. For each prompt, `begin` resets an environment per completion. When all are
ready, `poll` returns `Opened`, with what is added to the prompt. The caller samples turns and calls
`end_turn` for each; later `poll` returns `Observed`, with the tokens to append before the next
turn, or `Ended`, with the episode. What an episode contains does not depend on the order in which
these come.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.environments.environment import Maker, Player
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.parsers import parser_for
from gtpo_jax.environments.session import Calls, Key, Opening, Recorded, Session, State
from gtpo_jax.environments.snapshots import load_sessions, save_sessions
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.environments.tools import Tools
from gtpo_jax.environments.turns import (
  Differs,
  Ended,
  Episode,
  Event,
  Group,
  Observed,
  Opened,
  Step,
  Stop,
)
from gtpo_jax.environments.workers import Outcome
from gtpo_jax.runtime.errors import UserError

SAYS_NOTHING = "such episodes say nothing about the model, and are counted in env/stop"


class Failures:
  """Prints failures of environments and agents, the first of each kind."""

  def __init__(self):
    self._kinds: set[str] = set()

  def show(self, reason: str, details: str = "", effect: str = SAYS_NOTHING) -> None:
    """Prints a failure and its effect, if it is the first of its kind."""
    kind = reason.partition(":")[0]
    if kind not in self._kinds:
      self._kinds.add(kind)
      print(f"gtpo: {reason}; {effect}\n{details}", file=sys.stderr, end="", flush=True)


class EpisodeRunner:
  """Runs the episodes of an environment, of tools, or of both.

  Attributes:
    schemas: of all tools, for the prompt.
    limits: the limits.
  """

  def __init__(
    self,
    chat: Chat,
    environment: Callable[[], Any] | Maker | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    parser: str = "auto",
    limits: EpisodeLimits | None = None,
    cut: Callable[[str], str] = str,
  ):
    """Args:
    chat: the tokenizer and its template.
    environment: a class, or a function that makes an environment; None if there are only tools.
    tools: functions that the model may call.
    parser: how the model writes calls, from `PARSERS`, or "auto".
    limits: None for the defaults.
    cut: removes a stop string from the text of a turn, with what follows it.

    Raises:
      UserError: the environment or a tool does not have the necessary form, the parser is unknown,
        or the chat template has no place for observations.
    """
    self.limits = limits or EpisodeLimits()
    self._chat = chat
    self._cut = cut
    self._maker = Maker.of(environment)
    self._functions = list(tools)
    self.schemas = Tools([*tools, *self._maker.unbound]).schemas
    if not self.schemas and environment is None:
      raise UserError("an episode needs an environment or a tool; set env.make or env.tools")
    self._parser = parser_for(parser if self.schemas or parser != "auto" else "none", chat)
    roles = ([self.limits.role] if self.schemas else []) + (["user"] if self._maker.make else [])
    self._tokens = TurnTokens(chat, roles)
    self._calls = Calls(self.limits)
    self._groups: dict[Group, list[Session]] = {}
    self._opening: dict[Group, Opening] = {}
    self._events: list[Event] = []
    self._show = Failures().show

  @property
  def abandoned(self) -> int:
    """How many calls of environments were abandoned because they took too long."""
    return self._calls.abandoned

  def begin(self, group: Group, row: Mapping[str, Any], seed: int, size: int) -> None:
    """Begins the episodes of a prompt.

    Args:
      group: names the prompt; groups are sorted by it.
      row: what `reset` gets, each time a copy.
      seed: what `reset` gets.
      size: the number of completions.
    """
    self._opening[group] = Opening()
    self._reset(group, row, seed, [self._session() for _ in range(size)])

  def restore(
    self, group: Group, row: Mapping[str, Any], seed: int, snapshot: Mapping[str, Any]
  ) -> None:
    """Continues the episodes of a prompt that were saved, by repeating their turns.

    `Opened` follows once all are repeated, or `Differs`. Episodes that had ended are in `episodes`.

    Args:
      group: names the prompt.
      row, seed: as they were for `begin`.
      snapshot: from `snapshot`.
    """
    sessions = [self._session() for _ in snapshot["episodes"]]
    load_sessions(sessions, snapshot)
    self._opening[group] = Opening(snapshot["added"])
    self._reset(group, row, seed, sessions)

  def snapshot(self, group: Group) -> dict[str, Any]:
    """Returns what `restore` needs, as JSON values. The group must have been opened."""
    return save_sessions(self._groups[group])

  def episodes(self, group: Group) -> list[Episode | None]:
    """Returns the episode of each completion; None for those that go on."""
    return [session.result for session in self._groups[group]]

  def end_turn(
    self, group: Group, index: int, tokens: Sequence[int], finished: bool, tokens_left: int
  ) -> None:
    """Takes a turn of a completion.

    Args:
      group: the prompt.
      index: the completion.
      tokens: what the model has drawn in this turn, its end token included.
      finished: whether it ended by itself; False if it was cut off.
      tokens_left: how many tokens the completion may still have.
    """
    session = self._groups[group][index]
    if session.state is not State.MODEL:
      raise ValueError(f"completion {index} of {group!r} waits for {session.state.value}")
    ids = [int(token) for token in tokens]
    self._take_turn((group, index), session, Recorded(ids, finished, tokens_left, None))

  def poll(self) -> list[Event]:
    """Returns what has happened since the last poll, ordered by group and completion.

    Raises:
      FunctionError: an environment raised KeyboardInterrupt or the like.
      RunError: too many calls of environments hang.
    """
    for key, session, outcome in self._calls.poll():
      self._take(key, session, outcome)
    events, self._events = self._events, []
    return events

  def wait(self, timeout_s: float) -> None:
    """Waits until a poll may have events, at most `timeout_s` seconds."""
    if not self._events:
      self._calls.wait(timeout_s)

  def discard(self, group: Group) -> None:
    """Forgets a group, if there is one, and closes the environments that it still has."""
    self._opening.pop(group, None)
    for index, session in enumerate(self._groups.pop(group, ())):
      session.discarded = True
      if session.state is not State.ENDED and not self._calls.has(session):
        self._calls.close((group, index), session)

  def close(self, timeout_s: float = 5.0) -> None:
    """Discards all groups, and gives their environments some time to close."""
    for group in list(self._groups):
      self.discard(group)
    until = time.monotonic() + timeout_s
    while self._calls.pending and time.monotonic() < until:
      self.wait(until - time.monotonic())
      self.poll()

  def _session(self) -> Session:
    return Session(self._maker.name, self._player, self.limits, self._tokens)

  def _player(self) -> Player:
    limits = self.limits
    return Player(self._maker, self._functions, self.schemas, limits.role, limits.parallel_calls)

  def _reset(
    self, group: Group, row: Mapping[str, Any], seed: int, sessions: list[Session]
  ) -> None:
    self._groups[group] = sessions
    for index, session in enumerate(sessions):
      if session.state is State.RESET:
        self._call((group, index), session, functools.partial(session.open, row, seed))

  def _call(self, key: Key, session: Session, work: Callable[[], Any]) -> None:
    """Calls the environment of an episode."""
    if session.time_left <= 0:
      session.reason = f"its environment took {session.seconds:.1f} s (env.episode_timeout_s)"
      self._end(key, session, Stop.TIMEOUT)
      return
    self._calls.submit(key, session, work)

  def _take(self, key: Key, session: Session, outcome: Outcome) -> None:
    """Goes on with an episode after a call of its environment."""
    state = session.state
    if state is State.ENDED:  # it was closed
      if outcome.error:
        reason = f"{session.name}.close raised {outcome.error}"
        self._show(reason, outcome.details, "its episode had ended, and counts")
      return
    if session.discarded:
      self._calls.close(key, session, outcome.hangs)
      return
    if stop := session.failure(outcome):
      self._show(session.reason, outcome.details)
      self._end(key, session, stop, outcome.hangs)
    elif state is State.RESET:
      session.added = outcome.value
      session.state = State.GROUP
    elif state is State.FINISH:
      session.add_finish(outcome.value)
      self._end(key, session, session.stop)
    else:
      self._take_step(key, session, outcome.value)
    if state is State.RESET and not session.discarded:
      self._join(key[0])

  def _join(self, group: Group) -> None:
    """Goes on with a group whose environments are all reset: they share the prompt."""
    sessions = self._groups[group]
    if any(session.state is State.RESET for session in sessions):
      return
    ready = [(i, session) for i, session in enumerate(sessions) if session.state is State.GROUP]
    opening = self._opening[group]
    opening.added = ready[0][1].added if ready else ""
    if ready and opening.expected not in (None, opening.added):
      self._differ(group, f"{self._maker.name}.reset returned something else")
      return
    for index, session in ready:
      if session.added != opening.added:
        session.reason = (
          f"{session.name}.reset returned something else than for another completion of the same "
          "prompt; let it depend on row and seed only"
        )
        self._show(session.reason)
        self._end((group, index), session, Stop.ENV_ERROR)
      else:
        session.state = State.MODEL
        self._repeat((group, index), session)
      if session.discarded:  # it did not repeat what was saved
        return
    self._open(group)

  def _open(self, group: Group) -> None:
    """Opens a group once its environments are reset and have repeated what was saved."""
    opening = self._opening.get(group)
    if opening is None or opening.added is None:
      return
    if not any(session.repeats for session in self._groups[group]):
      del self._opening[group]
      self._events += [Opened(group, opening.added), *opening.events]

  def _repeat(self, key: Key, session: Session) -> None:
    """Repeats the next turn of an episode that was saved, if there is one."""
    if session.replay:
      recorded = session.replay.popleft()
      session.expected = recorded.observation
      self._take_turn(key, session, recorded._replace(observation=None))

  def _take_turn(self, key: Key, session: Session, recorded: Recorded) -> None:
    turn = self._parser(self._cut(self._chat.decode([recorded.tokens])[0]))
    turn = dataclasses.replace(turn, index=len(session.turns), tokens_left=recorded.tokens_left)
    if stop := session.add_turn(turn, recorded):
      self._finish(key, session, stop)
    elif turn.error:
      complaint = {"role": self.limits.role, "content": f"Error: {turn.error}"}
      self._take_step(key, session, Step([complaint]))
    else:
      session.state = State.STEP
      self._call(key, session, session.step)

  def _take_step(self, key: Key, session: Session, step: Step) -> None:
    """Goes on after an answer to the latest turn."""
    if stop := session.add_step(step) or session.observe(step, self._chat.stop):
      if stop is Stop.ENV_ERROR:
        self._show(session.reason)
        self._end(key, session, stop)
      else:
        self._finish(key, session, stop)
      return
    session.state = State.MODEL
    ids = session.record[-1].observation
    if session.expected is None:
      self._emit(key[0], Observed(*key, ids))
    elif session.expected != ids:
      turn = len(session.turns) - 1
      self._differ(key[0], f"{session.name}.step returned something else for turn {turn}")
    else:
      session.expected = None
      self._repeat(key, session)
      self._open(key[0])

  def _finish(self, key: Key, session: Session, stop: Stop) -> None:
    """Ends an episode, after the environment's `finish` if it has one."""
    session.stop = stop
    if session.method("finish"):
      session.state = State.FINISH
      self._call(key, session, session.finish)
    else:
      self._end(key, session, stop)

  def _end(self, key: Key, session: Session, stop: Stop, hangs: bool = False) -> None:
    session.stop = stop
    if session.repeats:
      self._differ(key[0], session.reason or f"turn {session.turns[-1].index} ended the episode")
      return
    session.result = session.episode()
    self._emit(key[0], Ended(*key, session.result))
    self._calls.close(key, session, hangs)

  def _differ(self, group: Group, reason: str) -> None:
    self.discard(group)
    self._events.append(Differs(group, reason))

  def _emit(self, group: Group, event: Event) -> None:
    opening = self._opening.get(group)
    (opening.events if opening else self._events).append(event)
