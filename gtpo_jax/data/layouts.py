"""Converts rows to problems. Layouts of well-known datasets are recognised by their columns.

A row is untrusted: it may hold anything that JSON or Parquet can express. `to_problem` returns a
problem whose fields have the declared types and can be encoded as UTF-8, or raises ValueError.
"""

from __future__ import annotations

import decimal
import functools
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.data.kinds import (
  CHOICE,
  LETTERS,
  UNSTATED,
  Choices,
  choices_of,
  is_empty,
  kind_of_columns,
  tests_of,
)
from gtpo_jax.data.readers import ClassIndex, Row, WrittenFloat
from gtpo_jax.data.records import MEDIA, Problem, encodable, shown, to_messages, user
from gtpo_jax.rewards.math.extraction import gold_answer
from gtpo_jax.rewards.math.values import Number, read, same
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.files import printable

NO_ANSWER_KIND = "exact"  # of rows without an answer, which no verifier reads
# The answer of a problem whose kind compares completions with something else.
WITHOUT_ANSWER = {"code": "its tests", "constraints": "its instructions"}
PROMPT_AND_ANSWER = ("prompt", "answer")
FIELDS = {*PROMPT_AND_ANSWER, "kind"}
PROMPTS = ("prompt", "question", "problem")  # columns of the prompt
ANSWERS = ("answer", "answerKey", "solution")  # columns of the gold answer, the first that exists
# Columns that must not state another number; of a solution, what it marks.
OTHER_ANSWERS = ("answer", "solution", "final_answer", "gold_answer", "ground_truth")
NOT_EXTRA = {"id", "kind", "extra"}  # columns that are not passed on in `Problem.extra`
MAX_DEPTH = 32  # levels of lists and dicts in `extra`
# Columns that only some layouts read; they are passed on all the same.
READ_BY_LAYOUTS = {
  *("answerKey", "solution", "reward_model", "ability", "extra_info", "task_id", "problem_id"),
  *("key", "prompt", "test", "entry_point", "truth"),
}
# Marks of byte order and direction, characters without a width, control codes and private use;
# without the joiners of scripts and emojis.
_INVISIBLE = re.compile(
  "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f"
  "\u202a-\u202e\u2060-\u206f\u3164\ue000-\uf8ff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f"
  "\U000f0000-\U0010ffff]|(?<=[0-9])\ufe0f(?!\u20e3)"
)
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
  if len(columns) < len(pairs) or (columns and columns.get("prompt") == columns.get("answer")):
    raise UserError(
      f"data.fields must name each field once, and prompt and answer as two columns; got {fields!r}"
    )
  complete = all(columns.values()) and {*PROMPT_AND_ANSWER} <= columns.keys() <= FIELDS
  if columns and not complete:
    raise UserError(
      "data.fields must name prompt and answer (and kind), as "
      f"prompt=question,answer=answer,kind=math; got {fields!r}"
    )
  return columns


def to_problem(
  row: Row | ValueError,
  columns: dict[str, str],
  location: str,
  needs: Collection[str] = PROMPT_AND_ANSWER,
) -> Problem:
  """Converts a row to a problem.

  Args:
    row: the row, or the error that occurred when it was read.
    columns: from `parse_fields`.
    location: names the row in messages; its last part (file name and line) is the id of a problem
      without one.
    needs: what the row must have. A reward function of the user, or a judge, needs no "answer"; an
      environment needs no "prompt" either. What is missing is empty.
  """
  if isinstance(row, ValueError):
    raise row
  if columns:
    return _problem(row, location, _from_columns(row, columns), needs)
  filled = {name for name, value in row.items() if not is_empty(value)}
  for present in (filled, row.keys()):  # a column of a table may be empty in this row
    for required, read_row in LAYOUTS:
      if required <= present:
        fields = read_row(row)
        _check_answers(row, fields.answer)
        return _problem(row, location, fields, needs)
  opens = "prompt" not in needs  # then an environment reads the other columns
  prompt = "prompt" if opens else next((name for name in PROMPTS if name in row), "")
  if "answer" not in needs and prompt:
    used = {prompt, "answer"}
    fields = RowFields(row.get(prompt), row.get("answer"), used, NO_ANSWER_KIND)
    return _problem(row, location, fields, needs)
  names = ", ".join(printable(str(name)) for name in row)[:SHOWN_COLUMNS]
  raise ValueError(
    f"has the columns {names}, no known layout; set data.fields to the columns of prompt and answer"
  )


