"""Reads requests: every field is checked, and what the server cannot do is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from gtpo_jax.data.chat_template import Variables, check_variables
from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line
from gtpo_jax.sampling.filters import ALTERNATIVES
from gtpo_jax.sampling.settings import LOWEST_TEMPERATURE
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop
from gtpo_jax.serving.api_errors import ApiError, bad

MAX_BODY = 16 << 20  # bytes
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOOLS = 128
COMPLETION_TOKENS = 16  # the protocol's default for /v1/completions
HIGHEST_TEMPERATURE = 100.0
LARGEST_TOP_K = 2**31 - 1
MAX_SHOWN = 80  # characters of a value in a message

# Fields that say nothing about the answer.
IGNORED = {
  *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
  *("prompt_cache_retention", "parallel_tool_calls", "verbosity", "reasoning_effort"),
}
# Fields that are accepted only with a value that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "repetition_penalty": (1,),
  "logit_bias": ({},),
  "response_format": ({"type": "text"},),
  "modalities": (["text"],),
  "suffix": ("",),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the choices of a request are drawn, and what of them is returned.

  Attributes:
    max_tokens: the most tokens of a choice; None for as many as there is space for.
    n: choices for each prompt.
    seed: makes the choices reproducible; None draws one.
    temperature, top_k, top_p, min_p: as in `SamplingParams`.
    stop: strings that end a choice, whose text is cut before them.
    log_probs: whether log-probs are returned.
    top: how many of the most probable tokens are returned with them.
    stream: whether the answer comes in parts.
    include_usage: whether the last part has the numbers of tokens.
    return_token_ids: whether the ids of prompt and choices are returned.
  """

  max_tokens: int | None
  n: int
  seed: int | None
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  stop: tuple[str, ...]
  log_probs: bool
  top: int
  stream: bool
  include_usage: bool
  return_token_ids: bool


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A request to /v1/chat/completions.

  Attributes:
    messages: the conversation, as a chat template takes it.
    tools: schemas of the tools that may be called; () if none may.
    variables: what the chat template reads besides them.
    sampling: how choices are drawn.
  """

  messages: list[dict[str, Any]]
  tools: tuple[dict[str, Any], ...]
  variables: Mapping[str, Any]
  sampling: Sampling


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A request to /v1/completions.

  Attributes:
    prompts: texts, or lists of token ids.
    echo: whether choices begin with the prompt.
    sampling: how choices are drawn.
  """

  prompts: list[str | list[int]]
  echo: bool
  sampling: Sampling


class Fields:
  """The fields of a request, each of which is taken once. A field that is null is absent."""

  def __init__(self, body: bytes):
    """Args:
    body: JSON.

    Raises:
      ApiError: it is not the JSON of an object.
    """
    if len(body) > MAX_BODY:
      raise ApiError(413, f"the body has {len(body)} bytes, over the limit of {MAX_BODY}")
    try:
      values = json.loads(body)
    except RecursionError:
      raise bad("the body is nested too deeply") from None
    except ValueError as error:
      raise bad(f"the body is not valid JSON: {first_line(error)[:MAX_SHOWN]}") from None
    if not isinstance(values, dict):
      raise bad("the body must be a JSON object")
    self._values = {name: value for name, value in values.items() if value is not None}
    self._known: set[str] = set()

  def take(self, name: str, default: Any = None) -> Any:
    """Returns the value of a field."""
    self._known.add(name)
    return self._values.pop(name, default)

  def text(self, name: str) -> str | None:
    """Returns a string, or None."""
    value = self.take(name)
    if value is not None and not isinstance(value, str):
      raise bad(f"{name} must be a string, got {shown(value)}", name)
    return value

  def flag(self, name: str) -> bool:
    """Returns a truth value, by default False."""
    value = self.take(name, False)
    if not isinstance(value, bool):
      raise bad(f"{name} must be true or false, got {shown(value)}", name)
    return value

  def number(self, name: str, default: float, low: float, high: float) -> float:
    """Returns a number from `low` to `high`."""
    value = self.take(name, default)
    if not _is_number(value) or not low <= value <= high:
      raise bad(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}", name)
    return float(value)

  def integer(self, name: str, default: int | None, low: int, high: int | None) -> int | None:
    """Returns a whole number from `low` to `high`, or None if that is the default."""
    value = self.take(name, default)
    if value is None:
      return None
    whole = _is_number(value) and value == int(value)
    if not whole or value < low or (high is not None and value > high):
      bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
      raise bad(f"{name} must be a whole number {bounds}, got {shown(value)}", name)
    return int(value)

  def end(self) -> None:
    """Checks the fields that nobody has taken.

    Raises:
      ApiError: one of them would change the answer, or is unknown.
    """
    for name, value in self._values.items():
      if name in NEUTRAL:
        if value not in NEUTRAL[name]:
          raise bad(f"{name} is not supported; leave it out", name, "unsupported_parameter")
      elif name not in IGNORED:
        hint = did_you_mean(name, self._known)
        raise bad(f"unknown field {shown(name)}{hint}", name[:MAX_SHOWN], "unknown_parameter")


