"""Starts requests: prompts in, choices out. It knows the protocol's objects, but not HTTP."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Sequence

import jax
import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.sampling.completion import Prompt
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.serving.answers import Answers
from gtpo_jax.serving.choices import NOTHING, Choice, Job, new_search
from gtpo_jax.serving.generator import Full, Generator, ScoreJob, ServedCompletion
from gtpo_jax.serving.requests import ApiError, ChatRequest, CompletionRequest, bad

PIECE_CHARS = 65_536  # of a text that is encoded at once to see whether it is too long
CUT_TOKENS = 16  # by which a piece of a text may have more tokens than it has within the text


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

  def chat_job(self, request: ChatRequest, loop: asyncio.AbstractEventLoop) -> Job:
    """Starts a request to /v1/chat/completions.

    Args:
      request: what was asked.
      loop: the event loop that reads the answer. This may be another thread's.
    """
    self._check_space(request.n)
    for message in request.messages:
      if message["role"] != "assistant":  # of whose messages a template may leave out a part
        self._check_length(message["content"])
    encode = self.answers.conversations.encode
    prompt = encode(request.messages, request.tools, request.chat_template_kwargs)
    return self._start(request, [prompt], loop)

  def completion_job(self, request: CompletionRequest, loop: asyncio.AbstractEventLoop) -> Job:
    """Starts a request to /v1/completions; see `chat_job`."""
    self._check_space(len(request.prompt) * request.n)
    prompts = [self._ids(prompt) for prompt in request.prompt]
    return self._start(request, prompts, loop, request.echo)

  @property
  def _longest(self) -> int:
    """The most tokens of a prompt."""
    return min(self._engine.max_prompt_tokens, self._engine.model.config.max_length - 1)

  def _check_space(self, count: int) -> None:
    """Raises ApiError if so many completions never fit, before their prompts are encoded."""
    if count > self._generator.capacity:
      raise _busy()

  def _check_length(self, text: str) -> None:
    """Raises ApiError if a text is far too long, without encoding all of it."""
    if len(text) <= PIECE_CHARS:
      return
    least = 0
    for start in range(0, len(text), PIECE_CHARS):
      piece = self._chat.encode(text[start : start + PIECE_CHARS])
      least += max(len(piece) - CUT_TOKENS, 0)
      if least > self._longest:
        raise bad(
          f"the prompt has more than {least} tokens, over this server's limit of {self._longest}; "
          "shorten it",
          code="context_length_exceeded",
        )

  def _ids(self, prompt: str | list[int]) -> list[int]:
    """Returns the ids of a prompt; its text may contain control tokens, as the client wants it."""
    if isinstance(prompt, str):
      self._check_length(prompt)
      start = self._chat.encode_text("")
      ids = self._chat.encode(prompt)
      return ids if ids[: len(start)] == start else start + ids
    vocab = self._engine.model.config.vocab_size
    if wrong := next((x for x in prompt if not 0 <= x < vocab), None):
      raise bad(f"prompt has the token id {wrong}, but ids are from 0 to {vocab - 1}", "prompt")
    return prompt

  def _start(
    self,
    request: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    loop: asyncio.AbstractEventLoop,
    echo: bool = False,
  ) -> Job:
    completions: list[ServedCompletion] = []
    scores: list[ScoreJob] = []
    job = Job(request, lambda: self._generator.cancel([*completions, *scores]), loop)
    stop = new_search(self._chat, request.stop)
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    keys = self._engine.completion_keys(jax.random.key(seed), 1, request.n)[0]
    # The key of a choice depends on its place in its prompt's choices only, unless it is drawn.
    for i, prompt in enumerate(prompts):
      limit = self._limit(prompt, request.limit)
      if request.seed is None and i:
        seed = secrets.randbelow(2**32)
        keys = self._engine.completion_keys(jax.random.key(seed), 1, request.n)[0]
      for key in keys:
        deliver = functools.partial(job.deliver, index=len(job.choices))
        job.choices.append(Choice(prompt, self._chat, stop))
        if echo and request.top is not None and len(prompt) > 1:
          scores.append(ScoreJob(prompt, functools.partial(deliver, prefix=True)))
        elif echo and request.top is not None:
          job.choices[-1].prefix = NOTHING._replace(finish="stop")  # the only token has no log-prob
        if limit:
          completions.append(
            ServedCompletion(
              prompt=Prompt(prompt),
              key=np.asarray(key),
              limit=limit,
              sampling=request.sampling,
              stop=stop,
              deliver=deliver,
            )
          )
    job.left = len(completions) + len(scores)
    try:
      self._generator.submit(completions, scores)
    except Full:
      raise _busy() from None
    return job

  def _limit(self, prompt: Sequence[int], wanted: int | None) -> int:
    """Returns the most tokens of a completion of a prompt."""
    engine = self._engine
    context = engine.model.config.max_length
    longest = self._longest
    if not prompt:
      raise bad("the prompt has no token; give it some text", "prompt")
    if len(prompt) > longest:
      raise bad(
        f"the prompt has {len(prompt)} tokens, over this server's limit of {longest}; shorten it",
        code="context_length_exceeded",
      )
    most = min(engine.max_tokens, context - len(prompt))
    if wanted is not None and wanted > most:
      raise bad(
        f"max_tokens is {wanted}, but at most {most} can follow a prompt of "
        f"{len(prompt)} tokens here",
        "max_tokens",
        "context_length_exceeded",
      )
    return most if wanted is None else wanted


def _busy() -> ApiError:
  return ApiError(429, "the server is busy; try again later", code="queue_full")
