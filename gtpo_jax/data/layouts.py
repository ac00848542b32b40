"""Converts rows to problems. Layouts of well-known datasets are recognised by their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.data.readers import Row
from gtpo_jax.data.records import Problem, user
from gtpo_jax.runtime.errors import UserError

REQUIRED_FIELDS = {"prompt", "answer"}
FIELDS = {*REQUIRED_FIELDS, "kind"}
DEFAULT_KIND = "math"


def parse_fields(fields: str) -> dict[str, str]:
  """Parses `data.fields`, such as "prompt=question,answer=answer,kind=math".

  Returns:
    The column of each field; empty if `fields` is empty, which selects a known layout.

  Raises:
    UserError: prompt or answer is missing, or a field is unknown.
  """
  pairs = [part.partition("=") for part in fields.replace(" ", "").split(",") if part]
  columns = {key: value for key, _, value in pairs}
  complete = all(columns.values()) and REQUIRED_FIELDS <= columns.keys() <= FIELDS
  if columns and not complete:
    raise UserError(
      "data.fields must name prompt and answer (and kind), as "
      f"prompt=question,answer=answer,kind=math; got {fields!r}"
    )
  return columns


def to_problem(row: Row | ValueError, columns: dict[str, str], location: str) -> Problem:
  """Converts a row to a problem.

  Args:
    row: the row, or the error that occurred when it was read.
    columns: from `parse_fields`.
    location: names the row in messages; its last part is the id of a problem without one.

  Raises:
    ValueError: the row is malformed.
  """
  if isinstance(row, ValueError):
    raise row
  if columns:
    prompt, answer = (_column(row, columns[key]) for key in ("prompt", "answer"))
    # A kind that is not the name of a column is the kind of all problems.
    kind = row.get(columns["kind"], columns["kind"]) if "kind" in columns else DEFAULT_KIND
    return _problem(row, location, prompt, answer, kind)
  for required, convert in LAYOUTS:
    if required <= row.keys():
      return convert(row, location)
  raise ValueError(
    f"has the columns {', '.join(map(str, row))}, no known layout; "
    "set data.fields to the columns of prompt and answer"
  )


def _problem(
  row: Row,
  location: str,
  prompt: Any,
  answer: Any,
  kind: Any,
  extra: Mapping[str, Any] | None = None,
) -> Problem:
  messages = _messages(prompt)
  is_answer = isinstance(answer, str | int | float) and not isinstance(answer, bool)
  if not is_answer or not str(answer).strip():
    raise ValueError(f"has no answer: {answer!r}")
  # The default id is the file name and the line number.
  name = row.get("id", row.get("task_id", Path(location).name))
  extra = extra or row.get("extra") or {}
  return Problem(str(name), messages, str(answer).strip(), str(kind), extra)


def _messages(prompt: Any) -> tuple[dict[str, str], ...]:
  if isinstance(prompt, str):
    messages = user(prompt)
  elif _is_conversation(prompt):
    messages = tuple({"role": str(m["role"]), "content": m["content"]} for m in prompt)
  else:
    raise ValueError(f"has a prompt that is neither text nor messages: {str(prompt)[:80]!r}")
  for message in messages:
    if not isinstance(message["content"], str) or not message["content"].strip():
      raise ValueError(f"has an empty {message['role']} message")
    message["content"].encode()  # surrogates raise UnicodeEncodeError, a ValueError
  return messages


def _is_conversation(prompt: Any) -> bool:
  if not isinstance(prompt, list | tuple) or not prompt:
    return False
  return all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)


def _column(row: Row, name: str) -> Any:
  """Returns a column by name. A dot in the name selects a nested column."""
  value: Any = row
  for part in name.split("."):
    if not isinstance(value, Mapping) or part not in value:
      raise ValueError(f"has no column {name!r}")
    value = value[part]
  return value


def _native(row: Row, location: str) -> Problem:
  return _problem(row, location, row["prompt"], row["answer"], row.get("kind", DEFAULT_KIND))


def _verl(row: Row, location: str) -> Problem:
  truth = _column(row, "reward_model.ground_truth")
  info = row.get("extra_info")
  has_index = isinstance(info, Mapping) and "index" in info
  name = {"id": str(info["index"]) if has_index else Path(location).name}
  extra = {"data_source": row.get("data_source", "")}
  return _problem(name, location, row["prompt"], truth, "math", extra)


def _gsm8k(row: Row, location: str) -> Problem:
  if not isinstance(row["answer"], str):
    return _problem(row, location, row["question"], row["answer"], "math")
  solution, mark, answer = row["answer"].rpartition("####")
  extra = {"solution": solution.strip()} if mark else {}
  return _problem(row, location, row["question"], answer, "math", extra)


def _math(row: Row, location: str) -> Problem:
  return _problem(row, location, row["problem"], row["answer"], "math")


def _humaneval(row: Row, location: str) -> Problem:
  extra = {key: row[key] for key in ("prompt", "test", "entry_point")}
  return _problem(row, location, row["prompt"], row["entry_point"], "code", extra)


def _mbpp(row: Row, location: str) -> Problem:
  extra = {
    "test_list": list(row["test_list"]),
    "test_setup_code": row.get("test_setup_code", ""),
    "test_imports": list(row.get("test_imports") or ()),
  }
  prompt = row.get("text", row.get("prompt"))
  return _problem(row, location, prompt, str(row.get("task_id", location)), "code", extra)


def _stdin(row: Row, location: str) -> Problem:
  if not row["input_output"]:
    raise ValueError("has no tests: its input_output is empty")
  name = str(row.get("problem_id", Path(location).name))
  extra = {"input_output": row["input_output"]}
  return _problem({"id": name}, location, row["question"], name, "code", extra)


# Required columns and conversion of each layout, the most specific first.
LAYOUTS: tuple[tuple[set[str], Callable[[Row, str], Problem]], ...] = (
  ({"prompt", "reward_model"}, _verl),  # DAPO-Math-17k and the other files of verl
  ({"prompt", "test", "entry_point"}, _humaneval),
  ({"text", "test_list"}, _mbpp),
  ({"prompt", "test_list"}, _mbpp),  # MBPP sanitized
  ({"question", "input_output"}, _stdin),  # APPS, TACO
  ({"prompt", "answer"}, _native),
  ({"question", "answer"}, _gsm8k),
  ({"problem", "answer"}, _math),  # MATH-500, AIME
)
