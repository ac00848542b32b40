"""Writes answers: the protocol's objects, whole or in parts, from the tokens of choices."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gtpo_jax.data.chat import Chat
from gtpo_jax.data.text_stream import REPLACEMENT
from gtpo_jax.serving.choices import Choice, Part, Parts, joined
from gtpo_jax.serving.conversation import Conversations
from gtpo_jax.serving.requests import ChatRequest, CompletionRequest, Request

Json = dict[str, Any]
LOWEST = -9999.0  # JSON has no infinity; what the protocol writes for a token of probability 0


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
    answers = []
    for index, choice in enumerate(choices):
      message = self.conversations.message(choice.text(), request.tools)
      finish = "tool_calls" if "tool_calls" in message else choice.output.finish
      answers.append(self._choice(request, index, choice.output, finish) | {"message": message})
    answer = {**self._head("chat.completion"), "choices": answers, "usage": usage(choices, request)}
    if request.return_token_ids:
      answer["prompt_token_ids"] = list(choices[0].prompt)
    return answer

  def completion(self, request: CompletionRequest, choices: Sequence[Choice]) -> Json:
    """Returns the whole answer once all choices have ended."""
    answers = []
    for index, choice in enumerate(choices):
      text = choice.text()
      part = choice.output
      first = None
      if request.echo:
        given = request.prompt[index // request.n]
        text = (given if isinstance(given, str) else self._chat.decode([given])[0]) + text
        if choice.prefix:
          first = choice.prompt[0]
          part = joined(choice.prefix, part)
      answer = self._choice(request, index, choice.output, choice.output.finish or "length")
      answer["text"] = text
      if request.top is not None:
        answer["logprobs"] = self._log_probs.completion_format(part, request.top, first=first)
      if request.return_token_ids:
        answer["prompt_token_ids"] = list(choice.prompt)
      answers.append(answer)
    return {**self._head("text_completion"), "choices": answers, "usage": usage(choices, request)}

  async def chat_stream(
    self, request: ChatRequest, choices: Sequence[Choice], parts: Parts
  ) -> AsyncIterator[Json]:
    """Yields the answer in parts, while `parts` yields those of its choices."""
    head = self._head("chat.completion.chunk")
    for index, choice in enumerate(choices):
      answer = {"index": index, "logprobs": None, "finish_reason": None}
      first = {**head, "choices": [answer | {"delta": {"role": "assistant", "content": ""}}]}
      if request.return_token_ids:
        first["prompt_token_ids"] = list(choice.prompt)
      yield first
    async for index, part in parts:
      choice = choices[index]
      delta: Json = {}
      finish = part.finish or None
      if not request.tools:
        if text := choice.new_text():
          delta["content"] = text
      elif finish:  # what a call is shows only at its end
        message = self.conversations.message(choice.text(), request.tools)
        delta = {key: message[key] for key in message.keys() - {"role", "refusal"}}
        if calls := delta.get("tool_calls"):
          delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
          finish = "tool_calls"
      answer = self._choice(request, index, part, finish) | {"delta": delta}
      yield {**head, "choices": [answer]}
    if request.stream_options.include_usage:
      yield {**head, "choices": [], "usage": usage(choices, request)}

  async def completion_stream(
    self, request: CompletionRequest, choices: Sequence[Choice], parts: Parts
  ) -> AsyncIterator[Json]:
    """Yields the answer in parts, while `parts` yields those of its choices."""
    head = self._head("text_completion")
    offsets = [0] * len(choices)
    async for index, part in parts:
      answer = self._choice(request, index, part, part.finish or None)
      answer["text"] = choices[index].new_text()
      if request.top is not None:
        log_probs = self._log_probs.completion_format(part, request.top, offsets[index])
        offsets[index] += sum(map(len, log_probs["tokens"]))
        answer["logprobs"] = log_probs
      yield {**head, "choices": [answer]}
    if request.stream_options.include_usage:
      yield {**head, "choices": [], "usage": usage(choices, request)}

  def _choice(self, request: Request, index: int, part: Part, finish: str | None) -> Json:
    """Returns the fields that a choice has in all answers."""
    answer: Json = {"index": index, "logprobs": None, "finish_reason": finish}
    if isinstance(request, ChatRequest) and request.top is not None:
      answer["logprobs"] = self._log_probs.chat_format(part, request.top)
    if request.return_token_ids:
      answer["token_ids"] = part.tokens
    return answer

  def _head(self, kind: str) -> Json:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
      "id": f"{prefix}-{secrets.token_hex(12)}",
      "object": kind,
      "created": int(time.time()),
      "model": self.name,
    }


def usage(choices: Sequence[Choice], request: Request) -> Json:
  """Returns the numbers of tokens of a request; a prompt counts once for all its choices."""
  prompt = sum(len(choice.prompt) for choice in choices[:: request.n])
  completion = sum(len(choice.output.tokens) for choice in choices)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


class LogProbs:
  """Writes log-probs. A token appears as the text that it has after others."""

  def __init__(self, chat: Chat):
    self._chat = chat

  def chat_format(self, part: Part, top: int) -> Json:
    """Returns the "logprobs" of a choice of /v1/chat/completions."""
    texts = self._texts(part, top)
    content = []
    for i, (token, log_prob) in enumerate(zip(part.tokens, part.log_probs, strict=True)):
      listed = _listed(part, i, top)
      entry = _entry(texts[token], log_prob)
      entry["top_logprobs"] = [_entry(texts[other], value) for other, value in listed]
      content.append(entry)
    return {"content": content, "refusal": None}

  def completion_format(
    self, part: Part, top: int, offset: int = 0, first: int | None = None
  ) -> Json:
    """Returns the "logprobs" of a choice of /v1/completions.

    Args:
      part: tokens and log-probs.
      top: how many alternatives are listed.
      offset: where the text of the first token begins.
      first: the id of a token before the part, which has no log-prob; None for none.
    """
    texts = self._texts(part, top)
    pieces = [texts[token] for token in part.tokens]
    log_probs: list[float | None] = [_finite(x) for x in part.log_probs]
    tops: list[dict[str, float] | None] = []
    for i, token in enumerate(part.tokens):
      found: dict[str, float] = {}
      for other, value in [*_listed(part, i, top), (token, part.log_probs[i])]:
        found.setdefault(texts[other], _finite(value))
      tops.append(found)
    if first is not None:
      pieces.insert(0, self._chat.texts.single_texts([first])[first])
      log_probs.insert(0, None)
      tops.insert(0, None)
    offsets = []
    for piece in pieces:
      offsets.append(offset)
      offset += len(piece)
    return {
      "tokens": pieces,
      "token_logprobs": log_probs,
      "top_logprobs": tops if top else None,
      "text_offset": offsets,
    }

  def _texts(self, part: Part, top: int) -> dict[int, str]:
    others = (token for ids, _ in part.alternatives for token in ids[:top])
    return self._chat.texts.single_texts({*part.tokens, *others})


def _listed(part: Part, i: int, top: int) -> list[tuple[int, float]]:
  if not top:
    return []
  ids, log_probs = part.alternatives[i]
  return list(zip(ids[:top], log_probs[:top], strict=True))


def _entry(text: str, log_prob: float) -> Json:
  whole = REPLACEMENT not in text
  return {
    "token": text,
    "logprob": _finite(log_prob),
    "bytes": list(text.encode()) if whole else None,
  }


def _finite(log_prob: float) -> float:
  return max(log_prob, LOWEST)
