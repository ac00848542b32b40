"""An episode of an agent: the policy answers the requests that it sends to the endpoint."""

from __future__ import annotations

import collections
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.records import user
from gtpo_jax.environments.environment import name_of
from gtpo_jax.environments.episodes import Group, Playing, Rules
from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.parsers import parser_for
from gtpo_jax.environments.tokens import TurnTokens
from gtpo_jax.environments.turns import Episode, Result, Stop, Turn
from gtpo_jax.environments.workers import Outcome
from gtpo_jax.environments.writers import Call, Drawn, End, Writer, wait_for
from gtpo_jax.rollout.agents.calls import Agent, AgentCall
from gtpo_jax.rollout.agents.conversations import Conversation, Transcript
from gtpo_jax.rollout.agents.endpoint import Endpoint
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.serving.choices import Job, Part
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.requests import ApiError, one_line


class Requests:
  """The requests of an agent that wait, and its clock, which stands still while any does.

  The endpoint's thread adds requests, and others answer them.
  """

  def __init__(self, limits: EpisodeLimits, limit_call: Callable[[float], None]):
    """Args:
    limits: the limits.
    limit_call: sets how many seconds the call of the agent may still take.
    """
    self.flooded = False  # more came than turns are allowed
    self._limits = limits
    self._limit_call = limit_call
    self._lock = threading.Lock()
    self._waiting: collections.deque[Job] = collections.deque()
    self._ended = ""
    self._seconds = 0.0
    self._since: float | None = None  # when the agent began to work; None while it waits

  def add(self, job: Job) -> None:
    """Adds a request.

    Raises:
      ApiError: the episode has ended, or too many requests wait already.
    """
    with self._lock:
      if self._ended:
        raise _gone(self._ended)
      if self.flooded or len(self._waiting) >= self._limits.max_turns:
        self.flooded = True
        raise ApiError(429, f"the episode has reached env.max_turns = {self._limits.max_turns}")
      self._waiting.append(job)
      self._pause()
      self._limit_call(math.inf)

  def next(self) -> Job | None:
    """Returns the next request that somebody waits for, if there is one."""
    with self._lock:
      while self._waiting:
        job = self._waiting.popleft()
        if not job.cancelled:
          return job
    return None

  def answered(self) -> None:
    """The request that was returned last has its answer: the agent works, unless others wait."""
    limits = self._limits
    with self._lock:
      self._waiting = collections.deque(job for job in self._waiting if not job.cancelled)
      if not self._waiting:
        self._pause()
        self._since = time.monotonic()
        left = min(limits.step_timeout_s, limits.episode_timeout_s - self._seconds)
        self._limit_call(max(left, 0.0))

  def end(self, stop: Stop) -> float:
    """Refuses pending and further requests; returns how many seconds the agent worked."""
    with self._lock:
      self._ended = self._ended or stop
      self._pause()
      waiting, self._waiting = self._waiting, collections.deque()
    for job in waiting:
      job.fail(_gone(stop))
    return self._seconds

  def _pause(self) -> None:
    if self._since is not None:
      self._seconds += time.monotonic() - self._since
      self._since = None


