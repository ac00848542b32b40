"""One episode of an agent: its clock, its requests and its end."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from gtpo_jax.environments.limits import EpisodeLimits
from gtpo_jax.environments.session import Key
from gtpo_jax.environments.turns import Episode, Result, Stop, Turn
from gtpo_jax.rollout.agents.calls import AgentCall
from gtpo_jax.rollout.agents.conversations import Conversation, Transcript
from gtpo_jax.serving.api_errors import ApiError
from gtpo_jax.serving.choices import Job
from gtpo_jax.serving.outputs import Part


@dataclasses.dataclass(frozen=True)
class Asked:
  """A completion goes on with a turn of one of its conversations.

  Attributes:
    group, index: the completion.
    conversation: the number of the conversation.
    tokens: what the policy reads first.
    limit: the most tokens of the turn.
    stop: strings that end it.
  """

  group: Any
  index: int
  conversation: int
  tokens: list[int]
  limit: int
  stop: tuple[str, ...]


class AgentSession:
  """An episode that goes on.

  The endpoint's thread adds requests; everything else happens on the thread of the runner.

  Attributes:
    key: the completion.
    number: names the call of the agent for the workers.
    call: the call of the agent.
    result: the episode, once it has ended.
    active: the request that is being answered, and its conversation.
    flooded: whether more requests came than turns are allowed.
    held: how the call has ended, while a request was being answered.
  """

  def __init__(
    self, key: Key, number: int, call: AgentCall, limits: EpisodeLimits, transcript: Transcript
  ):
    self.key = key
    self.number = number
    self.call = call
    self.result: Episode | None = None
    self.active: tuple[Job, Conversation] | None = None
    self.held: Any = None
    self._limits = limits
    self._transcript = transcript
    self._turns: list[Turn] = []
    self._drawn = 0
    self._lock = threading.Lock()
    self._waiting: collections.deque[Job] = collections.deque()
    self.flooded = False
    self._seconds = 0.0
    self._since: float | None = None  # when the agent got the word; None while it has not

  @property
  def time_left(self) -> float:
    """Seconds until the agent has to send its next request, or to return."""
    limits = self._limits
    return max(min(limits.step_timeout_s, limits.episode_timeout_s - self.seconds), 0.0)

  @property
  def seconds(self) -> float:
    """How long the agent has worked, without the time in which it waited for an answer."""
    return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

  def submit(self, job: Job) -> None:
    """Adds a request; on the endpoint's thread.

    Raises:
      ApiError: the episode has ended, or too many requests wait already.
    """
    with self._lock:
      if self.result is not None:
        raise _ended(self.result.stop)
      if self.flooded or len(self._waiting) >= self._limits.max_turns:
        self.flooded = True
        raise ApiError(429, f"the episode has reached env.max_turns = {self._limits.max_turns}")
      self._waiting.append(job)
      self.pause()

  def pause(self) -> None:
    """The agent waits for an answer."""
    self._seconds = self.seconds
    self._since = None

  def resume(self) -> bool:
    """The agent works, unless it waits for another answer; returns whether it does."""
    with self._lock:
      self._waiting = collections.deque(job for job in self._waiting if not job.cancelled)
      if self._waiting or self.active:
        return False
      self._seconds = self.seconds
      self._since = time.monotonic()
      return True

  def next_job(self) -> Job | None:
    """Returns the next request that somebody waits for, if there is one."""
    with self._lock:
      while self._waiting:
        job = self._waiting.popleft()
        if not job.cancelled:
          return job
    return None

  def ask(self, job: Job) -> Asked | Stop:
    """Begins to answer a request; returns the limit that it exceeds instead, if it exceeds one.

    Raises:
      ApiError, UserError: the model cannot read its messages.
      Limit: there is no space for them.
    """
    limits = self._limits
    if self.flooded or len(self._turns) >= limits.max_turns:
      return Stop.MAX_TURNS
    transcript = self._transcript
    conversation, ids = transcript.add(job.request, limits.max_conversations)
    left = transcript.tokens_left
    limit = min(job.request.sampling.max_tokens or left, left)
    asked = Asked(*self.key, conversation.number, ids, limit, job.request.sampling.stop)
    job.choices[0].prompt = transcript.prompt(conversation)
    self.active = (job, conversation)
    return asked

  def answer(
    self, tokens: Sequence[int], log_probs: Sequence[float], finished: bool
  ) -> Stop | None:
    """Ends the turn of the active request; returns the limit that the model has reached, if any."""
    job, conversation = self.active
    self.active = None
    part = Part(list(tokens), list(log_probs), [], "stop" if finished else "length")
    turn = self._transcript.answer(conversation, part.tokens, job.choices[0].output.text_with(part))
    left = self._transcript.tokens_left
    turn = dataclasses.replace(turn, index=len(self._turns), tokens_left=left)
    self._turns.append(turn)
    self._drawn += len(part.tokens)
    if not finished and not left:
      job.fail(_ended(Stop.MAX_TOKENS))
      return Stop.MAX_TOKENS
    calls = sum(len(turn.calls) for turn in self._turns)
    if calls > self._limits.max_calls:
      job.fail(_ended(Stop.MAX_CALLS))
      return Stop.MAX_CALLS
    job.deliver(part)
    return None

  def end(self, stop: Stop, reason: str, result: Result | None = None) -> Episode:
    """Ends the episode: further requests are refused, and those that wait get an error."""
    result = result or Result()
    if stop is Stop.ENV_DONE and not self._turns:
      stop = Stop.ENV_ERROR
      reason = "it returned without a request to its client"
    scored, correct = self._limits.verdict(stop, result.correct)
    reward = result.reward or 0.0
    with self._lock:
      self.pause()
      waiting, self._waiting = self._waiting, collections.deque()
      self.result = Episode(
        turns=tuple(self._turns),
        stop=stop,
        reward=reward,
        rewards=(*[0.0] * (len(self._turns) - 1), reward),
        correct=correct,
        scored=scored,
        tokens=self._drawn,
        seconds=self._seconds,
        info={"conversations": float(len(self._transcript.conversations)), **result.info},
        reason=reason,
      )
    for job in waiting:
      job.fail(_ended(stop))
    return self.result


def _ended(stop: str) -> ApiError:
  return ApiError(410, f"the episode has ended: {stop}", code="episode_ended")
