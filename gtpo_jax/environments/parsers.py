"""Parsers of turns: each finds thinking, tool calls and text as a family of models writes them.

A parser takes the decoded text of a turn, in which control tokens other than end tokens appear by
name. It accepts any text: a call that cannot be read becomes the `error` of the turn.

`hermes`, for Qwen2.5, Qwen3, SmolLM3 and Hermes:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
`llama3`, for Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not,
and several separated by ";"; `<|python_tag|>NAME.call(query="...")`; and `<|python_tag|>` with a
program, which is a call of the tool `code_interpreter(code)`.
`mistral`: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` as older tokenizers write it, and
`[TOOL_CALLS]NAME[ARGS]{...}` as newer ones do.
`olmo3`: `<function_calls>`, a line such as `NAME(x=1, flag=true)` for each call, and the end tag.
`qwen3_coder`, for Qwen3.5 and Qwen3-Coder: `<tool_call>`, `<function=NAME>`, `<parameter=NAME>`, a
line break, the value, and the three end tags. Values are texts; the schema of a tool says what they
mean.
`none`: no calls; the text is an action or an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gtpo_jax.environments.turns import ToolCall, Turn, Written
from gtpo_jax.runtime.errors import UserError, did_you_mean

if TYPE_CHECKING:
  from gtpo_jax.data.chat import Chat

Parser = Callable[[str], Turn]

MAX_ERROR_CHARS = 200
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
END_TOKENS += ("<end_of_turn>", "<eos>")
PYTHON_TAG = "<|python_tag|>"
CODE_TOOL = "code_interpreter"  # the tool that Llama 3 calls with a program
TOOL_CALLS = "[TOOL_CALLS]"
FUNCTION_CALLS = "<function_calls>"
FUNCTION_TAG = "<function="
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}

_SPACE = re.compile(r"\s*")
_THINK = ("<think>", "</think>")
_BRACKET_THINK = ("[THINK]", "[/THINK]")
_BUILT_IN = re.compile(r"\s*([A-Za-z_]\w*)\.call\((.*)\)\s*", re.DOTALL)
_PYTHON_CALL = re.compile(r"([A-Za-z_][\w.-]*)\s*\(")
_PYTHON_CONSTANT = re.compile(r"(?:True|False|None)\b")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_CALL_HEAD = re.compile(r'\s*\{\s*"(?:type|name|parameters|arguments|function)"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class _Unreadable(Exception):
  """A call cannot be read; the message says why."""


def hermes(text: str) -> Turn:
  """Parses a turn of Qwen2.5, Qwen3 or Hermes."""

  def read(rest: str) -> tuple[ToolCall, int]:
    value, stop = _json(rest, 0)
    return _call(value, "arguments", "parameters"), stop

  return _tagged_calls(text, read)


def qwen3_coder(text: str) -> Turn:
  """Parses a turn of Qwen3.5 or Qwen3-Coder."""
  return _tagged_calls(text, _xml_call)


def _tagged_calls(text: str, read: Callable[[str], tuple[ToolCall, int]]) -> Turn:
  """Parses a turn whose calls are between tags.

  Args:
    text: of the turn.
    read: returns the call that a text begins with, and where it ends.
  """
  thinking, text = _split_thinking(_without_end(text), *_THINK)
  begin, end = "<tool_call>", "</tool_call>"
  calls: list[ToolCall] = []
  error = ""
  before, tag, rest = text.partition(begin)
  outside = [before]
  while tag:
    try:
      call, stop = read(rest)
      calls.append(call)
      stop = _after_space(rest, stop)
      if not rest.startswith(end, stop) and stop < len(rest):
        raise _Unreadable(f"a call is not followed by {end}")
    except _Unreadable as failure:
      error = str(failure)
      break
    between, tag, rest = rest[stop:].removeprefix(end).partition(begin)
    outside.append(between)
  return _turn("".join(outside), thinking, calls, error)


def llama3(text: str) -> Turn:
  """Parses a turn of Llama 3.1 to 3.3."""
  text = _without_end(text)
  before, tag, body = text.partition(PYTHON_TAG)
  if not tag:
    if not _CALL_HEAD.match(text):
      return _turn(text, "", [], "")
    before, body = "", text
  try:
    if match := _BUILT_IN.fullmatch(body):
      calls = [ToolCall(match[1], _keyword_arguments(match[2])[0])]
    elif tag and not body.lstrip().startswith("{"):
      calls = [ToolCall(CODE_TOOL, {"code": body.strip()})]
    else:
      calls = _separated_calls(body)
  except _Unreadable as failure:
    if not tag and not ('"name"' in text and re.search(r'"(?:parameters|arguments)"', text)):
      return _turn(text, "", [], "")  # an answer that is JSON, or resembles it
    return _turn(before, "", [], str(failure))
  return _turn(before, "", calls, "")


def mistral(text: str) -> Turn:
  """Parses a turn of Mistral, in the format of its older or of its newer tokenizers."""
  thinking, text = _split_thinking(_without_end(text), *_BRACKET_THINK)
  before, tag, rest = text.partition(TOOL_CALLS)
  calls: list[ToolCall] = []
  error = ""
  while tag:
    try:
      stop = _mistral_calls(rest, calls)
      stop = _after_space(rest, stop)
      if stop < len(rest) and not rest.startswith(TOOL_CALLS, stop):
        raise _Unreadable(f"a call is followed by {rest[stop : stop + 20]!r}")
    except _Unreadable as failure:
      error = str(failure)
      break
    tag = rest[stop : stop + len(TOOL_CALLS)]
    rest = rest[stop + len(TOOL_CALLS) :]
  return _turn(before, thinking, calls, error)


def olmo3(text: str) -> Turn:
  """Parses a turn of OLMo 3."""
  thinking, text = _split_thinking(_without_end(text), *_THINK)
  before, tag, rest = text.partition(FUNCTION_CALLS)
  body, _, after = rest.partition(FUNCTION_CALLS.replace("<", "</"))
  calls: list[ToolCall] = []
  error = ""
  try:
    calls = _python_calls(body)
  except _Unreadable as failure:
    error = str(failure)
  if tag and not calls and not error:
    error = f"{FUNCTION_CALLS} is not followed by a call"
  return _turn(before + after, thinking, calls, error)


def none(text: str) -> Turn:
  """Parses a turn without calls: only thinking is split off."""
  thinking, text = _split_thinking(_without_end(text), *_THINK)
  return _turn(text, thinking, [], "")


PARSERS: Mapping[str, Parser] = {
  "hermes": hermes,
  "llama3": llama3,
  "mistral": mistral,
  "olmo3": olmo3,
  "qwen3_coder": qwen3_coder,
  "none": none,
}


def parser_for(name: str, chat: Chat) -> Parser:
  """Returns the parser with a name; "auto" chooses by the tokenizer's control tokens.

  Raises:
    UserError: there is no such parser, or the tokenizer does not show how its model writes calls.
  """
  if name != "auto":
    if name not in PARSERS:
      choices = ("auto", *PARSERS)
      raise UserError(
        f"env.parser must be one of {', '.join(choices)}, got {name!r}{did_you_mean(name, choices)}"
      )
    return PARSERS[name]
  template = str(chat.tokenizer.chat_template or "")
  for parser, mark in ((mistral, TOOL_CALLS), (llama3, PYTHON_TAG), (olmo3, FUNCTION_CALLS)):
    if mark in chat.control or mark in template:
      return parser
  if FUNCTION_TAG in template:
    return qwen3_coder
  if "<tool_call>" in chat.control or "<tool_call>" in template:
    return hermes
  raise UserError(
    f"the tokenizer of {chat.tokenizer.name_or_path!r} does not show how its model writes tool "
    f"calls; set env.parser to one of {', '.join(PARSERS)}"
  )


def _without_end(text: str) -> str:
  """Returns a text without white space and end tokens at its end."""
  end = len(text)
  while end:
    if text[end - 1].isspace():
      end -= 1
    elif token := next((token for token in END_TOKENS if text.endswith(token, 0, end)), ""):
      end -= len(token)
    else:
      break
  return text[:end]


def _split_thinking(text: str, begin: str, end: str) -> tuple[str, str]:
  """Returns the thinking at the start of a turn, and the rest.

  The prompt may have opened it, and the turn may end before it is closed.
  """
  before, tag, after = text.partition(end)
  if tag:
    return before.replace(begin, "", 1).strip(), after
  before, tag, after = text.partition(begin)
  if tag and not before.strip():
    return after.strip(), ""
  return "", text


def _turn(text: str, thinking: str, calls: list[ToolCall], error: str) -> Turn:
  return Turn(text.strip(), thinking, tuple(calls), error[:MAX_ERROR_CHARS])


def _after_space(text: str, start: int) -> int:
  space = _SPACE.match(text, start)
  return space.end() if space else start


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not a JSON value")


# A model may write line breaks in a string as they are.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def _json(text: str, start: int) -> tuple[Any, int]:
  """Reads a JSON value; returns it and where it ends."""
  try:
    return _DECODER.raw_decode(text, _after_space(text, start))
  except json.JSONDecodeError as error:
    raise _Unreadable(f"a call is not valid JSON: {error.msg} at character {error.pos}") from error
  except RecursionError as error:
    raise _Unreadable("a call is nested too deeply") from error
  except ValueError as error:  # NaN, or a number with thousands of digits
    raise _Unreadable(f"a call is not valid JSON: {error}") from error


def _call(value: Any, *argument_keys: str) -> ToolCall:
  """Converts a JSON object to a call.

  Args:
    value: the object.
    argument_keys: the names that the arguments may have in it.
  """
  if not isinstance(value, dict):
    raise _Unreadable(f"a call is a JSON object, not {_kind(value)}")
  if isinstance(value.get("function"), dict):
    value = {**value, **value["function"]}
  name = value.get("name")
  if not isinstance(name, str) or not name.strip():
    raise _Unreadable('a call has no "name"')
  key = next((key for key in argument_keys if key in value), None)
  if key is None:
    raise _Unreadable(f'the call of {name!r} has no "{argument_keys[0]}"')
  arguments = value[key]
  if isinstance(arguments, str):  # JSON within JSON
    arguments = _json(arguments, 0)[0]
  if arguments is None:
    arguments = {}
  if not isinstance(arguments, dict):
    raise _Unreadable(f'"{key}" of the call of {name!r} is an object, not {_kind(arguments)}')
  call_id = value.get("id")
  return ToolCall(name.strip(), arguments, call_id if isinstance(call_id, str) else "")


def _xml_call(text: str) -> tuple[ToolCall, int]:
  """Reads a call of Qwen3.5; returns it and where it ends."""
  function = _FUNCTION.match(text)
  if not function:
    raise _Unreadable(f"a call is not <function=NAME> ... </function>: {text[:20].strip()!r}")
  body = function[2]
  arguments = {}
  at = 0
  while (at := _after_space(body, at)) < len(body):
    parameter = _PARAMETER.match(body, at)
    if not parameter:
      raise _Unreadable(
        f"an argument is not <parameter=NAME> ... </parameter>: {body[at : at + 20]!r}"
      )
    arguments[parameter[1].strip()] = Written(parameter[2])
    at = parameter.end()
  return ToolCall(function[1].strip(), arguments), function.end()


def _kind(value: Any) -> str:
  kinds = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
  return kinds.get(type(value), "a number")


def _separated_calls(body: str) -> list[ToolCall]:
  """Returns calls that are separated by ";" or white space."""
  calls = []
  at = 0
  while (at := _after_space(body, at)) < len(body):
    value, at = _json(body, at)
    calls.append(_call(value, "parameters", "arguments"))
    at = _after_space(body, at)
    if body.startswith(";", at):
      at += 1
    elif at < len(body) and body[at] != "{":
      raise _Unreadable(f"a call is followed by {body[at : at + 20]!r}")
  return calls


def _keyword_arguments(text: str, at: int = 0, end: str = "\0") -> tuple[dict[str, Any], int]:
  """Returns the arguments of a call up to `end`, whose values are JSON, and where they end."""
  arguments = {}
  while (at := _after_space(text, at)) < len(text) and text[at] != end:
    match = _ARGUMENT.match(text, at)
    if not match:
      raise _Unreadable(f"an argument of a call is not NAME=VALUE: {text[at : at + 20]!r}")
    constant = _PYTHON_CONSTANT.match(text, match.end())
    if constant:
      arguments[match[1]], at = PYTHON_CONSTANTS[constant[0]], constant.end()
    else:
      arguments[match[1]], at = _json(text, match.end())
    at = _after_space(text, at)
    if at < len(text) and text[at] not in (",", end):
      raise _Unreadable(f"an argument of a call is followed by {text[at : at + 20]!r}")
    at += text.startswith(",", at)
  return arguments, at


def _python_calls(text: str) -> list[ToolCall]:
  """Returns calls that are written as in Python, one after another."""
  calls = []
  at = 0
  while (at := _after_space(text, at)) < len(text):
    match = _PYTHON_CALL.match(text, at)
    if not match:
      raise _Unreadable(f"a call is not NAME(ARGUMENT=VALUE, ...): {text[at : at + 20]!r}")
    arguments, at = _keyword_arguments(text, match.end(), ")")
    if not text.startswith(")", at):
      raise _Unreadable(f"the call of {match[1]!r} is not closed")
    calls.append(ToolCall(match[1], arguments))
    at += 1
  return calls


def _mistral_calls(text: str, calls: list[ToolCall]) -> int:
  """Adds the calls after one `[TOOL_CALLS]`; returns where they end."""
  if match := _MISTRAL_HEAD.match(text):
    value, stop = _json(text, match.end())
    calls.append(ToolCall(match[1], value, match[2] or ""))
    return stop
  value, stop = _json(text, 0)
  if not isinstance(value, list):
    value = [value]
  calls += [_call(call, "arguments", "parameters") for call in value]
  return stop
