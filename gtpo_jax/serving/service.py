"""Starts requests: prompts in, choices out. It knows the protocol's objects, but not HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

import jax
import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.serving.answers import Answers, Choice
from gtpo_jax.serving.errors import ApiError, bad
from gtpo_jax.serving.generator import Full, Generator
from gtpo_jax.serving.jobs import Completion, ScoreJob
from gtpo_jax.serving.outputs import Output, Part, new_search
from gtpo_jax.serving.requests import ChatRequest, CompletionRequest, Sampling


class Job:
  """The choices of a request, and a queue of what the generator delivers for them."""

  def __init__(self, generator: Generator):
    self.choices: list[Choice] = []
    self.completions: list[Completion] = []
    self.scores: list[ScoreJob] = []
    self._generator = generator
    self._loop = asyncio.get_running_loop()
    self._queue: asyncio.Queue[tuple[int, bool, Part]] = asyncio.Queue()
    self._left = 0  # completions and scores that have not ended

  def receiver(self, index: int, scores: bool = False) -> Callable[[Part], None]:
    """Returns what takes the parts of a choice, on any thread."""

    def deliver(part: Part) -> None:
      try:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, scores, part))
      except RuntimeError:  # the loop is closed: the server ends
        return

    return deliver

  def start(self) -> None:
    """Passes everything on to the generator.

    Raises:
      ApiError: too much waits already.
    """
    try:
      self._generator.submit(self.completions, self.scores)
    except Full:
      raise ApiError(429, "the server is busy; try again later", code="queue_full") from None
    self._left = len(self.completions) + len(self.scores)

  async def parts(self) -> AsyncIterator[tuple[int, Part]]:
    """Yields (index of the choice, its next tokens) until all have ended.

    Raises:
      ApiError: generation has failed.
    """
    while self._left:
      index, scores, part = await self._queue.get()
      if part.finish == "error":
        raise ApiError(500, "generation has failed; try again")
      self._left -= bool(part.finish)
      if scores:
        self.choices[index].prefix = part
        continue
      self.choices[index].output.add(part)
      yield index, part

  def close(self) -> None:
    """Cancels what has not ended."""
    if self._left:
      self._generator.cancel([*self.completions, *self.scores])


class Service:
  """Starts the requests for one policy.

  Attributes:
    answers: writes the answers.
  """

  def __init__(self, name: str, chat: Chat, engine: Engine, generator: Generator):
    self.answers = Answers(name, chat)
    self._chat = chat
    self._engine = engine
    self._generator = generator

  def chat_job(self, request: ChatRequest) -> Job:
    """Starts a request to /v1/chat/completions.

    Raises:
      ApiError: it cannot be answered.
      UserError: the template does not accept the conversation.
    """
    prompt = self.answers.conversations.encode(request.messages, request.tools)
    return self._start([prompt], request.sampling)

  def completion_job(self, request: CompletionRequest) -> Job:
    """Starts a request to /v1/completions; see `chat_job`."""
    prompts = [self._ids(prompt) for prompt in request.prompts]
    return self._start(prompts, request.sampling, request.echo)

  def _ids(self, prompt: str | list[int]) -> list[int]:
    """Returns the ids of a prompt; its text may contain control tokens, as the client wants it."""
    if isinstance(prompt, str):
      start = self._chat.encode_text("")
      ids = self._chat.encode(prompt)
      return ids if ids[: len(start)] == start else start + ids
    vocab = self._engine.model.config.vocab_size
    if wrong := next((x for x in prompt if not 0 <= x < vocab), None):
      raise bad(f"prompt has the token id {wrong}, but ids are from 0 to {vocab - 1}", "prompt")
    return prompt

  def _start(self, prompts: list[list[int]], sampling: Sampling, echo: bool = False) -> Job:
    job = Job(self._generator)
    stop = new_search(self._chat, sampling.stop)
    seed = secrets.randbelow(2**32) if sampling.seed is None else sampling.seed
    keys = self._engine.completion_keys(jax.random.key(seed), 1, sampling.n)[0]
    # The key of a choice depends on its place in its prompt's choices only, unless it is drawn.
    for i, prompt in enumerate(prompts):
      limit = self._limit(prompt, sampling)
      if sampling.seed is None and i:
        seed = secrets.randbelow(2**32)
        keys = self._engine.completion_keys(jax.random.key(seed), 1, sampling.n)[0]
      for key in keys:
        index = len(job.choices)
        job.choices.append(Choice(prompt, Output(self._chat, stop)))
        if echo and sampling.log_probs and len(prompt) > 1:
          job.scores.append(ScoreJob(prompt, job.receiver(index, scores=True)))
        if limit:
          job.completions.append(
            Completion(
              prompt=prompt,
              key=np.asarray(key),
              limit=limit,
              sampling=(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
              wants_alternatives=bool(sampling.top),
              search=stop.search() if stop else None,
              deliver=job.receiver(index),
            )
          )
    job.start()
    return job

  def _limit(self, prompt: Sequence[int], sampling: Sampling) -> int:
    """Returns the most tokens of a completion of a prompt.

    Raises:
      ApiError: the prompt is empty or too long.
    """
    engine = self._engine
    context = engine.model.config.max_length
    longest = min(engine.max_prompt_tokens, context - 1)
    if not prompt:
      raise bad("the prompt has no token; give it some text", "prompt")
    if len(prompt) > longest:
      raise bad(
        f"the prompt has {len(prompt)} tokens, over this server's limit of {longest}; shorten it",
        code="context_length_exceeded",
      )
    most = min(engine.max_tokens, context - len(prompt))
    if sampling.max_tokens is not None and sampling.max_tokens > most:
      raise bad(
        f"max_tokens is {sampling.max_tokens}, but at most {most} can follow a prompt of "
        f"{len(prompt)} tokens here",
        "max_tokens",
        "context_length_exceeded",
      )
    return most if sampling.max_tokens is None else sampling.max_tokens
