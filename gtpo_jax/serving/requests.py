"""Reads requests: every field is checked, and what the server cannot do is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from gtpo_jax.data.chat_template import check_variables
from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line
from gtpo_jax.sampling.filters import ALTERNATIVES
from gtpo_jax.sampling.settings import LOWEST_TEMPERATURE
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop
from gtpo_jax.serving.api_errors import ApiError, bad

MAX_BODY = 16 << 20  # bytes
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOOLS = 128
# Characters of JSON, of parts of a chat that are encoded before their length in tokens is known.
MAX_TEXTS = {"messages": 1 << 21, "tools": 1 << 19, "chat_template_kwargs": 1 << 19}
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


class Body(BaseModel):
  """What a client sends: types are strict, numbers finite, and unknown fields refused."""

  model_config = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=()
  )


_Kind = TypeVar("_Kind", bound=Body)


def parse_object(body: bytes) -> dict[str, Any]:
  """Returns the fields of a JSON object; those that are null are left out.

  Raises:
    ApiError: the body is too long, or no JSON object.
  """
  if len(body) > MAX_BODY:
    raise ApiError(413, f"the body has {len(body)} bytes, over the limit of {MAX_BODY}")
  try:
    values = from_json(body)  # refuses halves of surrogate pairs, and more than 200 levels
  except ValueError as error:
    raise bad(f"the body is not valid JSON: {first_line(error)[:MAX_SHOWN]}") from None
  if not isinstance(values, dict):
    raise bad("the body must be a JSON object")
  return {name: value for name, value in values.items() if value is not None}


def checked(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
  """Returns the fields of a body with their types.

  Raises:
    ApiError: a field is missing, unknown or wrong; the first one is named.
  """
  try:
    return kind.model_validate(values)
  except ValidationError as failed:
    error = failed.errors(include_url=False)[0]
  parts = [f"[{x}]" if isinstance(x, int) else f".{x}" for x in error["loc"]]
  name = "".join(parts).removeprefix(".")[:MAX_SHOWN] or "?"
  if error["type"] == "missing":
    raise bad(f"{name} is missing", name)
  if error["type"] == "extra_forbidden":
    hint = did_you_mean(str(error["loc"][-1]), _field_names(kind))
    raise bad(f"unknown field {shown(name)}{hint or '; leave it out'}", name, "unknown_parameter")
  message = error["msg"].removeprefix("Value error, ").removeprefix("Input should ")
  message = message.replace(
    "be a valid dictionary or instance of", "be an object with the fields of"
  )
  message = message if message.startswith("must") else f"must {message.replace('List should ', '')}"
  got = "" if ", got " in message else f", got {shown(error['input'])}"
  raise bad(f"{name} {message}{got}", name)


def _field_names(kind: type[BaseModel]) -> Iterator[str]:
  """Yields the names of a body's fields, and of those of the objects within."""
  for name, field in kind.model_fields.items():
    yield name
    for inner in (field.annotation, *get_args(field.annotation)):
      if isinstance(inner, type) and issubclass(inner, BaseModel):
        yield from _field_names(inner)


def shown(value: Any) -> str:
  """Returns a value as it appears in a message."""
  try:
    text = json.dumps(value)
  except (TypeError, ValueError):
    text = type(value).__name__
  return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def one_line(error: UserError) -> ApiError:
  """Returns the error for a request that a lower layer has refused."""
  return bad(first_line(error))


