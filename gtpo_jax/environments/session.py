"""One episode: its state, and the calls of its environment."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gtpo_jax.environments.environment import Player, checked_messages, checked_step, then
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.environments.turns import Episode, Event, Group, Message, Step, Stop, Turn
from gtpo_jax.environments.workers import Outcome, Workers
from gtpo_jax.runtime.errors import UserError

Key = tuple[Group, int]  # a completion


class State(enum.Enum):
  """What an episode waits for."""

  RESET = "reset"
  GROUP = "group"  # the resets of the other completions of the prompt
  MODEL = "model"
  STEP = "step"
  FINISH = "finish"
  ENDED = "ended"


class Recorded(NamedTuple):
  """A turn that an episode had before it was saved.

  Attributes:
    tokens: what the model has drawn.
    finished: whether it ended by itself.
    tokens_left: how many tokens the completion could still have.
    observation: what was appended after it; None if that was not known yet.
  """

  tokens: list[int]
  finished: bool
  tokens_left: int
  observation: list[int] | None


@dataclasses.dataclass
class Session:
  """An episode that goes on.

  Attributes:
    name: of the environment, for messages.
    make: makes the player; called on a worker.
    limits: the limits.
    tokens: shortens texts and encodes messages.
    replay: the turns to repeat, after a restore.
    state: what it waits for.
    discarded: whether nobody waits for it any more.
    player: answers turns; None until it is made.
    added: what `reset` has returned.
    turns: the model's turns.
    record: the same with their tokens, and with what followed them.
    expected: the observation that is to follow the turn that is being repeated.
    rewards: of each turn.
    info: the environment's numbers.
    correct: the environment's verdict.
    retries: how many turns had calls that could not be read.
    seconds: how long the environment took.
    stop: why it ended; "" as long as it goes on.
    reason: what went wrong.
    result: the episode, once it has ended.
  """

  name: str
  make: Callable[[], Player]
  limits: EpisodeLimits
  tokens: TurnTokens
  replay: collections.deque[Recorded] = dataclasses.field(default_factory=collections.deque)
  state: State = State.RESET
  discarded: bool = False
  player: Player | None = None
  added: str | Sequence[Message] = ""
  turns: list[Turn] = dataclasses.field(default_factory=list)
  record: list[Recorded] = dataclasses.field(default_factory=list)
  expected: list[int] | None = None
  rewards: list[float] = dataclasses.field(default_factory=list)
  info: dict[str, float] = dataclasses.field(default_factory=dict)
  correct: bool | None = None
  retries: int = 0
  seconds: float = 0.0
  stop: str = ""
  reason: str = ""
  result: Episode | None = None

  @property
  def calls(self) -> int:
    """How many calls the model has made."""
    return sum(len(turn.calls) for turn in self.turns)

  @property
  def repeats(self) -> bool:
    """Whether turns are still to be repeated after a restore."""
    return bool(self.replay) or self.expected is not None

  @property
  def time_left(self) -> float:
    """Seconds that the next call of the environment may take."""
    return min(self.limits.step_timeout_s, self.limits.episode_timeout_s - self.seconds)

  def open(self, row: Mapping[str, Any], seed: int) -> str | list[Message] | Awaitable[Any]:
    """Makes the environment and resets it, on a worker."""
    self.player = self.make()
    what = f"{self.name}.reset"
    added = self.player.reset(copy.deepcopy(dict(row)), seed)
    return then(added, lambda value: self._added(value, what))

  def step(self) -> Step | Awaitable[Step]:
    """Answers the latest turn, on a worker."""
    what = f"{self.name}.step"
    step = self.player.step(self.turns[-1])
    return then(step, lambda value: self._shortened(checked_step(value, what)))

  def finish(self) -> Step | Awaitable[Step]:
    """Returns the step of the environment's `finish`, on a worker."""
    what = f"{self.name}.finish"
    return then(self.player.method("finish")(), lambda value: _finished(value, what))

  def method(self, name: str) -> Callable[[], Any] | None:
    """Returns an optional method of the environment; None if it has none of this name."""
    return self.player.method(name) if self.player else None

  def close(self) -> Any:
    """Closes the environment if that is possible, on a worker."""
    close = self.method("close")
    return close() if close else None

  def failure(self, outcome: Outcome) -> Stop | None:
    """Adds a call of the environment; returns why it ends the episode, if it has failed."""
    self.seconds += outcome.seconds
    names = {State.RESET: "reset", State.STEP: "step", State.FINISH: "finish"}
    method = f"{self.name}.{names[self.state]}"
    if outcome.timed_out:
      self.reason = (
        f"{method} took longer than env.step_timeout_s = {self.limits.step_timeout_s:g} or what "
        f"was left of env.episode_timeout_s = {self.limits.episode_timeout_s:g}"
      )
      return Stop.TIMEOUT
    if outcome.error:
      self.reason = f"{method} raised {outcome.error}"
      return Stop.ENV_ERROR
    return None

  def add_turn(self, turn: Turn, recorded: Recorded) -> Stop | None:
    """Adds a turn of the model; returns the limit that it has reached, if any."""
    self.turns.append(turn)
    self.record.append(recorded)
    self.retries += bool(turn.error)
    if not recorded.finished:
      return Stop.MAX_TOKENS
    if turn.error and self.retries > self.limits.parse_retries:
      return Stop.PARSE_ERROR
    return Stop.MAX_CALLS if self.calls > self.limits.max_calls else None

  def add_step(self, step: Step) -> Stop | None:
    """Adds an answer to the latest turn; returns why it ends the episode, if it does."""
    self._add(step)
    if step.done:
      answered = self.player.ends_with_answer and not self.turns[-1].calls
      return Stop.ANSWERED if answered else Stop.ENV_DONE
    return Stop.MAX_TURNS if len(self.turns) >= self.limits.max_turns else None

  def observe(self, step: Step, stop_tokens: Collection[int]) -> Stop | None:
    """Encodes the messages of a step, for `record`; returns why that ends the episode, if it does.

    Args:
      step: the answer to the latest turn.
      stop_tokens: the tokens that end a turn.
    """
    recorded = self.record[-1]
    ended = bool(recorded.tokens) and recorded.tokens[-1] in stop_tokens
    try:
      if not step.messages:
        raise UserError("it returned no message, and is not done")
      ids = self.tokens.observation(step.messages, ended)
    except UserError as error:
      self.reason = f"{self.name}.step: {error}"
      return Stop.ENV_ERROR
    if len(ids) >= recorded.tokens_left:
      return Stop.CONTEXT
    self.record[-1] = recorded._replace(observation=ids)
    return None

  def add_finish(self, step: Step) -> None:
    """Adds what `finish` says to the last turn."""
    earlier = self.rewards.pop() if self.rewards else 0.0
    self._add(dataclasses.replace(step, reward=earlier + step.reward))

  def _add(self, step: Step) -> None:
    self.rewards.append(step.reward)
    self.info.update(step.info)
    if step.correct is not None:
      self.correct = step.correct

  def episode(self) -> Episode:
    """Returns what has happened."""
    scored, correct = self.limits.verdict(self.stop, self.correct)
    return Episode(
      turns=tuple(self.turns),
      stop=self.stop,
      reward=sum(self.rewards),
      rewards=tuple(self.rewards),
      correct=correct,
      scored=scored,
      tokens=sum(len(turn.tokens) for turn in self.record),
      seconds=self.seconds,
      info=self._numbers(),
      reason=self.reason,
    )

  def _numbers(self) -> dict[str, float]:
    failed = self.player.failed_calls if self.player else None
    return self.info | ({} if failed is None else {"failed_calls": float(failed)})

  def _added(self, value: Any, what: str) -> str | list[Message]:
    if value is None or isinstance(value, str):
      return value or ""
    return checked_messages(value, what)

  def _shortened(self, step: Step) -> Step:
    most = self.limits.max_observation_tokens
    shorten = lambda text: self.tokens.shorten(text, most, self.limits.truncate)
    messages = [{**message, "content": shorten(message["content"])} for message in step.messages]
    return dataclasses.replace(step, messages=messages)


