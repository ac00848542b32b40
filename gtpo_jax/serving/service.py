"""Answers requests: prompts in, choices out. It knows the protocol's objects, but not HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.data.chat import Chat
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.errors import ApiError, bad
from gtpo_jax.serving.generator import Full, Generator
from gtpo_jax.serving.jobs import Completion, Part, ScoreJob
from gtpo_jax.serving.outputs import LogProbs, Output, joined, new_search
from gtpo_jax.serving.requests import ChatRequest, CompletionRequest, Sampling

RETRY_AFTER_S = 1
Json = dict[str, Any]


class Choice:
  """One choice of a request while it is generated.

  Attributes:
    prompt: the ids of its prompt.
    output: what has arrived of it.
    prefix: the log-probs of its prompt, if they were asked for.
  """

  def __init__(self, prompt: Sequence[int], output: Output):
    self.prompt = prompt
    self.output = output
    self.prefix: Part | None = None


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
  """Answers requests for one policy.

  Attributes:
    name: what clients call the model.
    created: when the server began, in seconds since 1970.
  """

  def __init__(self, name: str, chat: Chat, engine: Engine, generator: Generator):
    self.name = name
    self.created = int(time.time())
    self._chat = chat
    self._engine = engine
    self._generator = generator
    self._conversations = Conversations(chat)
    self._log_probs = LogProbs(chat)

  def chat_job(self, request: ChatRequest) -> Job:
    """Starts a request to /v1/chat/completions.

    Raises:
      ApiError: it cannot be answered.
      UserError: the template does not accept the conversation.
    """
    prompt = self._conversations.encode(request.messages, request.tools)
    return self._start([prompt], request.sampling)

  def completion_job(self, request: CompletionRequest) -> Job:
    """Starts a request to /v1/completions; see `chat_job`."""
    prompts = [self._ids(prompt) for prompt in request.prompts]
    return self._start(prompts, request.sampling, request.echo)

  def chat_answer(self, request: ChatRequest, job: Job) -> Json:
    """Returns the whole answer once all choices have ended."""
    sampling = request.sampling
    choices = []
    for index, choice in enumerate(job.choices):
      message = self._conversations.message(choice.output.text, request.tools)
      called = "tool_calls" in message
      answer = {
        "index": index,
        "message": message,
        "logprobs": self._chat_log_probs(sampling, _part(choice.output)),
        "finish_reason": "tool_calls" if called else choice.output.finish,
      }
      if sampling.return_token_ids:
        answer["token_ids"] = choice.output.tokens
      choices.append(answer)
    answer = {**self._head("chat.completion"), "choices": choices, "usage": usage(job, sampling)}
    if sampling.return_token_ids:
      answer["prompt_token_ids"] = list(job.choices[0].prompt)
    return answer

  def completion_answer(self, request: CompletionRequest, job: Job) -> Json:
    """Returns the whole answer once all choices have ended."""
    sampling = request.sampling
    choices = []
    for index, choice in enumerate(job.choices):
      output = choice.output
      text = output.text
      part = _part(output)
      first = None
      if request.echo:
        given = request.prompts[index // sampling.n]
        text = (given if isinstance(given, str) else self._chat.decode([given])[0]) + text
        if choice.prefix:
          first = choice.prompt[0]
          part = joined(choice.prefix, part)
      log_probs = None
      if sampling.log_probs:
        log_probs = self._log_probs.completion_format(part, sampling.top, first=first)
      answer = {
        "index": index,
        "text": text,
        "logprobs": log_probs,
        "finish_reason": output.finish or "length",
      }
      if sampling.return_token_ids:
        answer |= {"prompt_token_ids": list(choice.prompt), "token_ids": output.tokens}
      choices.append(answer)
    return {**self._head("text_completion"), "choices": choices, "usage": usage(job, sampling)}

  async def chat_stream(self, request: ChatRequest, job: Job) -> AsyncIterator[Json]:
    """Yields the answer in parts."""
    sampling = request.sampling
    head = self._head("chat.completion.chunk")
    choice = lambda index, delta, finish=None: {
      "index": index,
      "delta": delta,
      "logprobs": None,
      "finish_reason": finish,
    }
    for index in range(len(job.choices)):
      first = {**head, "choices": [choice(index, {"role": "assistant", "content": ""})]}
      if sampling.return_token_ids:
        first["prompt_token_ids"] = list(job.choices[index].prompt)
      yield first
    async for index, part in job.parts():
      output = job.choices[index].output
      delta: Json = {}
      finish = part.finish or None
      if not request.tools:
        if text := output.new_text():
          delta["content"] = text
      elif finish:  # what a call is shows only at its end
        message = self._conversations.message(output.text, request.tools)
        delta = {key: message[key] for key in message.keys() - {"role", "refusal"}}
        if calls := delta.get("tool_calls"):
          delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
          finish = "tool_calls"
      answer = choice(index, delta, finish)
      answer["logprobs"] = self._chat_log_probs(sampling, part)
      if sampling.return_token_ids:
        answer["token_ids"] = part.tokens
      yield {**head, "choices": [answer]}
    if sampling.include_usage:
      yield {**head, "choices": [], "usage": usage(job, sampling)}

  async def completion_stream(self, request: CompletionRequest, job: Job) -> AsyncIterator[Json]:
    """Yields the answer in parts."""
    sampling = request.sampling
    head = self._head("text_completion")
    offsets = [0] * len(job.choices)
    async for index, part in job.parts():
      log_probs = None
      if sampling.log_probs:
        log_probs = self._log_probs.completion_format(part, sampling.top, offsets[index])
        offsets[index] += sum(map(len, log_probs["tokens"]))
      answer = {
        "index": index,
        "text": job.choices[index].output.new_text(),
        "logprobs": log_probs,
        "finish_reason": part.finish or None,
      }
      if sampling.return_token_ids:
        answer["token_ids"] = part.tokens
      yield {**head, "choices": [answer]}
    if sampling.include_usage:
      yield {**head, "choices": [], "usage": usage(job, sampling)}

  def _head(self, kind: str) -> Json:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
      "id": f"{prefix}-{secrets.token_hex(12)}",
      "object": kind,
      "created": int(time.time()),
      "model": self.name,
    }

  def _chat_log_probs(self, sampling: Sampling, part: Part) -> Json | None:
    return self._log_probs.chat_format(part, sampling.top) if sampling.log_probs else None

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


def usage(job: Job, sampling: Sampling) -> Json:
  """Returns the numbers of tokens of a request; a prompt counts once for all its choices."""
  prompt = sum(len(choice.prompt) for choice in job.choices[:: sampling.n])
  completion = sum(len(choice.output.tokens) for choice in job.choices)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def _part(output: Output) -> Part:
  return Part(output.tokens, output.log_probs, output.alternatives, output.finish)