def read_chat(fields: Fields) -> ChatRequest:
  """Reads a request to /v1/chat/completions, without its "model".

  Raises:
    ApiError: a field is wrong, or asks for what the server cannot do.
  """
  messages = fields.take("messages")
  if not isinstance(messages, list) or not messages:
    raise bad(f"messages must be a list of at least one message, got {shown(messages)}", "messages")
  messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
  tools = _tools(fields)
  variables = _variables(fields.take("chat_template_kwargs", {}))
  log_probs = fields.flag("logprobs")
  top = fields.integer("top_logprobs", 0, 0, ALTERNATIVES)
  if top and not log_probs:
    raise bad('top_logprobs needs "logprobs": true', "top_logprobs")
  newer = fields.integer("max_completion_tokens", None, 1, None)
  older = fields.integer("max_tokens", None, 1, None)
  sampling = _sampling(fields, newer or older, log_probs, top)
  fields.end()
  return ChatRequest(messages, tools, variables, sampling)


def read_completion(fields: Fields) -> CompletionRequest:
  """Reads a request to /v1/completions, without its "model".

  Raises:
    ApiError: a field is wrong, or asks for what the server cannot do.
  """
  prompts = _prompts(fields.take("prompt"))
  echo = fields.flag("echo")
  top = fields.integer("logprobs", None, 0, ALTERNATIVES)
  max_tokens = fields.integer("max_tokens", COMPLETION_TOKENS, 0 if echo else 1, None)
  sampling = _sampling(fields, max_tokens, top is not None, top or 0)
  best_of = fields.integer("best_of", sampling.n, 1, MAX_CHOICES)
  if best_of != sampling.n:
    raise bad("best_of is not supported; leave it out", "best_of", "unsupported_parameter")
  if echo and sampling.stream:
    raise bad("echo is not supported with stream; leave one of them out", "echo")
  fields.end()
  return CompletionRequest(prompts, echo, sampling)


def shown(value: Any) -> str:
  """Returns a value as it appears in a message."""
  try:
    text = json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    text = type(value).__name__
  return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _sampling(fields: Fields, max_tokens: int | None, log_probs: bool, top: int) -> Sampling:
  temperature = fields.number("temperature", 1.0, 0.0, HIGHEST_TEMPERATURE)
  stream = fields.flag("stream")
  options = fields.take("stream_options", {})
  if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
    raise bad('stream_options must be an object such as {"include_usage": true}', "stream_options")
  seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
  top_k = fields.integer("top_k", 0, -1, LARGEST_TOP_K)
  return Sampling(
    max_tokens=max_tokens,
    n=fields.integer("n", 1, 1, MAX_CHOICES),
    seed=None if seed is None else seed % 2**32,
    temperature=temperature if temperature >= LOWEST_TEMPERATURE else 0.0,
    top_k=max(top_k, 0),
    top_p=fields.number("top_p", 1.0, 0.0, 1.0),
    min_p=fields.number("min_p", 0.0, 0.0, 1.0),
    stop=_stop(fields.take("stop", ())),
    log_probs=log_probs,
    top=top,
    stream=stream,
    include_usage=options.get("include_usage", False),
    return_token_ids=fields.flag("return_token_ids"),
  )


