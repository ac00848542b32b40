"""Chooses a verifier for rows that name none, by their columns or by their answers.

A column means the same in every layout: `kind`, the tests of programs, instructions, and choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gtpo_jax.data.records import Problem, shown

UNSTATED = ""  # the kind of a problem that names none, while its source is read
DEFAULT_KIND = "math"
CHOICE = "choice"
LETTERS = "ABCDEFGHIJ"  # of the choices that a verifier finds in a text
CHOICE_COLUMNS = ("choices", "options")
# Columns that may name the right choice.
ANSWER_COLUMNS = ("answer", "answerKey", "answer_key", "answer_idx", "answer_index")
# The kind of a row that names none but has one of these columns, if that is neither null nor empty.
KIND_OF_COLUMN = {
  "test_list": "code",
  "input_output": "code",
  "instruction_id_list": "constraints",
  **dict.fromkeys(CHOICE_COLUMNS, CHOICE),
}

_CHOICE = re.compile(r"\(?[A-J]\)?")
# Words and simple punctuation: nothing that mathematics could compare.
_PLAIN = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[-'’.,;:!? ]+[^\W\d_]+)*[.!?]?", re.DOTALL)
_MATHEMATICAL = frozenset(("pi", "inf", "infinity", "undefined", "none"))
MAX_SHOWN = 40  # characters of an answer in a message


def with_kinds(problems: Sequence[Problem]) -> tuple[tuple[Problem, ...], str]:
  """Gives the problems without a kind the one that fits all of their answers.

  `choice` if they are letters from A to J, `exact` if they are words, else `math`.

  Returns:
    The problems in the same order, and a note for the user; "" if all state a kind or are numbers
    or formulas.
  """
  unstated = [problem for problem in problems if problem.kind == UNSTATED]
  if not unstated:
    return tuple(problems), ""
  plain = [problem.answer for problem in unstated if _is_plain(problem.answer)]
  letters = {problem.answer for problem in unstated}
  kind = DEFAULT_KIND
  note = ""
  if len(letters) > 1 and all(map(_CHOICE.fullmatch, letters)):
    kind = "choice"
    note = "kind choice, since the answers are letters (a column kind overrides it)"
  elif len(plain) == len(unstated):
    kind = "exact"
    note = "kind exact, since the answers are plain text (a column kind overrides it)"
  elif plain:
    note = (
      f"kind math, which is not made for the {len(plain)} answers that are plain text, such as "
      f"{plain[0][:MAX_SHOWN]!r}: give those rows a column kind with exact"
    )
  chosen = (
    dataclasses.replace(problem, kind=kind) if problem.kind == UNSTATED else problem
    for problem in problems
  )
  return tuple(chosen), note


def kind_of_columns(row: Mapping[str, Any]) -> str:
  """Returns the kind that a row's columns imply, or `UNSTATED`."""
  kinds = (kind for name, kind in KIND_OF_COLUMN.items() if not is_empty(row.get(name)))
  return next(kinds, UNSTATED)


def is_empty(value: Any) -> bool:
  """Returns whether a column has no value in a row."""
  return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def tests_of(value: Any) -> dict[str, Any]:
  """Returns the tests in a gold answer as the columns that they would have; {} if it is none.

  Tests are an object with `inputs` and `outputs`, or asserts: a text or a list of texts. Any of
  these may be written as JSON. Such are the answers of programs in verl's files.
  """
  parsed = value
  if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
    with contextlib.suppress(ValueError, RecursionError):
      parsed = json.loads(value)
  if isinstance(parsed, Mapping) and {"inputs", "outputs"} <= parsed.keys():
    return {"input_output": value}
  lines = [parsed] if isinstance(parsed, str) else parsed
  is_assert = lambda line: isinstance(line, str) and re.match(r"\s*assert\b", line)
  if isinstance(lines, list | tuple) and lines and all(map(is_assert, lines)):
    return {"test_list": list(lines)}
  return {}


