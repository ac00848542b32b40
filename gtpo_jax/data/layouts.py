"""Converts rows to problems. Layouts of well-known datasets are recognised by their columns.

A row is untrusted: it may hold anything that JSON or Parquet can express. `to_problem` returns a
problem whose fields have the declared types and can be encoded as UTF-8, or raises ValueError.
"""

from __future__ import annotations

import decimal
import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.data.kinds import UNSTATED
from gtpo_jax.data.readers import Row
from gtpo_jax.data.records import NO_ROLE, ROLES, Problem, user
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.storage.files import printable

NO_ANSWER_KIND = "exact"  # of rows whose environment decides
REQUIRED_FIELDS = {"prompt", "answer"}
FIELDS = {*REQUIRED_FIELDS, "kind"}
NOT_EXTRA = {"id", "kind", "extra"}  # columns that are not passed on in `Problem.extra`
MAX_DEPTH = 32  # levels of lists and dicts in `extra`
VALUES = reprlib.Repr()  # shows values in messages: the start of each, however long or deep
VALUES.maxstring = VALUES.maxother = 80
SHOWN_COLUMNS = 200  # characters of the names of columns in a message


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
    location: names the row in messages; its last part (file name and line) is the id of a problem
      without one.

  Raises:
    ValueError: the row is malformed.
  """
  if isinstance(row, ValueError):
    raise row
  if columns:
    return _from_columns(row, columns, location, _answer)
  for required, convert in LAYOUTS:
    if required <= row.keys():
      return convert(row, location)
  names = ", ".join(printable(str(name)) for name in row)[:SHOWN_COLUMNS]
  raise ValueError(
    f"has the columns {names}, no known layout; set data.fields to the columns of prompt and answer"
  )


def to_opening(row: Row | ValueError, columns: dict[str, str], location: str) -> Problem:
  """Converts a row for an environment, which may add the prompt and decide what is correct.

  Arguments and errors are those of `to_problem`, except that the row need not have a known layout.
  Without `prompt`, the message of the user is empty; without `answer`, the answer is.
  """
  if isinstance(row, ValueError) or columns or any(known <= row.keys() for known, _ in LAYOUTS):
    return to_problem(row, columns, location)
  messages = _messages(row["prompt"]) if row.get("prompt") else user("")
  answer = _answer(row["answer"]) if "answer" in row else ""
  others = _others(row, {"prompt", "answer"})
  return Problem(_id(row.get("id"), location), messages, answer, NO_ANSWER_KIND, others, location)


def to_demonstration(row: Row | ValueError, columns: dict[str, str], location: str) -> Problem:
  """Converts a row to a demonstration: a problem whose answer is the completion, unchanged.

  Arguments and errors are those of `to_problem`, except that the columns must be given.
  """
  if isinstance(row, ValueError):
    raise row
  return _from_columns(row, columns, location, _completion)


def _from_columns(
  row: Row, columns: dict[str, str], location: str, text_of: Callable[[Any], str]
) -> Problem:
  prompt, answer = (_column(row, columns[key]) for key in ("prompt", "answer"))
  # A kind that is not the name of a column is the kind of all problems.
  kind = row.get(columns["kind"], columns["kind"]) if "kind" in columns else UNSTATED
  used = {column.split(".")[0] for column in columns.values()}
  return _problem(row, location, prompt, text_of(answer), kind, _others(row, used))


def _problem(
  row: Row,
  location: str,
  prompt: Any,
  answer: str,
  kind: Any,
  extra: Mapping[str, Any] | None = None,
) -> Problem:
  if kind is None:  # a column of Parquet has a null where a row states no kind
    kind = UNSTATED
  if not isinstance(kind, str):
    raise ValueError(f"has a kind that is not text: {VALUES.repr(kind)}")
  return Problem(
    _id(row.get("id", row.get("task_id")), location),
    _messages(prompt),
    answer,
    _encodable(kind, "kind"),
    {**(extra or {}), **_extra(row.get("extra"))},
    location,
  )


def _id(value: Any, location: str) -> str:
  if value is None:
    return Path(location).name
  if not isinstance(value, str | int | float):
    raise ValueError(f"has an id that is neither text nor a number: {VALUES.repr(value)}")
  return _encodable(str(value), "id")


def _answer(value: Any) -> str:
  text = _text(value)
  if text is None or not text.strip():
    raise ValueError(f"has no answer: {VALUES.repr(value)}")
  return _encodable(text.strip(), "answer")


def _completion(value: Any) -> str:
  """Returns a demonstration's completion; a base model learns its spaces and line ends too."""
  text = _text(value)
  if not text:
    raise ValueError(f"has no completion: {VALUES.repr(value)}")
  return _encodable(text, "completion")


def _text(value: Any) -> str | None:
  """Returns a text as it is, and a finite number as its digits; None for anything else."""
  if isinstance(value, str):
    return value
  if isinstance(value, numbers.Integral) and not isinstance(value, bool):
    return str(value)
  if isinstance(value, decimal.Decimal) and value.is_finite():
    return format(value, "f")
  if isinstance(value, float | np.floating) and math.isfinite(value):
    return str(value)
  return None


