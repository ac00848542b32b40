"""An episode of an environment: a coroutine that asks for turns and for the answers to them.

It runs nothing itself. What it waits for, `Episodes` does for many episodes at once: the policy
draws their turns together, and environments are called on threads.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.environments.environment import Maker, Player, checked_messages, checked_step, then
from gtpo_jax.environments.episodes import Group, Playing, Rules
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.parsers import parser_for
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.environments.tools import Tools
from gtpo_jax.environments.turns import Episode, Message, Step, Stop, Turn, as_number
from gtpo_jax.environments.workers import Outcome
from gtpo_jax.environments.writers import Call, Differs, Drawn, End, Writer, wait_for
from gtpo_jax.runtime.errors import UserError, described, escape_controls

BEGINNING = "\N{START OF TEXT}"  # the state before the first turn, unlike that of an empty answer
SHORT_STATE = 64  # characters of a state that is kept as it is


class EnvironmentEpisode(Playing):
  """An episode of an environment: its methods are called on threads.

  Attributes:
    name: of the environment, for messages.
  """

  def __init__(
    self,
    rules: Environments,
    key: tuple[Group, int],
    writer: Writer,
    row: Mapping[str, Any],
    seed: int,
  ):
    """Args:
    rules: of the run.
    key, writer: see `Playing`.
    row: what `reset` gets, a copy.
    seed: what `reset` gets.
    """
    super().__init__(key, writer)
    self.name = rules.maker.name
    self._rules = rules
    self._row = row
    self._seed = seed
    self._player: Player | Any = None
    self._turns: list[Turn] = []
    self._rewards: list[float] = []
    self._truths: list[float | None] = []
    self._states = [BEGINNING]  # before each turn, and after the last one
    self._info: dict[str, float] = {}
    self._correct: bool | None = None
    self._retries = 0  # turns whose calls could not be read
    self._drawn = 0  # tokens
    self._seconds = 0.0
    self._called = False  # whether a call runs
    self._hangs = False

  async def play(self) -> Episode:
    """See `Playing`."""
    writer = self.writer
    try:
      writer.begin(self.name, await self._call("reset", self._reset, self._added))
      tokens: list[int] = []
      while True:
        drawn = await writer.turn(tokens)
        turn = self._take(drawn)
        tokens = await self._answer(turn, drawn)
    except End as end:
      if writer.repeats:
        raise Differs(end.reason or f"turn {len(self._turns) - 1} ended the episode") from None
      return await self._finish(end)

  def _reset(self) -> Any:
    """Makes the environment, on a worker."""
    self._player = self._rules.player()
    return self._player.reset(copy.deepcopy(dict(self._row)), self._seed)

  def _added(self, value: Any, what: str) -> str | Sequence[Message]:
    """Returns what `reset` has returned; on a worker."""
    if value is None or isinstance(value, str):
      return value or ""
    messages = checked_messages(value, what)
    if any(message["role"] in ("system", "developer") for message in messages):
      self._rules.tokens.check_shown(self._row.get("messages", ()), messages)
    return messages

  def _take(self, drawn: Drawn) -> Turn:
    """Adds a turn of the policy, and returns it.

    Raises:
      End: it reaches a limit.
    """
    rules = self._rules
    turn = rules.parser(rules.cut(rules.chat.decode([drawn.tokens])[0]))
    turn = dataclasses.replace(turn, index=len(self._turns), tokens_left=drawn.tokens_left)
    self._turns.append(turn)
    self._drawn += len(drawn.tokens)
    self._retries += bool(turn.error)
    if not drawn.finished:
      raise End(Stop.MAX_TOKENS)
    if turn.error and self._retries > rules.limits.parse_retries:
      raise End(Stop.PARSE_ERROR)
    if sum(len(turn.calls) for turn in self._turns) > rules.limits.max_calls:
      raise End(Stop.MAX_CALLS)
    return turn

  async def _answer(self, turn: Turn, drawn: Drawn) -> list[int]:
    """Returns the tokens of the answer to a turn.

    Raises:
      End: it ends the episode.
    """
    rules = self._rules
    if turn.error:  # the environment stays as it was
      error = f"Error: {turn.error}"
      state = f"{self._states[-1]}\n{error}"
      step = Step([{"role": rules.limits.role, "content": error}], state=state)
    else:
      step = await self._call("step", lambda: self._player.step(turn), rules.checked)
    self._add(step)
    messages: Any = step.messages
    self._states.append(step.state or "\n".join(x["content"] for x in messages))
    if step.done:
      answered = self._player.ends_with_answer and not turn.calls
      raise End(Stop.ANSWERED if answered else Stop.ENV_DONE)
    if len(self._turns) >= rules.limits.max_turns:
      raise End(Stop.MAX_TURNS)
    ended = bool(drawn.tokens) and drawn.tokens[-1] in rules.chat.stop
    try:
      if not messages:
        raise UserError("it returned no message, and is not done")
      tokens = rules.tokens.observation(messages, ended)
    except UserError as error:
      raise self.failure(f"{self.name}.step: {error}") from None
    if len(tokens) >= drawn.tokens_left:
      raise End(Stop.CONTEXT)
    return tokens

  async def _finish(self, end: End) -> Episode:
    """Returns the episode, after the environment's `finish` if it has one and has not failed.

    What `finish` returns belongs to the last turn, also if that had no answer.
    """
    finish = self._player and self._player.method("finish")
    if finish and end.stop not in (Stop.ENV_ERROR, Stop.TIMEOUT):
      try:
        step = await self._call("finish", finish, _finished)
      except End as failure:
        end = failure
      else:
        for known, absent in ((self._rewards, 0.0), (self._truths, None)):
          known += [absent] * (len(self._turns) - len(known))
        earlier = self._rewards.pop() if self._rewards else 0.0
        truth = self._truths.pop() if self._truths else None
        self._add(dataclasses.replace(step, reward=earlier + step.reward, truth=truth))
    failed = self._player.failed_calls if self._player else None
    scored, correct = self._rules.limits.verdict(end.stop, self._correct)
    return Episode(
      turns=tuple(self._turns),
      stop=end.stop,
      reward=sum(self._rewards),
      rewards=tuple(self._rewards),
      correct=correct,
      scored=scored,
      tokens=self._drawn,
      seconds=self._seconds,
      info=self._info | ({} if failed is None else {"failed_calls": float(failed)}),
      reason=end.reason,
      states=tuple(map(state_key, self._states[: len(self._turns)])),
      truths=tuple(self._truths),
    )

  async def close(self) -> None:
    """Closes the environment, after a call that still runs.

    One that hangs is closed on its own thread when it returns.
    """
    if self._called:
      self._hangs = (await wait_for(None)).hangs
    if self._hangs or not self._player:
      return
    self._player.leave()
    if self._player.method("close"):
      limit_s = self._rules.limits.step_timeout_s
      outcome: Outcome = await wait_for(Call(self._player.close, limit_s))
      if outcome.error:
        reason = f"{self.name}.close raised {outcome.error}"
        self._rules.show(reason, outcome.details, "its episode had ended, and counts")

  def failure(self, reason: str, stop: Stop = Stop.ENV_ERROR, details: str = "") -> End:
    """Prints why the environment has failed, and returns the end of the episode."""
    self._rules.show(reason, details)
    return End(stop, reason)

  async def _call(
    self, method: str, work: Callable[[], Any], check: Callable[[Any, str], Any]
  ) -> Any:
    """Calls the environment, and returns what `check` makes of the value and the method's name."""
    limits = self._rules.limits
    left = min(limits.step_timeout_s, limits.episode_timeout_s - self._seconds)
    if left <= 0:
      reason = f"its environment took {self._seconds:.1f} s (env.episode_timeout_s)"
      raise End(Stop.TIMEOUT, reason)
    what = f"{self.name}.{method}"
    checked = lambda: then(work(), lambda value: check(value, what))
    self._called = True
    close = lambda: self._player and self._player.close()
    outcome: Outcome = await wait_for(Call(checked, left, close))
    self._called = False
    self._hangs = outcome.hangs
    self._seconds += outcome.seconds
    if outcome.timed_out:
      reason = (
        f"{what} took longer than env.step_timeout_s = {limits.step_timeout_s:g} or what "
        f"was left of env.episode_timeout_s = {limits.episode_timeout_s:g}"
      )
      raise self.failure(reason, Stop.TIMEOUT, outcome.details)
    if outcome.error:
      raise self.failure(f"{what} raised {outcome.error}", details=outcome.details)
    return outcome.value

  def _add(self, step: Step) -> None:
    self._rewards.append(step.reward)
    self._truths.append(step.truth)
    self._info.update(step.info)
    if step.correct is not None:
      self._correct = step.correct


