"""Reads requests: every field is checked, and what the server cannot do is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
  AfterValidator,
  BaseModel,
  BeforeValidator,
  ConfigDict,
  Field,
  ValidationError,
  ValidationInfo,
  model_validator,
)
from pydantic_core import from_json

from gtpo_jax.data.chat_template import check_variables
from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line
from gtpo_jax.sampling.filters import ALTERNATIVES, RowSampling
from gtpo_jax.sampling.settings import LOWEST_TEMPERATURE
from gtpo_jax.sampling.stop_strings import MAX_STOP_STRINGS, is_stop

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


class ApiError(Exception):
  """A request that is not answered; the message is one line and says nothing of the machine.

  Attributes:
    status: the HTTP status.
    message: what is wrong, and what to do.
    param: the field of the request that is wrong; None if it is no field.
    code: a name for programs; None for none.
  """

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    self.status = status
    self.message = message
    self.param = param
    self.code = code

  def body(self) -> dict[str, Any]:
    """Returns the error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    other = "server_error" if self.status >= 500 else "invalid_request_error"
    kind = kinds.get(self.status, other)
    error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
    return {"error": error}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
  """Returns the error of a request that is wrong."""
  return ApiError(400, message, param, code)


class Body(BaseModel):
  """What a client sends: types are strict, numbers finite, and unknown fields refused."""

  model_config = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=()
  )


_Kind = TypeVar("_Kind", bound=Body)


def parse_object(body: bytes) -> dict[str, Any]:
  """Returns the fields of a JSON object; those that are null are left out."""
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
  strings = (
    (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
  )
  if not is_stop(strings):
    raise ValueError(
      f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them, got "
      f"{shown(value)}"
    )
  return strings


def _check_prompts(value: Any) -> list[str | list[int]]:
  if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
    value = [value]
  good = isinstance(value, list) and all(
    isinstance(x, str) or (isinstance(x, list) and x and all(map(_is_id, x))) for x in value
  )
  if not good or not value or len(value) > MAX_PROMPTS:
    raise ValueError(
      f"must be a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these, got "
      f"{shown(value)}"
    )
  return list(value)


def _check_content(value: Any) -> str:
  """Returns the text of a message, which may come in parts."""
  parts = value if isinstance(value, list) else [{"type": "text", "text": value or ""}]
  texts = []
  for part in parts:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
      raise ValueError(f"must be text, got {shown(value)}")
    texts.append(part["text"])
  return "".join(texts)


def _check_calls(value: Any, info: ValidationInfo) -> Any:
  if value and info.data.get("role", "assistant") != "assistant":
    raise ValueError("must be a list in a message of the assistant")
  return value or []


def _read_arguments(value: Any) -> Any:
  """Returns the arguments of a call as an object, as templates take them."""
  try:
    # "" is how some programs write a call without any.
    return from_json(value or "{}") if isinstance(value, str) else value or {}
  except ValueError:
    raise ValueError(f"must be JSON, got {shown(value)}") from None


def _check_tools(tools: list[Any], info: ValidationInfo) -> tuple[Any, ...]:
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
  return () if info.data.get("tool_choice") == "none" else tuple(tools)


def _check_tool_choice(value: Any) -> Any:
  if (value or "auto") not in ("auto", "none"):
    raise bad(
      f'tool_choice must be "auto" or "none", got {shown(value)}; calls cannot be forced',
      "tool_choice",
      "unsupported_parameter",
    )
  return value


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


# Some programs write whole numbers as 1.0.
Whole = Annotated[
  int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
]
Limit = Annotated[Whole, Field(ge=1)]
_Text = Annotated[str, BeforeValidator(lambda x: x if isinstance(x, str) else "")]


class Lenient(Body):
  """A body that says nothing about a result; later clients may send more."""

  model_config = ConfigDict(extra="ignore")


class _StreamOptions(Lenient):
  include_usage: bool = False


class _Function(Lenient):
  name: str
  arguments: Annotated[Any, BeforeValidator(_read_arguments)] = {}


class _Call(Lenient):
  id: _Text = ""
  type: Annotated[str, BeforeValidator(lambda x: "function")] = "function"
  function: _Function


class _Message(Lenient):
  role: str
  content: Annotated[Any, BeforeValidator(_check_content)] = ""
  name: _Text = ""
  tool_call_id: _Text = ""
  reasoning_content: _Text = ""
  tool_calls: Annotated[list[_Call], BeforeValidator(_check_calls)] = []

  def plain(self) -> dict[str, Any]:
    """Returns the message as a chat template takes it."""
    return {x: y for x, y in self.model_dump().items() if y or x in ("role", "content")}


class Request(Body):
  """A request for completions: how they are drawn, and what of them is returned.

  Attributes:
    n: choices for each prompt.
    seed: makes the choices reproducible; None draws one.
    temperature, top_k, top_p, min_p: as in `SamplingParams`.
    stop: strings that end a choice, whose text is cut before them.
    stream: whether the answer comes in parts.
    stream_options: whether the last part has the numbers of tokens.
    return_token_ids: whether the ids of prompt and choices are returned.
    limit: the most tokens of a choice; None for as many as there is space for.
    top: how many of the most probable tokens are returned with log-probs; None without log-probs.
  """

  n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
  seed: (
    Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1), AfterValidator(lambda seed: seed % 2**32)]
    | None
  ) = None
  temperature: Annotated[
    float,
    Field(ge=0, le=HIGHEST_TEMPERATURE),
    AfterValidator(lambda x: x if x >= LOWEST_TEMPERATURE else 0.0),
  ] = 1.0
  top_k: Annotated[
    Whole, Field(ge=-1, le=LARGEST_TOP_K), AfterValidator(lambda count: max(count, 0))
  ] = 0
  top_p: float = Field(1.0, ge=0, le=1)
  min_p: float = Field(0.0, ge=0, le=1)
  stop: Annotated[Any, BeforeValidator(_check_stop)] = ()
  stream: bool = False
  stream_options: _StreamOptions = _StreamOptions()
  return_token_ids: bool = False

  @property
  def sampling(self) -> RowSampling:
    """How the tokens of its choices are drawn."""
    settings = {name: x for name, x in self if name in RowSampling._fields}
    return RowSampling(**settings, lists_alternatives=bool(self.top))

  @model_validator(mode="before")
  @classmethod
  def _leave_out_neutral(cls, values: Mapping[str, Any]) -> dict[str, Any]:
    for name, neutral in NEUTRAL.items():
      if values.get(name) is not None and values[name] not in neutral:
        raise bad(f"{name} is not supported; leave it out", name, "unsupported_parameter")
    left_out = IGNORED | set(NEUTRAL)
    return {name: x for name, x in values.items() if x is not None and name not in left_out}


