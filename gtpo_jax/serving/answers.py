"""Writes answers: the protocol's objects, whole or in parts, from the tokens of choices."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.serving.choices import Choice, Parts
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.outputs import LogProbs, Output, Part, joined
from gtpo_jax.serving.requests import ChatRequest, CompletionRequest, Sampling

Json = dict[str, Any]


class Answers:
  """Answers in the name of one model.

  Attributes:
    name: what clients call the model.
    created: when this was made, in seconds since 1970.
    conversations: makes messages of texts.
  """

  def __init__(self, name: str, chat: Chat):
    self.name = name
    self.created = int(time.time())
    self.conversations = Conversations(chat)
    self._chat = chat
    self._log_probs = LogProbs(chat)

  def model(self) -> Json:
    """Returns the description of the model."""
    return {"id": self.name, "object": "model", "created": self.created, "owned_by": "gtpo_jax"}

  def chat(self, request: ChatRequest, choices: Sequence[Choice]) -> Json:
    """Returns the whole answer once all choices have ended."""
    sampling = request.sampling
    answers = []
    for index, choice in enumerate(choices):
      message = self.conversations.message(choice.output.text, request.tools)
      called = "tool_calls" in message
      answer = {
        "index": index,
        "message": message,
        "logprobs": self._chat_log_probs(sampling, _part(choice.output)),
        "finish_reason": "tool_calls" if called else choice.output.finish,
      }
      if sampling.return_token_ids:
        answer["token_ids"] = choice.output.tokens
      answers.append(answer)
    answer = {
      **self._head("chat.completion"),
      "choices": answers,
      "usage": usage(choices, sampling),
    }
    if sampling.return_token_ids:
      answer["prompt_token_ids"] = list(choices[0].prompt)
    return answer

  def completion(self, request: CompletionRequest, choices: Sequence[Choice]) -> Json:
    """Returns the whole answer once all choices have ended."""
    sampling = request.sampling
    answers = []
    for index, choice in enumerate(choices):
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
      answers.append(answer)
    return {**self._head("text_completion"), "choices": answers, "usage": usage(choices, sampling)}

  async def chat_stream(
    self, request: ChatRequest, choices: Sequence[Choice], parts: Parts
  ) -> AsyncIterator[Json]:
    """Yields the answer in parts, while `parts` yields those of its choices."""
    sampling = request.sampling
    head = self._head("chat.completion.chunk")
    choice = lambda index, delta, finish=None: {
      "index": index,
      "delta": delta,
      "logprobs": None,
      "finish_reason": finish,
    }
    for index in range(len(choices)):
      first = {**head, "choices": [choice(index, {"role": "assistant", "content": ""})]}
      if sampling.return_token_ids:
        first["prompt_token_ids"] = list(choices[index].prompt)
      yield first
    async for index, part in parts:
      output = choices[index].output
      delta: Json = {}
      finish = part.finish or None
      if not request.tools:
        if text := output.new_text():
          delta["content"] = text
      elif finish:  # what a call is shows only at its end
        message = self.conversations.message(output.text, request.tools)
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
      yield {**head, "choices": [], "usage": usage(choices, sampling)}

  async def completion_stream(
    self, request: CompletionRequest, choices: Sequence[Choice], parts: Parts
  ) -> AsyncIterator[Json]:
    """Yields the answer in parts, while `parts` yields those of its choices."""
    sampling = request.sampling
    head = self._head("text_completion")
    offsets = [0] * len(choices)
    async for index, part in parts:
      log_probs = None
      if sampling.log_probs:
        log_probs = self._log_probs.completion_format(part, sampling.top, offsets[index])
        offsets[index] += sum(map(len, log_probs["tokens"]))
      answer = {
        "index": index,
        "text": choices[index].output.new_text(),
        "logprobs": log_probs,
        "finish_reason": part.finish or None,
      }
      if sampling.return_token_ids:
        answer["token_ids"] = part.tokens
      yield {**head, "choices": [answer]}
    if sampling.include_usage:
      yield {**head, "choices": [], "usage": usage(choices, sampling)}

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


def usage(choices: Sequence[Choice], sampling: Sampling) -> Json:
  """Returns the numbers of tokens of a request; a prompt counts once for all its choices."""
  prompt = sum(len(choice.prompt) for choice in choices[:: sampling.n])
  completion = sum(len(choice.output.tokens) for choice in choices)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def _part(output: Output) -> Part:
  return Part(output.tokens, output.log_probs, output.alternatives, output.finish)