def state_key(state: str) -> str:
  """Returns a short text that is equal for equal states: the state, or a digest of a long one."""
  if len(state) <= SHORT_STATE:
    return state
  return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


class Environments(Rules):
  """What the episodes of an environment, of tools, or of both have in common.

  Attributes:
    chat, cut: the arguments.
    maker: makes the environment of an episode.
    parser: reads turns.
    tokens: encodes messages.
  """

  def __init__(
    self,
    chat: Chat,
    environment: Callable[[], Any] | Maker | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    parser: str = "auto",
    limits: EpisodeLimits | None = None,
    cut: Callable[[str], str] = str,
    close: Callable[[], None] = lambda: None,
  ):
    """Args:
    chat: the tokenizer and its template.
    environment: a class, or a function that makes an environment; None if there are only tools.
    tools: functions that the model may call.
    parser: how the model writes calls, from `PARSERS`, or "auto".
    limits: None for the defaults.
    cut: removes a stop string from the text of a turn, with what follows it.
    close: closes what the tools use.

    Raises:
      UserError: the environment or a tool does not have the necessary form, the parser is unknown,
        or the chat template has no place for observations.
    """
    super().__init__(limits or EpisodeLimits())
    self.chat = chat
    self.cut = cut
    self.close = close
    self.maker = Maker.of(environment)
    self._functions = list(tools)
    self.schemas = Tools([*tools, *self.maker.unbound]).schemas
    if not self.schemas and environment is None:
      raise UserError("an episode needs an environment or a tool; set env.make or env.tools")
    self.parser = parser_for(parser if self.schemas or parser != "auto" else "none", chat)
    roles = ([self.limits.role] if self.schemas else []) + (["user"] if self.maker.make else [])
    self.tokens = TurnTokens(chat, roles)

  def episode(
    self, key: tuple[Group, int], writer: Writer, row: Mapping[str, Any], seed: int
  ) -> EnvironmentEpisode:
    """See `Rules`."""
    return EnvironmentEpisode(self, key, writer, row, seed)

  def policy_truth(
    self, rows: Sequence[Mapping[str, Any]], episodes: Sequence[Sequence[Episode]]
  ) -> Sequence[Sequence[Sequence[float]]] | None:
    """See `Rules`."""
    function = getattr(self.maker.make, "policy_truth", None)
    if not function:
      return None
    try:
      known: list[list[list[float]]] = []
      for group, of_group in _pairs(episodes, function(rows, episodes), "groups"):
        known.append([])
        for episode, truths in _pairs(group, of_group, "episodes"):
          turns = _pairs(episode.turns, truths, "turns")
          number = lambda x: math.nan if x is None else as_number(x, "it returned")
          known[-1].append([number(x) for _, x in turns])
      return known
    except (Exception, SystemExit) as error:  # the user's code
      reason = f"{self.maker.name}.policy_truth raised {described(error)}"
      self.show(reason, escape_controls(traceback.format_exc()), "truth/turn_*/policy is left out")
      return None

  def player(self) -> Player:
    """Makes the environment of an episode, on a worker."""
    limits = self.limits
    return Player(self.maker, self._functions, self.schemas, limits.role, limits.parallel_calls)

  def checked(self, value: Any, what: str) -> Step:
    """Returns what `step` has returned, with shortened messages; on a worker."""
    step = checked_step(value, what)
    most = self.limits.max_observation_tokens
    shorten = lambda text: self.tokens.shorten(text, most, self.limits.truncate)
    given: Any = step.messages
    messages = [{**message, "content": shorten(message["content"])} for message in given]
    return dataclasses.replace(step, messages=messages)


def _pairs(of: Sequence[Any], values: Sequence[Any], what: str) -> Iterator[tuple[Any, Any]]:
  """Pairs things with what a user's function has returned for each."""
  if len(values) != len(of):
    raise ValueError(f"it returned {len(values)} {what}, not {len(of)}")
  return zip(of, values, strict=True)


def _finished(value: Any, what: str) -> Step:
  if isinstance(value, Step):
    return checked_step(value, what)
  return checked_step(Step(reward=0.0 if value is None else value), what)
