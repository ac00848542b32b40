"""Tools: Python functions that a model may call, with schemas from their type hints and docstrings.

A call never raises because of what the model wrote or what the function did: the model reads an
error as the result, and can try again.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import types
import typing
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from gtpo_jax.environments.parsers import PYTHON_CONSTANTS
from gtpo_jax.environments.turns import ToolCall, Written
from gtpo_jax.runtime.errors import UserError, did_you_mean, first_line

MAX_ERROR_CHARS = 500
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TYPES = {
  "string": str,
  "integer": int,
  "number": (int, float),
  "boolean": bool,
  "array": list,
  "object": dict,
  "null": type(None),
}
_NAMES = {
  str: "string",
  int: "integer",
  float: "number",
  bool: "boolean",
  list: "array",
  tuple: "array",
  dict: "object",
  type(None): "null",
}


class CallResult(NamedTuple):
  """What the model reads about a call."""

  text: str
  failed: bool


class Tools:
  """Functions that a model may call by name.

  Attributes:
    schemas: their JSON schemas, as chat templates take them.
  """

  def __init__(
    self,
    functions: Sequence[Callable[..., Any]],
    schemas: Sequence[Mapping[str, Any]] | None = None,
  ):
    """Args:
    functions: functions or bound methods, `async` or not.
    schemas: their schemas, if they are known; None makes them.

    Raises:
      UserError: a function has no docstring in Google style, lacks a type hint, has a type that
        JSON does not know, or has the name of another.
    """
    self.schemas = [schema_of(function) for function in functions] if schemas is None else schemas
    self._functions: dict[str, Callable[..., Any]] = {}
    for schema, function in zip(self.schemas, functions, strict=True):
      name = schema["function"]["name"]
      if name in self._functions:
        raise UserError(f"two tools have the name {name!r}; rename one of them")
      self._functions[name] = function
    self._parameters = {x["function"]["name"]: x["function"]["parameters"] for x in self.schemas}

  def __len__(self) -> int:
    """Returns the number of tools."""
    return len(self._functions)

  def run(self, call: ToolCall) -> CallResult | Awaitable[CallResult]:
    """Calls a tool; returns the result, to be awaited if the function is `async`."""
    if call.name not in self._functions:
      names = ", ".join(self._functions)
      nearest = did_you_mean(call.name, self._functions)
      return _error(f"there is no tool {call.name!r}{nearest or f'; the tools are: {names}'}")
    try:
      arguments = _checked_arguments(call.arguments, self._parameters[call.name])
      hints = typing.get_type_hints(self._functions[call.name])
      arguments = {name: _typed(value, hints.get(name), name) for name, value in arguments.items()}
    except _Mismatch as mismatch:
      return _error(f"{call.name}: {mismatch}")
    try:
      returned = self._functions[call.name](**arguments)
      if inspect.isawaitable(returned):
        return _awaited(returned)
      return CallResult(as_text(returned), False)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
      return _raised(error)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
  """Returns the JSON schema of a function.

  Raises:
    UserError: see `Tools`.
  """
  if schema := getattr(function, "json_schema", None):  # a server has stated it
    return schema
  name = getattr(function, "__name__", "")
  if not inspect.isroutine(function) or not name.isidentifier():
    raise UserError(
      f"a tool is a function with a name, got {str(function)[:100]}; wrap it in one with `def`"
    )
  try:
    signature = inspect.signature(function)
  except ValueError as error:
    raise UserError(f"tool {name!r} has no signature; wrap it in a function") from error
  for parameter in signature.parameters.values():
    if parameter.kind not in _NAMED:
      raise UserError(
        f"tool {name!r} has the parameter {str(parameter).split(':')[0]!r}, but models pass all "
        "arguments by name; give it named parameters"
      )
  from transformers.utils.chat_template_utils import get_json_schema

  try:
    return get_json_schema(function)
  except Exception as error:  # of several types, or what evaluating the type hints raises
    reason = " ".join(map(str, error.args)) or type(error).__name__
    raise UserError(
      f"tool {name!r} has no usable schema: {first_line(Exception(reason))}; give each parameter a "
      "type hint, and a line under `Args:` in the docstring"
    ) from error


def as_text(value: Any) -> str:
  """Returns a value as a model reads it: a text as it is, else JSON if possible, else `str(...)`.

  The result can be encoded as UTF-8.
  """
  if isinstance(value, bytes | bytearray):
    value = bytes(value).decode("utf-8", "replace")
  if not isinstance(value, str):
    try:
      value = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
      value = str(value)
  return value.encode("utf-8", "replace").decode("utf-8")


async def _awaited(returned: Awaitable[Any]) -> CallResult:
  try:
    return CallResult(as_text(await returned), False)
  except (Exception, SystemExit) as error:
    return _raised(error)


def _raised(error: BaseException) -> CallResult:
  try:
    return _error(f"{type(error).__name__}: {error}")
  except Exception:  # its __str__ raises
    return _error(type(error).__name__)


def _error(reason: str) -> CallResult:
  return CallResult(as_text(f"Error: {reason}"[:MAX_ERROR_CHARS]), True)


class _Mismatch(Exception):
  """Arguments do not fit a signature; the message says why."""


def _checked_arguments(
  arguments: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns arguments for a call.

  Args:
    arguments: what the model gave, by name.
    parameters: the schema's, an object.
  """
  properties = parameters.get("properties", {})
  for name in arguments:
    if name not in properties:
      nearest = did_you_mean(name, properties)
      names = ", ".join(properties) or "none"
      raise _Mismatch(f"there is no argument {name!r}{nearest or f'; the arguments are: {names}'}")
  for name in parameters.get("required", ()):
    if name not in arguments:
      raise _Mismatch(f"the argument {name!r} is missing")
  return {name: _checked(value, properties[name], name) for name, value in arguments.items()}