def _check_stop(value: Any) -> tuple[str, ...]:
  strings = (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else value
  if not is_stop(strings):
    raise ValueError(
      f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them, got "
      f"{shown(value)}"
    )
  return strings


def _check_prompts(value: Any) -> list[str | list[int]]:
  if isinstance(value, str) or (_is_list(value) and value and all(map(_is_id, value))):
    value = [value]
  good = _is_list(value) and all(
    isinstance(x, str) or (_is_list(x) and x and all(map(_is_id, x))) for x in value
  )
  if not good or not value or len(value) > MAX_PROMPTS:
    raise ValueError(
      f"must be a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these, got "
      f"{shown(value)}"
    )
  return list(value)


def _check_content(value: Any) -> str:
  """Returns the text of a message, which may come in parts."""
  parts = value if _is_list(value) else [{"type": "text", "text": value or ""}]
  texts = []
  for part in parts:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
      raise ValueError(f"must be text, got {shown(value)}")
    texts.append(part["text"])
  return "".join(texts)


def _check_calls(value: Any) -> list[dict[str, Any]]:
  """Returns calls with their arguments as objects, as templates take them."""
  if value and not _is_list(value):
    raise ValueError("must be a list in a message of the assistant")
  return [_past_call(call) for call in value or ()]


def _past_call(value: Any) -> dict[str, Any]:
  function = value.get("function") if isinstance(value, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise ValueError('must be objects with "function", which has "name" and "arguments"')
  arguments = function.get("arguments") or {}  # "" is how some programs write a call without any
  try:
    arguments = from_json(arguments) if isinstance(arguments, str) else arguments
  except ValueError:
    raise ValueError(f"must have JSON as arguments, got {shown(arguments)}") from None
  call_id = value.get("id")
  return {
    "id": call_id if isinstance(call_id, str) else "",
    "type": "function",
    "function": {"name": function["name"], "arguments": arguments},
  }


def _check_tools(tools: list[Any]) -> list[dict[str, Any]]:
  def is_tool(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") != "function":
      return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)

  if len(tools) > MAX_TOOLS or not all(map(is_tool, tools)):
    raise ValueError(
      f'must be a list of at most {MAX_TOOLS} objects {{"type": "function", "function": '
      f'{{"name": ..., "parameters": ...}}}}, got {shown(tools)}'
    )
  return tools


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
  return isinstance(value, list)


# Some programs write whole numbers as 1.0.
Whole = Annotated[
  int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
]
Limit = Annotated[Whole, Field(ge=1)]
_Text = Annotated[str | None, BeforeValidator(lambda x: x if isinstance(x, str) else None)]


class _Lenient(Body):
  model_config = ConfigDict(extra="ignore")


class _StreamOptions(_Lenient):
  include_usage: bool = False


class _Message(_Lenient):
  role: str
  content: Annotated[Any, BeforeValidator(_check_content)] = ""
  name: _Text = None
  tool_call_id: _Text = None
  reasoning_content: _Text = None
  tool_calls: Annotated[Any, BeforeValidator(_check_calls)] = None


class _SamplingBody(Body):
  """The fields that both kinds of requests have."""

  n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
  seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
  temperature: float = Field(1.0, ge=0, le=HIGHEST_TEMPERATURE)
  top_k: Annotated[Whole, Field(ge=-1, le=LARGEST_TOP_K)] = 0
  top_p: float = Field(1.0, ge=0, le=1)
  min_p: float = Field(0.0, ge=0, le=1)
  stop: Annotated[Any, BeforeValidator(_check_stop)] = ()
  stream: bool = False
  stream_options: _StreamOptions = _StreamOptions()
  return_token_ids: bool = False

  def sampling(self, max_tokens: int | None, log_probs: bool, top: int) -> Sampling:
    """Returns how choices are drawn."""
    return Sampling(
      max_tokens=max_tokens,
      n=self.n,
      seed=None if self.seed is None else self.seed % 2**32,
      temperature=self.temperature if self.temperature >= LOWEST_TEMPERATURE else 0.0,
      top_k=max(self.top_k, 0),
      top_p=self.top_p,
      min_p=self.min_p,
      stop=self.stop,
      log_probs=log_probs,
      top=top,
      stream=self.stream,
      include_usage=self.stream_options.include_usage,
      return_token_ids=self.return_token_ids,
    )


class _ChatBody(_SamplingBody):
  messages: list[_Message] = Field(min_length=1)
  tools: Annotated[list[Any], AfterValidator(_check_tools)] = []
  tool_choice: Any = None
  chat_template_kwargs: Annotated[Any, AfterValidator(check_variables)] = {}
  logprobs: bool = False
  top_logprobs: Annotated[Whole, Field(ge=0, le=ALTERNATIVES)] = 0
  max_completion_tokens: Limit | None = None
  max_tokens: Limit | None = None


class _CompletionBody(_SamplingBody):
  prompt: Annotated[Any, AfterValidator(_check_prompts)]
  echo: bool = False
  logprobs: Annotated[Whole, Field(ge=0, le=ALTERNATIVES)] | None = None
  max_tokens: Annotated[Whole, Field(ge=0)] = COMPLETION_TOKENS
  best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None


def read_chat(values: Mapping[str, Any]) -> ChatRequest:
  """Reads a request to /v1/chat/completions, without its "model".

  Raises:
    ApiError: a field is wrong, or asks for what the server cannot do.
  """
  body = checked(_ChatBody, _without_neutral(values))
  if body.top_logprobs and not body.logprobs:
    raise bad('top_logprobs needs "logprobs": true', "top_logprobs")
  for i, message in enumerate(body.messages):
    if message.tool_calls and message.role != "assistant":
      name = f"messages[{i}].tool_calls"
      raise bad(f"{name} must be a list in a message of the assistant", name)
  if (body.tool_choice or "auto") not in ("auto", "none"):
    raise bad(
      f'tool_choice must be "auto" or "none", got {shown(body.tool_choice)}; calls cannot be '
      "forced",
      "tool_choice",
      "unsupported_parameter",
    )
  messages = [
    {"role": x.role, "content": x.content}
    | {name: value for name, value in x if value and name not in ("role", "content")}
    for x in body.messages
  ]
  own = [message for message in messages if message["role"] == "assistant"]
  for name, value in zip(MAX_TEXTS, (own, body.tools, body.chat_template_kwargs), strict=True):
    if (size := len(json.dumps(value, ensure_ascii=False))) > MAX_TEXTS[name]:
      of = " of the assistant" if value is own else ""
      raise bad(f"{name}{of} have {size} characters, at most {MAX_TEXTS[name]} are read", name)
  max_tokens = body.max_completion_tokens or body.max_tokens
  sampling = body.sampling(max_tokens, body.logprobs, body.top_logprobs)
  tools = () if body.tool_choice == "none" else tuple(body.tools)
  return ChatRequest(messages, tools, body.chat_template_kwargs, sampling)


def read_completion(values: Mapping[str, Any]) -> CompletionRequest:
  """Reads a request to /v1/completions, without its "model".

  Raises:
    ApiError: a field is wrong, or asks for what the server cannot do.
  """
  body = checked(_CompletionBody, _without_neutral(values))
  if not body.max_tokens and not body.echo:
    raise bad("max_tokens must be at least 1 without echo, got 0", "max_tokens")
  if body.best_of not in (None, body.n):
    raise bad("best_of is not supported; leave it out", "best_of", "unsupported_parameter")
  if body.echo and body.stream:
    raise bad("echo is not supported with stream; leave one of them out", "echo")
  sampling = body.sampling(body.max_tokens, body.logprobs is not None, body.logprobs or 0)
  return CompletionRequest(body.prompt, body.echo, sampling)


def _without_neutral(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields that say something about the answer.

  Raises:
    ApiError: a field has a value that would change the answer, and is not supported.
  """
  for name, neutral in NEUTRAL.items():
    if values.get(name) is not None and values[name] not in neutral:
      raise bad(f"{name} is not supported; leave it out", name, "unsupported_parameter")
  left_out = IGNORED | set(NEUTRAL)
  return {name: x for name, x in values.items() if x is not None and name not in left_out}