class AgentEpisode(Playing):
  """An episode of an agent, which runs on a worker: the policy answers its requests."""

  def __init__(
    self,
    rules: Agents,
    key: tuple[Group, int],
    writer: Writer,
    call: AgentCall,
    transcript: Transcript,
  ):
    """Args:
    rules: of the run.
    key, writer: see `Playing`.
    call: of the agent.
    transcript: has the conversations.
    """
    super().__init__(key, writer)
    self.requests = Requests(rules.limits, lambda seconds: rules.workers.limit(self, seconds))
    self._rules = rules
    self._call = call
    self._transcript = transcript
    self._turns: list[Turn] = []

  async def play(self) -> Episode:
    """Answers requests one after another, until the agent returns or exceeds a limit."""
    self.writer.begin("", "")
    await wait_for(Call(self._run, math.inf))
    try:
      while not self.outcome:
        if job := self.requests.next():
          await self._answer(job)
        elif self.requests.flooded:
          raise End(Stop.MAX_TURNS)
        else:
          await wait_for(None)
    except End as end:
      return self._episode(end)
    return self._episode(self._end_of(self.outcome), self.outcome.value)

  async def close(self) -> None:
    """Cancels the agent if it still works, and refuses its requests."""
    self._rules.forget(self._call.key)
    self.requests.end(Stop.ENV_ERROR)
    if not self.outcome:
      self._call.cancel()
      self._rules.workers.limit(self, self._rules.limits.step_timeout_s)
    while not self.outcome:
      await wait_for(None)

  def _run(self) -> Result:
    """Calls the agent, on a worker."""
    self.requests.answered()  # none waits: the agent works
    return self._call.run()

  async def _answer(self, job: Job) -> None:
    """Answers a request with a turn of the policy."""
    try:
      if read := self._read(job):
        conversation, tokens = read
        left = self._transcript.tokens_left
        limit = min(job.request.limit or left, left)
        drawn = await self.writer.turn(tokens, conversation.number, limit, job.request.stop)
        job.deliver(self._take(job, conversation, drawn))
    except End as end:
      job.fail(_gone(end.stop))
      raise
    self.requests.answered()

  def _read(self, job: Job) -> tuple[Conversation, list[int]] | None:
    """Returns the conversation of a request and the tokens of its new messages.

    None if the model cannot read them; then the request fails.
    """
    limits = self._rules.limits
    if self.requests.flooded or len(self._turns) >= limits.max_turns:
      raise End(Stop.MAX_TURNS)
    try:
      conversation, tokens = self._transcript.add(job.request, limits.max_conversations)
    except (ApiError, UserError) as error:
      job.fail(error if isinstance(error, ApiError) else one_line(error))
      return None
    job.choices[0].prompt = self._transcript.prompt(conversation)
    return conversation, tokens

  def _take(self, job: Job, conversation: Conversation, drawn: Drawn) -> Part:
    """Adds a turn of the policy, and returns what answers its request."""
    part = Part(drawn.tokens, drawn.log_probs, [], "stop" if drawn.finished else "length")
    text = job.choices[0].text(part)
    turn = self._transcript.answer(conversation, part.tokens, text)
    left = self._transcript.tokens_left
    self._turns.append(dataclasses.replace(turn, index=len(self._turns), tokens_left=left))
    if not drawn.finished and not left:
      raise End(Stop.MAX_TOKENS)
    if sum(len(turn.calls) for turn in self._turns) > self._rules.limits.max_calls:
      raise End(Stop.MAX_CALLS)
    return part

  def _end_of(self, outcome: Outcome) -> End:
    """Returns how an agent that has returned ends its episode."""
    name = self._rules.name
    limits = self._rules.limits
    if outcome.timed_out:
      return End(
        Stop.TIMEOUT,
        f"{name} took longer than env.step_timeout_s = {limits.step_timeout_s:g} or "
        f"what was left of env.episode_timeout_s = {limits.episode_timeout_s:g}",
      )
    if outcome.error:
      return End(Stop.ENV_ERROR, f"{name} raised {outcome.error.removeprefix('AgentFailed: ')}")
    if not self._turns:
      return End(Stop.ENV_ERROR, "it returned without a request to its client")
    return End(Stop.ENV_DONE)

  def _episode(self, end: End, result: Result | None = None) -> Episode:
    """Returns the episode, and prints what went wrong."""
    result = result or Result()
    seconds = self.requests.end(end.stop)
    if end.reason:
      self._rules.show(end.reason)
    scored, correct = self._rules.limits.verdict(end.stop, result.correct)
    reward = result.reward or 0.0
    conversations = float(len(self._transcript.conversations))
    return Episode(
      turns=tuple(self._turns),
      stop=end.stop,
      reward=reward,
      rewards=(*[0.0] * (len(self._turns) - 1), reward),
      correct=correct,
      scored=scored,
      tokens=self._transcript.drawn,
      seconds=seconds,
      info={"conversations": conversations, **result.info},
      reason=end.reason,
    )


class Agents(Rules):
  """What the episodes of an agent have in common.

  Attributes:
    start: the token ids with which every conversation begins.
    name: of the agent, for messages.
  """

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
    super().__init__(limits)
    self.start = _common_start(chat)
    self.name = f"agent {name_of(agent)}"
    self._chat = chat
    self._agent = agent
    self._max_tokens = max_tokens
    self._stop = tuple(stop)
    self._turn_tokens = TurnTokens(chat, ["user"])
    self._codec = Conversations(chat, None if parser == "auto" else parser_for(parser, chat))
    self._endpoint: Endpoint | None = None
    self._episodes: dict[str, AgentEpisode] = {}  # in flight, by their API keys

  def episode(
    self, key: tuple[Group, int], writer: Writer, row: Mapping[str, Any], seed: int
  ) -> AgentEpisode:
    """See `Rules`."""
    if self._endpoint is None:
      self._endpoint = Endpoint(self._chat, self._stop, self._submit)
    token = secrets.token_urlsafe(24)
    call = AgentCall(self._agent, row, seed, self._endpoint.url, token)
    transcript = Transcript(self._codec, self._turn_tokens, self.start, self._max_tokens)
    self._episodes[token] = AgentEpisode(self, key, writer, call, transcript)
    return self._episodes[token]

  def apart(self) -> Agents:
    """See `Rules`; the endpoint is not shared."""
    other = super().apart()
    other._endpoint = None
    other._episodes = {}
    del other.close
    return other

  def forget(self, key: str) -> None:
    """Forgets an episode that has ended."""
    self._episodes.pop(key, None)

  def close(self) -> None:
    """Ends the endpoint."""
    if self._endpoint:
      self._endpoint.close()
      self._endpoint = None

  def _submit(self, key: str, job: Job) -> None:
    """Takes a request; on the endpoint's thread."""
    episode = self._episodes.get(key)
    if episode is None:
      raise ApiError(401, "no episode has this API key; use the client's", code="invalid_api_key")
    try:
      episode.requests.add(job)
    finally:
      self.news.append(episode)
      self.workers.wake()


def _gone(stop: str) -> ApiError:
  return ApiError(410, f"the episode has ended: {stop}", code="episode_ended")


def _common_start(chat: Chat) -> list[int]:
  """Returns the token with which every conversation begins."""
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
