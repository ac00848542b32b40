"""Demonstrations for a warm start: prompts with the completions to imitate.

They are training data and not problems, so nothing is done for a verifier: no character of a
completion changes, and a demonstration that occurs nine times is imitated nine times as often.

A completion may have several turns. It is a list of messages then, whose first and last are turns
of the assistant, with what tools or an environment answered between them:

    [{"role": "assistant", "content": "",
      "tool_calls": [{"function": {"name": "add", "arguments": {"x": "46+37"}}}]},
     {"role": "tool", "content": "83"},
     {"role": "assistant", "content": "It is 83."}]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gtpo_jax.data.layouts import parse_fields, to_demonstration
from gtpo_jax.data.readers import Row, read_rows
from gtpo_jax.data.records import NO_ROLE, ROLES, Problem
from gtpo_jax.data.sources import Loaded, Malformed, no_rows, record_rows
from gtpo_jax.runtime.files import unique_keys

TURNS = "completion"  # in `Problem.extra`: the messages of a completion with several turns


def load_demonstrations(
  name: str, fields: str, bad_rows: int = 0, records: Iterable[Mapping[str, Any]] | None = None
) -> Loaded:
  """Reads a source of demonstrations.

  Args:
    name: a path, `hf:...` or `tfds:...`, as `sources.load_source` reads it; of `records`, their
      name in messages.
    fields: the columns, as `warm_start.columns` of a config gives them.
    bad_rows: number of malformed rows that may be skipped.
    records: rows in memory to convert instead, one dict each.

  Returns:
    One problem per well-formed row, in the order of the source, with the completion as its answer.
    A completion with several turns is in `extra` instead (`TURNS`).
  """
  rows = read_rows(name) if records is None else record_rows(records, name)
  columns = parse_fields(fields)
  malformed = Malformed(bad_rows)
  kept = []
  num_rows = 0
  for location, row in rows:
    num_rows += 1
    try:
      kept.append(_demonstration(row, columns, location))
    except ValueError as error:
      malformed.add(location, error)
  if not kept:
    raise no_rows(name, "demonstration", num_rows)
  return Loaded(tuple(kept), num_rows, 0, tuple(malformed.rows))


def _demonstration(row: Row | ValueError, columns: dict[str, str], location: str) -> Problem:
  """Converts a row; raises ValueError if it is malformed."""
  name = columns["answer"]
  turns = None if isinstance(row, ValueError) else row.get(name)
  if not isinstance(turns, list | tuple):
    return to_demonstration(row, columns, location)
  messages = [_message(message) for message in turns]
  is_turn = [message["role"] == "assistant" for message in messages]
  if not messages or not (is_turn[0] and is_turn[-1]):
    raise ValueError("has a completion that does not begin and end with a turn of the assistant")
  if any(is_turn[i] and is_turn[i + 1] for i in range(len(is_turn) - 1)):
    raise ValueError("has a completion with two turns of the assistant and nothing between them")
  problem = to_demonstration({**row, name: "-"}, columns, location)
  extra = {**problem.extra, TURNS: messages}
  return dataclasses.replace(problem, answer="", extra=extra)


def _message(message: Any) -> dict[str, Any]:
  """Returns a message of a completion with the fields that are read."""
  if not isinstance(message, Mapping) or message.get("role") not in ROLES:
    raise ValueError(f"has a completion with a message of a role {NO_ROLE}")
  role = message["role"]
  content = message.get("content") or ""
  calls = message.get("tool_calls") or []
  if not isinstance(content, str) or not (content or (role == "assistant" and calls)):
    raise ValueError(f"has a completion with a message of the {role} without text")
  if role != "assistant":
    texts = {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    return {"role": role, "content": content, **texts}
  return {"role": role, "content": content, "tool_calls": _calls(calls)}


def _calls(calls: Any) -> list[dict[str, Any]]:
  """Returns calls with arguments that are objects."""
  converted = []
  for call in calls if isinstance(calls, Sequence) else [calls]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
      raise ValueError("has a completion with a call that has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # JSON within JSON
      arguments = json.loads(arguments, object_pairs_hook=unique_keys)
    if not isinstance(arguments, Mapping):
      raise ValueError(f"has a call of {function['name']!r} whose arguments are not an object")
    function = {"name": function["name"], "arguments": dict(arguments)}
    converted.append({"id": str(call.get("id") or ""), "function": function})
  return converted