def to_demonstration(row: Row | ValueError, columns: dict[str, str], location: str) -> Problem:
  """Converts a row to a demonstration: a problem whose answer is the completion, unchanged.

  Arguments and errors are as in `to_problem`, except that the columns must be given.
  """
  if isinstance(row, ValueError):
    raise row
  fields = _from_columns(row, columns)._replace(used=mapped_columns(columns))
  return Problem(
    _id(row, fields.id, location),
    to_messages(fields.prompt),
    _completion(fields.answer),
    _kind(row, fields),
    _others(row, fields),
    location,
  )


class RowFields(NamedTuple):
  """What a layout finds in a row."""

  prompt: Any  # a text or a conversation
  answer: Any  # the gold answer; of programs and instructions, a name
  used: Collection[str]  # columns that are not passed on in `Problem.extra`
  kind: Any = UNSTATED  # the kind of the layout, for a row that names none
  id: Any = None  # the row's id, for a row without the columns `id` and `task_id`
  extra: Mapping[str, Any] = {}  # further entries of `Problem.extra`


def _problem(row: Row, location: str, fields: RowFields, needs: Collection[str]) -> Problem:
  """Returns the problem of a row, with the columns that mean the same in every layout."""
  id = _id(row, fields.id, location)
  kind = _kind(row, fields) or kind_of_columns(row)
  no_prompt = "prompt" not in needs and not fields.prompt
  if "prompt" in needs and (lost := next((x for x in MEDIA if not is_empty(row.get(x))), None)):
    raise ValueError(f"has a column {lost!r}, which its prompt would lose: models read text only")
  messages = user("") if no_prompt else to_messages(fields.prompt)
  answer = fields.answer
  if kind == CHOICE and (choices := choices_of(row)):
    messages = _with_choices(messages, choices)
    answer = _letter(choices, answer, needs)
    if stated := choices.contradicted(row, answer):
      raise ValueError(f"has the answer {answer}, but {stated}; leave the wrong one out")
  elif kind in WITHOUT_ANSWER and not _is_answer(answer):
    answer = WITHOUT_ANSWER[kind]
  others = _others(row, fields)
  if "answer" in needs or _is_answer(answer):
    text = _answer(answer)
  else:
    text = ""
    kind = kind or NO_ANSWER_KIND
    others = {"answer": answer, **others} if answer else others  # such as an object
  return Problem(id, messages, text, kind, others, location)


def _with_choices(
  messages: tuple[dict[str, str], ...], choices: Choices
) -> tuple[dict[str, str], ...]:
  """Adds the choices to the last message, unless it lists them already."""
  *others, last = messages
  labels = [
    re.findall(
      rf"(?<![\w.])\(?([A-Za-z]|\d{{1,2}})[).:]\s*{re.escape(text)}(?!\w)", last["content"]
    )
    for text in choices.texts
  ]
  separator = r"\s*[,;/|\n][\s*•-]*(?:(?:or|and)\s+)?"
  in_order = rf"(?<!\w){separator.join(map(re.escape, choices.texts))}(?!\w)"
  if re.search(in_order, last["content"]):
    return messages
  if all(labels):
    listed = [found[-1].upper() for found in labels]
    letters = list(LETTERS[: len(listed)])
    if listed != letters:
      raise ValueError(
        f"lists its choices as {', '.join(listed)} in its prompt, but its column has them as "
        f"{', '.join(letters)}; write them in one order, with letters from A"
      )
    return messages
  return (*others, {**last, "content": f"{last['content'].rstrip()}\n{choices.lines()}"})