def _others(row: Row, used: Collection[str]) -> Mapping[str, Any]:
  """Returns the columns of a row that no other field of a problem holds."""
  names = [name for name in row if isinstance(name, str) and name not in {*used, *NOT_EXTRA}]
  return _extra({name: row[name] for name in names})


def _extra(value: Any) -> Mapping[str, Any]:
  if value is None:
    return {}
  if not isinstance(value, Mapping):
    raise ValueError(f"has an extra that is not an object (a dict): {VALUES.repr(value)}")
  level = [value]
  for _ in range(MAX_DEPTH):
    if not level:
      return value
    mappings = [item for item in level if isinstance(item, Mapping)]
    if any(not isinstance(key, str) for mapping in mappings for key in mapping):
      raise ValueError("has an extra with keys that are not text")
    values = [item for mapping in mappings for item in mapping.values()]
    values += [item for part in level if isinstance(part, list | tuple) for item in part]
    level = [item for item in values if isinstance(item, Mapping | list | tuple)]
  raise ValueError(f"has an extra of more than {MAX_DEPTH} levels")


def _messages(prompt: Any) -> tuple[dict[str, str], ...]:
  if isinstance(prompt, str):
    messages = user(prompt)
  elif _is_conversation(prompt):
    messages = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
  else:
    raise ValueError(f"has a prompt that is neither text nor messages: {VALUES.repr(prompt)}")
  for message in messages:
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
      raise ValueError(f"has a message with the role {VALUES.repr(role)}, {NO_ROLE}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
      raise ValueError(f"has a {role} message that is not text: {VALUES.repr(content)}")
    if content is None or not content.strip():
      raise ValueError(f"has an empty {role} message")
    _encodable(content, f"{role} message")
  return messages


def _encodable(text: str, what: str) -> str:
  try:
    text.encode()
  except UnicodeEncodeError as error:  # half of a surrogate pair
    raise ValueError(f"has a character in its {what} that is not valid Unicode: {error}") from None
  return text


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
  extra = _others(row, {"prompt", "answer"})
  kind = row.get("kind", UNSTATED)
  return _problem(row, location, row["prompt"], _answer(row["answer"]), kind, extra)


def _verl(row: Row, location: str) -> Problem:
  truth = _column(row, "reward_model.ground_truth")
  info = row.get("extra_info")
  has_index = isinstance(info, Mapping) and "index" in info
  extra = {"data_source": row.get("data_source", "")}
  name = {"id": info["index"] if has_index else None}
  return _problem(name, location, row["prompt"], _answer(truth), "math", extra)


def _gsm8k(row: Row, location: str) -> Problem:
  if not isinstance(row["answer"], str):
    return _problem(row, location, row["question"], _answer(row["answer"]), "math")
  solution, mark, answer = row["answer"].rpartition("####")
  extra = _others(row, {"question", "answer"}) | ({"solution": solution.strip()} if mark else {})
  return _problem(row, location, row["question"], _answer(answer), "math", extra)


def _math(row: Row, location: str) -> Problem:
  extra = _others(row, {"problem", "answer"})
  return _problem(row, location, row["problem"], _answer(row["answer"]), "math", extra)


def _humaneval(row: Row, location: str) -> Problem:
  extra = {key: row[key] for key in ("prompt", "test", "entry_point")}
  return _problem(row, location, row["prompt"], _answer(row["entry_point"]), "code", extra)


def _mbpp(row: Row, location: str) -> Problem:
  extra = {
    "test_list": row["test_list"],
    "test_setup_code": row.get("test_setup_code") or "",
    "test_imports": row.get("test_imports") or [],
  }
  prompt = row.get("text", row.get("prompt"))
  answer = location if row.get("task_id") is None else row["task_id"]
  return _problem(row, location, prompt, _answer(answer), "code", extra)


def _stdin(row: Row, location: str) -> Problem:
  if not row["input_output"]:
    raise ValueError("has no tests: its input_output is empty")
  name = _id(row.get("problem_id"), location)
  extra = {"input_output": row["input_output"]}
  return _problem({"id": name}, location, row["question"], _answer(name), "code", extra)


def _ifeval(row: Row, location: str) -> Problem:
  """IFEval has no answers; a problem's answer is the list of its instructions."""
  names = row["instruction_id_list"]
  if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
    raise ValueError(f"has an instruction_id_list that is not a list: {VALUES.repr(names)}")
  extra = _others(row, {"prompt", "answer"})
  fields = {"id": row.get("id", row.get("key"))}
  answer = _answer(", ".join(names))
  return _problem(fields, location, row["prompt"], answer, "constraints", extra)


# Required columns and conversion of each layout, the most specific first.
LAYOUTS: tuple[tuple[set[str], Callable[[Row, str], Problem]], ...] = (
  ({"prompt", "reward_model"}, _verl),  # DAPO-Math-17k and the other files of verl
  ({"prompt", "test", "entry_point"}, _humaneval),
  ({"prompt", "instruction_id_list", "kwargs"}, _ifeval),  # IFEval and the training sets like it
  ({"text", "test_list"}, _mbpp),
  ({"prompt", "test_list"}, _mbpp),  # MBPP sanitized
  ({"question", "input_output"}, _stdin),  # APPS, TACO
  ({"prompt", "answer"}, _native),
  ({"question", "answer"}, _gsm8k),
  ({"problem", "answer"}, _math),  # MATH-500, AIME
)