class Choices(NamedTuple):
  """The choices of a row."""

  texts: tuple[str, ...]  # what they say
  names: tuple[str, ...]  # what the row calls them: its labels, or else the letters from A

  def lines(self) -> str:
    """Returns the choices as they are added to a prompt."""
    pairs = zip(LETTERS, self.texts, strict=False)
    return "\n".join(f"({letter}) {text}" for letter, text in pairs)

  def letter(self, answer: Any) -> str:
    """Returns the letter of the right choice.

    Raises:
      ValueError: it is none of these, or it means several choices.
    """
    text = str(answer).strip()
    meant = {names.index(text) for names in (self.names, self.texts) if text in names}
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(self.texts):
      meant |= {answer} if text not in self.names else set()
    if not meant and (letter := re.fullmatch(r"\(?([A-Ja-j])[).]?", text)):
      meant = {LETTERS.index(letter[1].upper())} - set(range(len(self.texts), len(LETTERS)))
    if len(meant) != 1:
      which = "none" if not meant else f"{len(meant)}"
      raise ValueError(
        f"has the answer {shown(answer)}, which names {which} of its choices "
        f"{shown(list(self.texts))}; write the letter of the right one, from A"
      )
    return LETTERS[meant.pop()]

  def contradicted(self, row: Mapping[str, Any], answer: str) -> str:
    """Returns the column of a row that names another choice than `answer`, and its value, or "".

    A number may count choices from 0 or from 1.
    """
    for name in ANSWER_COLUMNS:
      value = row.get(name)
      meant = set()
      for x in (value, value - 1) if isinstance(value, int) else (value,):
        with contextlib.suppress(ValueError):
          meant.add(self.letter(x))
      if meant and answer in LETTERS and answer not in meant:
        return f"{name} = {shown(value)}"
    return ""


def choices_of(row: Mapping[str, Any]) -> Choices | None:
  """Returns the choices of a row: a list, {"A": ...}, or {"label": [...], "text": [...]}.

  Returns None if the row has none.

  Raises:
    ValueError: they are something else, fewer than 2, more than there are letters, or not distinct.
  """
  values = [row[name] for name in CHOICE_COLUMNS if not is_empty(row.get(name))]
  if not values:
    return None
  value = values[0]
  if any(other != value for other in values):
    columns = " and ".join(CHOICE_COLUMNS)
    raise ValueError(f"has {columns} that differ: {' and '.join(map(shown, values))}")
  names = LETTERS
  texts = value
  if isinstance(value, Mapping):
    is_table = isinstance(value.get("text"), list | tuple)
    names = value.get("label", LETTERS) if is_table else tuple(value)
    texts = value["text"] if is_table else tuple(value.values())
  is_text = lambda item: isinstance(item, str | int | float) and not isinstance(item, bool)
  lists = (texts, names) if isinstance(names, list | tuple) else (texts,)
  valid = all(isinstance(items, list | tuple) and all(map(is_text, items)) for items in lists)
  if not valid or not 2 <= len(texts) <= len(LETTERS) or len(names) < len(texts):
    raise ValueError(
      f"has choices that are not 2 to {len(LETTERS)} texts, as "
      f'{{"choices": ["red", "blue"]}}: {shown(value)}'
    )
  as_texts = lambda items: tuple(str(item).strip() for item in items)
  choices = Choices(as_texts(texts), as_texts(names)[: len(texts)])
  if not all(choices.texts):
    raise ValueError(f"has a choice without text: {shown(value)}")
  for items in choices:
    if twice := next((item for item in items if items.count(item) > 1), None):
      raise ValueError(f"has the choice {shown(twice)} twice: {shown(value)}")
  return choices


def _is_plain(answer: str) -> bool:
  return bool(_PLAIN.fullmatch(answer)) and answer.lower() not in _MATHEMATICAL