def _letter(choices: Choices, answer: Any, needs: Collection[str]) -> Any:
  try:
    return choices.letter(answer)
  except ValueError:
    if "answer" in needs:
      raise
  return answer  # a user's function reads it


def mapped_columns(columns: dict[str, str]) -> set[str]:
  """Returns the columns that `data.fields` names; for `a.b` it is `a`."""
  return {column.partition(".")[0] for column in columns.values()}


def _from_columns(row: Row, columns: dict[str, str]) -> RowFields:
  prompt, answer = (_column(row, columns[key]) for key in ("prompt", "answer"))
  # A kind that is not the name of a column is the kind of all problems.
  kind = row.get(columns["kind"], columns["kind"]) if "kind" in columns else UNSTATED
  return RowFields(prompt, answer, {"kind"} & columns.keys(), kind)


def _kind(row: Row, fields: RowFields) -> str:
  """Returns the kind that the row states, or else the kind of its layout."""
  stated = None if "kind" in fields.used else row.get("kind")
  kind = fields.kind if stated is None else stated
  if kind is None:  # a column of Parquet has a null where a row states no kind
    kind = UNSTATED
  if not isinstance(kind, str):
    raise ValueError(f"has a kind that is not text: {shown(kind)}")
  return encodable(kind, "kind")


def _id(row: Row, of_layout: Any, location: str) -> str:
  value = next((x for x in (row.get("id"), row.get("task_id"), of_layout) if x is not None), None)
  if value is None:
    return Path(location).name
  if not isinstance(value, str | int | float):
    raise ValueError(f"has an id that is neither text nor a number: {shown(value)}")
  return encodable(str(value), "id")


def _check_answers(row: Row, answer: Any) -> None:
  """Raises ValueError if a column states another number than the layout's answer."""

  def number(value: Any) -> Number | None:
    text = gold_answer(str(value))
    parsed = read(text)[1] if len(text) < SHOWN_COLUMNS else None
    return parsed if isinstance(parsed, Number) else None

  own = number(answer)
  for name in OTHER_ANSWERS if own else ():
    if (other := number(row.get(name, ""))) and same(own, other) is False:
      raise ValueError(f"has the answer {shown(answer)}, but {name} = {shown(row[name])}")


def _answer(value: Any) -> str:
  text = _text(value)
  if text is None or not text.strip():
    raise ValueError(f"has no answer: {shown(value)}")
  if mark := _INVISIBLE.search(text):
    raise ValueError(
      f"has the invisible character U+{ord(mark[0]):04X} in its answer, which no completion would "
      "have; remove it"
    )
  return encodable(text.strip(), "answer")


def _completion(value: Any) -> str:
  """Returns a demonstration's completion; a base model learns its spaces and line ends too."""
  text = _text(value)
  if not text:
    raise ValueError(f"has no completion: {shown(value)}")
  return encodable(text, "completion")


def _text(value: Any) -> str | None:
  """Returns a text as it is, a label's name, and a number's digits; None for anything else."""
  if isinstance(value, str):
    return value
  if isinstance(value, ClassIndex):
    return value.name
  if isinstance(value, numbers.Integral) and not isinstance(value, bool):
    return str(value)
  if isinstance(value, decimal.Decimal) and value.is_finite():
    return format(value, "f")
  if isinstance(value, WrittenFloat):
    return format(decimal.Decimal(value.text), "f")
  if isinstance(value, float | np.floating) and math.isfinite(value):
    return str(value)
  return None


def _is_answer(value: Any) -> bool:
  text = _text(value)
  return text is not None and bool(text.strip())