class ChatRequest(Request):
  """A request to /v1/chat/completions, without its "model".

  Attributes:
    messages: the conversation, a dict for each message, as a chat template takes it.
    tools: schemas of the tools that may be called; () if none may.
    chat_template_kwargs: what the chat template reads besides them.
  """

  messages: Annotated[
    list[_Message], Field(min_length=1), AfterValidator(lambda x: [y.plain() for y in x])
  ]
  tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = None
  tools: Annotated[list[Any], AfterValidator(_check_tools)] = ()
  chat_template_kwargs: Annotated[Any, AfterValidator(check_variables)] = {}
  logprobs: bool = False
  top_logprobs: Annotated[Whole, Field(ge=0, le=ALTERNATIVES)] = 0
  max_completion_tokens: Limit | None = None
  max_tokens: Limit | None = None

  @property
  def limit(self) -> int | None:
    """See `Request`."""
    return self.max_completion_tokens or self.max_tokens

  @property
  def top(self) -> int | None:
    """See `Request`."""
    return self.top_logprobs if self.logprobs else None

  @model_validator(mode="after")
  def _check(self) -> ChatRequest:
    if self.top_logprobs and not self.logprobs:
      raise bad('top_logprobs needs "logprobs": true', "top_logprobs")
    own = [message for message in self.messages if message["role"] == "assistant"]
    for name, value in zip(MAX_TEXTS, (own, self.tools, self.chat_template_kwargs), strict=True):
      if (size := len(json.dumps(value, ensure_ascii=False))) > MAX_TEXTS[name]:
        of = " of the assistant" if value is own else ""
        raise bad(f"{name}{of} have {size} characters, at most {MAX_TEXTS[name]} are read", name)
    return self


class CompletionRequest(Request):
  """A request to /v1/completions, without its "model"."""

  prompt: Annotated[Any, AfterValidator(_check_prompts)]  # texts, or lists of token ids
  echo: bool = False  # whether choices begin with the prompt
  logprobs: Annotated[Whole, Field(ge=0, le=ALTERNATIVES)] | None = None
  max_tokens: Annotated[Whole, Field(ge=0)] = COMPLETION_TOKENS
  best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None

  @property
  def limit(self) -> int:
    """See `Request`."""
    return self.max_tokens

  @property
  def top(self) -> int | None:
    """See `Request`."""
    return self.logprobs

  @model_validator(mode="after")
  def _check(self) -> CompletionRequest:
    if not self.max_tokens and not self.echo:
      raise bad("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    if self.best_of not in (None, self.n):
      raise bad("best_of is not supported; leave it out", "best_of", "unsupported_parameter")
    if self.echo and self.stream:
      raise bad("echo is not supported with stream; leave one of them out", "echo")
    return self