def _stop(value: Any) -> tuple[str, ...]:
  strings = (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else value
  if not is_stop(strings):
    raise bad(
      f"stop must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them, got "
      f"{shown(value)}",
      "stop",
    )
  return strings


def _prompts(value: Any) -> list[str | list[int]]:
  if isinstance(value, str) or (_is_list(value) and value and all(map(_is_id, value))):
    value = [value]
  good = _is_list(value) and all(
    isinstance(x, str) or (_is_list(x) and x and all(map(_is_id, x))) for x in value
  )
  if not good or not value or len(value) > MAX_PROMPTS:
    raise bad(
      f"prompt must be a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these, "
      f"got {shown(value)}",
      "prompt",
    )
  for prompt in value:
    if isinstance(prompt, str):
      _check_text(prompt, "prompt")
  return list(value)


def _message(value: Any, name: str) -> dict[str, Any]:
  """Returns a message with "role", "content" as a text, and what belongs to calls of tools."""
  if not isinstance(value, dict):
    raise bad(f"{name} must be an object, got {shown(value)}", name)
  role = value.get("role")
  if not isinstance(role, str):
    raise bad(f"{name}.role must be a string, got {shown(role)}", f"{name}.role")
  message: dict[str, Any] = {"role": role, "content": _content(value.get("content"), name)}
  for key in ("name", "tool_call_id", "reasoning_content"):
    if isinstance(text := value.get(key), str):
      _check_text(text, f"{name}.{key}")
      message[key] = text
  if calls := value.get("tool_calls"):
    if role != "assistant" or not _is_list(calls):
      raise bad(f"{name}.tool_calls must be a list in a message of the assistant", name)
    message["tool_calls"] = [
      _past_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)
    ]
  return message


def _content(value: Any, name: str) -> str:
  """Returns the text of a message, which may come in parts."""
  parts = value if _is_list(value) else [{"type": "text", "text": value or ""}]
  texts = []
  for part in parts:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
      raise bad(f"{name}.content must be text, got {shown(value)}", f"{name}.content")
    texts.append(part["text"])
  text = "".join(texts)
  _check_text(text, f"{name}.content")
  return text


def _past_call(value: Any, name: str) -> dict[str, Any]:
  """Returns a call with its arguments as an object, as templates take it."""
  function = value.get("function") if isinstance(value, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise bad(f'{name} must be an object with "function", which has "name" and "arguments"', name)
  arguments = function.get("arguments") or {}  # "" is how some programs write a call without any
  try:
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
  except (ValueError, RecursionError):
    raise bad(f"{name}.function.arguments must be JSON, got {shown(arguments)}", name) from None
  call_id = value.get("id")
  return {
    "id": call_id if isinstance(call_id, str) else "",
    "type": "function",
    "function": {"name": function["name"], "arguments": arguments},
  }


def _variables(value: Any) -> Variables:
  try:
    return check_variables(value)
  except ValueError as error:
    raise bad(f"chat_template_kwargs {error}", "chat_template_kwargs") from None


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
  """Returns the tools that may be called."""
  tools = fields.take("tools", [])
  good = _is_list(tools) and all(_is_tool(tool) for tool in tools)
  if not good or len(tools) > MAX_TOOLS:
    raise bad(
      f'tools must be a list of at most {MAX_TOOLS} objects {{"type": "function", "function": '
      f'{{"name": ..., "parameters": ...}}}}, got {shown(tools)}',
      "tools",
    )
  choice = fields.take("tool_choice", "auto" if tools else "none")
  if choice not in ("auto", "none"):
    raise bad(
      f'tool_choice must be "auto" or "none", got {shown(choice)}; calls cannot be forced',
      "tool_choice",
      "unsupported_parameter",
    )
  return tuple(tools) if choice == "auto" else ()


def _is_tool(value: Any) -> bool:
  if not isinstance(value, dict) or value.get("type") != "function":
    return False
  function = value.get("function")
  return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_text(text: str, name: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError:
    raise bad(f"{name} contains half of a surrogate pair, which is no character", name) from None


def _is_number(value: Any) -> bool:
  # The protocol's numbers are small; a longer one would not convert to a float.
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and -(2**64) < value < 2**64 and math.isfinite(value)


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
  return isinstance(value, list)


def one_line(error: UserError) -> ApiError:
  """Returns the error for a request that a lower layer has refused."""
  return bad(first_line(error))