def _others(row: Row, fields: RowFields) -> Mapping[str, Any]:
  """Returns the columns that no other field of a problem holds, and what `extra` holds."""
  left_out = {*fields.used, *NOT_EXTRA}
  names = [name for name in row if isinstance(name, str) and name not in left_out]
  columns = _extra({name: row[name] for name in names})
  return {**columns, **fields.extra, **_extra(row.get("extra"))}


def _extra(value: Any) -> Mapping[str, Any]:
  if value is None:
    return {}
  if not isinstance(value, Mapping):
    raise ValueError(f"has an extra that is not an object (a dict): {shown(value)}")
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


def _column(row: Row, name: str) -> Any:
  """Returns a column by name. A dot in the name selects a nested column."""
  value: Any = row
  for part in name.split("."):
    if not isinstance(value, Mapping) or part not in value:
      raise ValueError(f"has no column {name!r}")
    value = value[part]
  return value


def _plain(prompt: str, answer: str, row: Row) -> RowFields:
  used = {prompt, answer} if answer == "answer" else {prompt}  # TRL's rewards read solution
  return RowFields(row[prompt], row[answer], used)


def _gsm8k(row: Row) -> RowFields:
  answer = row["answer"]
  if not isinstance(answer, str) or "####" not in answer:
    return _plain("question", "answer", row)
  solution, _, last = answer.rpartition("####")
  extra = {"solution": solution.strip()}
  return RowFields(row["question"], last, {"question", "answer"}, extra=extra)


def _verl(row: Row) -> RowFields:
  truth = _column(row, "reward_model.ground_truth")
  info = row.get("extra_info")
  name = info.get("index") if isinstance(info, Mapping) else None
  if tests := tests_of(truth):
    return RowFields(row["prompt"], None, {"prompt"}, "code", name, tests)
  if row.get("ability") == "code":
    raise ValueError(
      f"is of ability 'code', but its ground_truth has no tests: {shown(truth)}; write "
      '{"inputs": [...], "outputs": [...]} or a list of asserts'
    )
  return RowFields(row["prompt"], truth, {"prompt"}, id=name)


def _humaneval(row: Row) -> RowFields:
  extra = {key: row[key] for key in ("prompt", "test", "entry_point")}
  return RowFields(row["prompt"], row["entry_point"], (), "code", extra=extra)


def _mbpp(row: Row) -> RowFields:
  return RowFields(
    row.get("text", row.get("prompt")), row.get("task_id"), {"text", "prompt"}, "code"
  )


def _stdin(row: Row) -> RowFields:
  if not row["input_output"]:
    raise ValueError("has no tests: its input_output is empty")
  name = row.get("problem_id")
  return RowFields(row["question"], name, {"question"}, "code", name)


def _ifeval(row: Row) -> RowFields:
  """IFEval has no answers; a problem's answer is the list of its instructions."""
  names = row["instruction_id_list"]
  if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
    raise ValueError(f"has an instruction_id_list that is not a list: {shown(names)}")
  used = {"prompt", "answer"}
  return RowFields(row["prompt"], ", ".join(names), used, "constraints", row.get("key"))


# Required columns and what reads them, the most specific first.
LAYOUTS: tuple[tuple[set[str], Callable[[Row], RowFields]], ...] = (
  ({"prompt", "reward_model"}, _verl),  # DAPO-Math-17k and the other files of verl
  ({"prompt", "test", "entry_point"}, _humaneval),
  ({"prompt", "instruction_id_list", "kwargs"}, _ifeval),  # IFEval and the training sets like it
  ({"text", "test_list"}, _mbpp),
  ({"prompt", "test_list"}, _mbpp),  # MBPP sanitized
  ({"question", "input_output"}, _stdin),  # APPS, TACO
  ({"question", "answer"}, _gsm8k),
  # Those of this package, of MATH-500 and AIME (problem), of ARC (answerKey), and of TRL, whose
  # rewards read a column solution.
  *(
    ({prompt, answer}, functools.partial(_plain, prompt, answer))
    for answer in ANSWERS
    for prompt in PROMPTS
  ),
)
