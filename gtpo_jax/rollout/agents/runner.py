"""Runs many agents at once: passes their requests on, and ends their episodes.

It has the interface of `EpisodeRunner` as far as a driver needs it. Instead of an environment's
answers, `poll` returns the requests of agents.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.records import user
from gtpo_jax.environments.environment import name_of
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.parsers import parser_for
from gtpo_jax.environments.runner import Failures
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.environments.turns import Ended, Episode, Group, Opened, Result, Stop
from gtpo_jax.environments.workers import Outcome, Workers
from gtpo_jax.rollout.agents.calls import Agent, AgentCall
from gtpo_jax.rollout.agents.conversations import Limit, Transcript
from gtpo_jax.rollout.agents.endpoint import Endpoint
from gtpo_jax.rollout.agents.session import AgentSession, Asked
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.serving.choices import Job
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.requests import one_line

Event = Opened | Asked | Ended


class AgentRunner:
  """Runs the episodes of an agent.

  Attributes:
    schemas: (): an agent shows its own tools.
    limits: the limits.
    start: the token ids with which every conversation begins.
  """

  schemas = ()

  def __init__(
    self,
    chat: Chat,
    agent: Agent,
    limits: EpisodeLimits,
    parser: str,
    max_tokens: int,
    stop: Sequence[str] = (),
  ):
    """Args:
    chat: the tokenizer and its template.
    agent: the user's function.
    limits: the limits.
    parser: how the model writes calls, from `PARSERS`, or "auto".
    max_tokens: the most tokens of an episode, prompts included.
    stop: strings that end every turn.

    Raises:
      UserError: conversations have no common beginning with this chat template, or their tokens
        cannot be continued.
    """
    self.limits = limits
    self.start = _common_start(chat)
    self._chat = chat
    self._agent = agent
    self._name = f"agent {name_of(agent)}"
    self._max_tokens = max_tokens
    self._stop = tuple(stop)
    self._turn_tokens = TurnTokens(chat, ["user"])
    self._codec = Conversations(chat, None if parser == "auto" else parser_for(parser, chat))
    self._workers = Workers(limits.workers)
    self._endpoint: Endpoint | None = None
    self._groups: dict[Group, list[AgentSession]] = {}
    self._calls: dict[int, AgentSession] = {}  # those whose agents run, by number
    self._by_token: dict[str, AgentSession] = {}
    self._count = itertools.count()
    self._lock = threading.Lock()
    self._new: list[AgentSession] = []  # those with new requests
    self._events: list[Event] = []
    self._show = Failures().show

  @property
  def abandoned(self) -> int:
    """How many agents were abandoned because they took too long."""
    return self._workers.abandoned

  def begin(self, group: Group, row: Mapping[str, Any], seed: int, size: int) -> None:
    """Prepares the episodes of a prompt, until `play` begins them; see `EpisodeRunner.begin`."""
    if self._endpoint is None:
      self._endpoint = Endpoint(self._chat, self._stop, self._submit)
    self._groups[group] = [self._session((group, i), row, seed) for i in range(size)]
    self._events.append(Opened(group, ""))

  def play(self, groups: Sequence[Group]) -> None:
    """Calls the agents of groups; requests follow as events."""
    for session in itertools.chain.from_iterable(self._groups[group] for group in groups):
      self._calls[session.number] = session
      self._workers.submit(session.number, functools.partial(self._run, session), math.inf)

  def _session(self, key: tuple[Group, int], row: Mapping[str, Any], seed: int) -> AgentSession:
    token = secrets.token_urlsafe(24)
    call = AgentCall(self._agent, row, seed, self._endpoint.url, token)
    transcript = Transcript(self._codec, self._turn_tokens, self.start, self._max_tokens)
    number = next(self._count)
    session = AgentSession(key, number, call, self.limits, transcript)
    self._by_token[token] = session
    return session

  def _run(self, session: AgentSession) -> Result:
    """Runs an agent; on a worker."""
    session.resume()
    self._workers.limit(session.number, session.time_left)
    return session.call.run()

  def _submit(self, token: str, job: Job) -> None:
    """Takes a request; on the endpoint's thread."""
    session = self._by_token.get(token)
    if session is None:
      raise ApiError(401, "no episode has this API key; use the client's", code="invalid_api_key")
    try:
      session.submit(job)
      self._workers.limit(session.number, math.inf)
    finally:
      with self._lock:
        self._new.append(session)
      self._workers.wake()

  def episodes(self, group: Group) -> list[Episode | None]:
    """Returns the episode of each completion; None for those that go on."""
    return [session.result for session in self._groups[group]]

  def end_turn(
    self,
    group: Group,
    index: int,
    tokens: Sequence[int],
    finished: bool,
    log_probs: Sequence[float],
  ) -> None:
    """Takes the turn of the request that `poll` has returned last for a completion.

    Args:
      group: the prompt.
      index: the completion.
      tokens: what the model has drawn.
      finished: whether it ended by itself; False if it was cut off.
      log_probs: of the tokens, nats, under softmax(logits).
    """
    session = self._groups[group][index]
    if stop := session.answer(tokens, log_probs, finished):
      self._end(session, stop)
    elif session.held:
      self._take(session, session.held)
    elif session.resume():
      self._workers.limit(session.number, session.time_left)
    else:
      self._ask(session)

  def poll(self) -> list[Event]:
    """Returns what has happened since the last poll.

    Raises:
      FunctionError: an agent raised KeyboardInterrupt or the like.
      RunError: too many agents hang.
    """
    for outcome in self._workers.poll():
      self._take(self._calls.pop(outcome.key), outcome)
    with self._lock:
      new, self._new = self._new, []
    for session in dict.fromkeys(new):
      self._ask(session)
    events, self._events = self._events, []
    return events

  def wait(self, timeout_s: float) -> None:
    """Waits until a poll may have events, at most `timeout_s` seconds."""
    if not self._events:
      self._workers.wait(timeout_s)

  def discard(self, group: Group) -> None:
    """Forgets a group, if there is one, and cancels the agents that still run."""
    for session in self._groups.pop(group, ()):
      if session.result is None:
        session.end(Stop.ENV_ERROR, "it was discarded")
      self._leave(session)

  def close(self, timeout_s: float = 5.0) -> None:
    """Discards all groups, and gives their agents some time to end."""
    for group in list(self._groups):
      self.discard(group)
    until = time.monotonic() + timeout_s
    while self._calls and time.monotonic() < until:
      self.wait(until - time.monotonic())
      self.poll()
    if self._endpoint:
      self._endpoint.close()
      self._endpoint = None

  def _ask(self, session: AgentSession) -> None:
    """Begins to answer the next request of an agent that can be answered."""
    while session.result is None and session.active is None and (job := session.next_job()):
      try:
        asked = session.ask(job)
      except (ApiError, UserError) as error:
        job.fail(error if isinstance(error, ApiError) else one_line(error))
        if session.resume():
          self._workers.limit(session.number, session.time_left)
        continue
      except Limit as limit:
        asked = limit.stop
      if isinstance(asked, Asked):
        self._events.append(asked)
        return
      job.fail(ApiError(410, f"the episode has ended: {asked}", code="episode_ended"))
      self._end(session, asked)
    if session.result is None and session.flooded and session.active is None:
      self._end(session, Stop.MAX_TURNS)

  def _take(self, session: AgentSession, outcome: Outcome) -> None:
    """Ends an episode whose agent has returned, once its turn has ended."""
    if session.result is not None:
      return
    if session.active:
      session.held = outcome
      return
    reason = ""
    stop = Stop.ENV_DONE
    if outcome.timed_out:
      stop = Stop.TIMEOUT
      reason = (
        f"{self._name} took longer than env.step_timeout_s = {self.limits.step_timeout_s:g} or "
        f"what was left of env.episode_timeout_s = {self.limits.episode_timeout_s:g}"
      )
    elif outcome.error:
      stop = Stop.ENV_ERROR
      reason = f"{self._name} raised {outcome.error.removeprefix('AgentFailed: ')}"
    self._end(session, stop, reason, outcome.value)

  def _end(
    self, session: AgentSession, stop: Stop, reason: str = "", result: Result | None = None
  ) -> None:
    episode = session.end(stop, reason, result)
    if episode.reason:
      self._show(episode.reason)
    self._events.append(Ended(*session.key, episode))
    self._leave(session)

  def _leave(self, session: AgentSession) -> None:
    """Cancels the agent of an episode that has ended, if it still runs."""
    self._by_token.pop(session.call.key, None)
    if session.number in self._calls:
      session.call.cancel()
      self._workers.limit(session.number, self.limits.step_timeout_s)


def _common_start(chat: Chat) -> list[int]:
  """Returns the token with which every conversation begins.

  Raises:
    UserError: there is none.
  """
  question = user("x")
  first = chat.encode_prompt(question)[0]
  try:
    other = chat.encode_prompt([{"role": "system", "content": "y"}, *question])[0]
  except UserError:  # the template has no system messages
    other = first
  if first != other:
    raise UserError(
      f"{chat.template.name} does not begin every conversation with the same token, which an agent "
      "needs; use another tokenizer"
    )
  return [first]