class Calls:
  """The calls of the environments of all episodes, which run on threads."""

  def __init__(self, limits: EpisodeLimits):
    self._limits = limits
    self._workers = Workers(limits.workers)
    self._sessions: dict[int, Session] = {}  # by the number of the call
    self._count = itertools.count()

  @property
  def abandoned(self) -> int:
    """How many calls were abandoned because they took too long."""
    return self._workers.abandoned

  @property
  def pending(self) -> bool:
    """Whether any call runs or waits for a worker."""
    return bool(self._sessions)

  def has(self, session: Session) -> bool:
    """Whether a call of an episode runs or waits for a worker."""
    return any(other is session for other in self._sessions.values())

  def submit(self, key: Key, session: Session, work: Callable[[], Any]) -> None:
    """Calls the environment of an episode."""
    self._submit(key, session, work, session.time_left, session.close)

  def close(self, key: Key, session: Session, hangs: bool = False) -> None:
    """Closes an environment; one that hangs is closed on its own thread when it returns."""
    session.state = State.ENDED
    if session.player and not hangs:
      session.player.leave()
    if not hangs and session.method("close"):
      self._submit(key, session, session.close, self._limits.step_timeout_s, lambda: None)

  def poll(self) -> list[tuple[Key, Session, Outcome]]:
    """Returns the calls that have ended, ordered by completion; see `Workers.poll`."""
    outcomes = sorted(self._workers.poll(), key=lambda outcome: outcome.key)
    return [(outcome.key[:2], self._sessions.pop(outcome.key[2]), outcome) for outcome in outcomes]

  def wait(self, timeout_s: float) -> None:
    """Waits until a call has ended, at most `timeout_s` seconds."""
    self._workers.wait(timeout_s)

  def _submit(
    self,
    key: Key,
    session: Session,
    work: Callable[[], Any],
    limit_s: float,
    cleanup: Callable[[], Any],
  ) -> None:
    number = next(self._count)
    self._sessions[number] = session
    self._workers.submit((*key, number), work, limit_s, cleanup)


@dataclasses.dataclass
class Opening:
  """A group that is not opened yet.

  Attributes:
    expected: what its resets returned when it was saved; None if it was not saved.
    added: what they have returned; None until all have.
    events: those that follow `Opened`.
  """

  expected: str | Sequence[Message] | None = None
  added: str | Sequence[Message] | None = None
  events: list[Event] = dataclasses.field(default_factory=list)


def _finished(value: Any, what: str) -> Step:
  if isinstance(value, Step):
    return checked_step(value, what)
  return checked_step(Step(reward=0.0 if value is None else value), what)