def _checked(value: Any, schema: Mapping[str, Any], place: str) -> Any:
  """Returns a value that fits a schema from `get_json_schema`."""
  if isinstance(value, Written):
    value = _meant(value, schema)
  if value is None and schema.get("nullable"):
    return None
  if "anyOf" in schema:
    for choice in schema["anyOf"]:
      try:
        return _checked(value, choice, place)
      except _Mismatch:
        continue
    raise _Mismatch(f"{place} has none of the types it may have: {_shown(value)}")
  if "enum" in schema:
    if not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
      choices = ", ".join(json.dumps(choice) for choice in schema["enum"])
      raise _Mismatch(f"{place} must be one of {choices}, got {_shown(value)}")
    return value
  names = schema.get("type", [])
  names = [names] if isinstance(names, str) else names
  if isinstance(value, float) and value.is_integer() and "integer" in names:
    value = int(value)
  if names and not any(_has_type(value, name) for name in names):
    raise _Mismatch(f"{place} must be of type {' or '.join(names)}, got {_shown(value)}")
  if isinstance(value, list):
    return _checked_items(value, schema, place)
  if isinstance(value, dict) and "additionalProperties" in schema:
    inner = schema["additionalProperties"]
    return {key: _checked(item, inner, f"{place}[{key!r}]") for key, item in value.items()}
  return value


def _meant(text: Written, schema: Mapping[str, Any]) -> Any:
  """Returns what a written text means: itself where a schema allows one, else a JSON value."""
  choices = schema.get("enum", ())
  types = schema.get("type", ())
  if str(text) in choices or "string" in ([types] if isinstance(types, str) else types):
    return str(text)
  if "anyOf" in schema:
    return text  # each choice says what it means there
  if text in PYTHON_CONSTANTS:
    return PYTHON_CONSTANTS[text]
  with contextlib.suppress(ValueError, RecursionError):
    return json.loads(text)
  return str(text)


def _checked_items(value: list[Any], schema: Mapping[str, Any], place: str) -> list[Any]:
  if "prefixItems" in schema:
    schemas = schema["prefixItems"]
    if len(value) != len(schemas):
      raise _Mismatch(f"{place} must have {len(schemas)} items, got {len(value)}")
  else:
    schemas = [schema.get("items", {})] * len(value)
  return [
    _checked(item, inner, f"{place}[{i}]")
    for i, (item, inner) in enumerate(zip(value, schemas, strict=True))
  ]


def _typed(value: Any, hint: Any, place: str) -> Any:
  """Returns a value that fits a schema as the type hint of its function says.

  JSON has no tuples and enumerations, and its objects have only texts as keys.
  """
  kind = typing.get_origin(hint) or hint
  inner = typing.get_args(hint)
  if kind in (typing.Union, types.UnionType):
    return _typed_as_one_of(value, inner, place)
  if isinstance(kind, type) and issubclass(kind, enum.Enum):
    return _member(value, {member.value: member for member in kind}, place)
  if kind is typing.Literal:
    return _member(value, {choice: choice for choice in inner}, place)
  name = _NAMES.get(kind)
  if name and not _has_type(value, name):
    raise _Mismatch(f"{place} must be of type {name}, got {_shown(value)}")
  if kind in (list, tuple):
    hints = inner * len(value) if kind is list else inner
    if inner and len(hints) != len(value):
      raise _Mismatch(f"{place} must have {len(hints)} items, got {len(value)}")
    items = zip(value, hints or [Any] * len(value), strict=True)
    return kind(_typed(*item, f"{place}[{i}]") for i, item in enumerate(items))
  if kind is dict and inner:
    return {
      _key(key, inner[0], place): _typed(item, inner[1], f"{place}[{key!r}]")
      for key, item in value.items()
    }
  return value


def _typed_as_one_of(value: Any, hints: Sequence[Any], place: str) -> Any:
  hints = [hint for hint in hints if value is None or hint is not type(None)]
  for hint in hints[:-1]:
    with contextlib.suppress(_Mismatch):
      return _typed(value, hint, place)
  return _typed(value, hints[-1], place)


def _member(value: Any, members: Mapping[Any, Any], place: str) -> Any:
  if not isinstance(value, Hashable) or value not in members:
    choices = ", ".join(map(_shown, members))
    raise _Mismatch(f"{place} must be one of {choices}, got {_shown(value)}")
  return members[value]


def _key(text: str, hint: Any, place: str) -> Any:
  """Returns the key of a JSON object as a hint says: a number or an enumeration, else the text."""
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return _member(text, {str(member.value): member for member in hint}, f"the keys of {place}")
  try:
    return hint(text) if hint in (int, float) else text
  except ValueError:
    raise _Mismatch(f"the keys of {place} must be numbers, got {_shown(text)}") from None


def _has_type(value: Any, name: str) -> bool:
  if isinstance(value, bool):
    return name == "boolean"
  return isinstance(value, _TYPES.get(name, object))


def _shown(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)[:60]
