"""Problems from files and datasets: JSONL, CSV, Parquet, Hugging Face, TFDS and reasoning-gym.

A source is named by a path (`train.jsonl`, `train.jsonl.gz`, `a.csv`, `math.parquet`, or a folder),
by `hf:ID[:CONFIG][:SPLIT]`, by `tfds:NAME[:SPLIT]`, or by `rg:NAME[?KNOBS]`. A Python program can
pass a sequence of dicts instead. Malformed rows are counted and skipped up to a limit. Exact
duplicates are dropped; demonstrations have a loader of their own, which keeps them
(`demonstrations.py`).

This is the one place where untrusted bytes become problems. Whatever the bytes, the result is a
tuple of well-formed problems or a `UserError` of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gtpo_jax.data.kinds import with_kinds
from gtpo_jax.data.layouts import (
  PROMPT_AND_ANSWER,
  READ_BY_LAYOUTS,
  SHOWN_COLUMNS,
  mapped_columns,
  parse_fields,
  to_problem,
)
from gtpo_jax.data.pipeline import fixed_sample
from gtpo_jax.data.readers import GYM, LocatedRow, Row, read_rows
from gtpo_jax.data.records import Problem
from gtpo_jax.rewards.verifiers import keys_read
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import printable
from gtpo_jax.runtime.installing import MissingPackage

# Raises ValueError if completions of a problem of this kind, with this answer and extra, cannot be
# checked.
Check = Callable[[str, str, Mapping[str, Any]], None]
Needs = Collection[str]  # what a row must have
HELD_OUT_FRACTION = 10  # one problem in ten is evaluated if no others are named


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The problems of a source."""

  problems: tuple[Problem, ...]  # in the order of the source, without duplicates
  rows: int  # number of rows read
  duplicates: int  # number of rows dropped because an earlier row is the same problem
  bad: tuple[str, ...]  # the skipped rows, each as its location and the reason
  # how the verifier was chosen for rows that name none; "" if that is not worth a line
  note: str = ""
  unread: tuple[str, ...] = ()  # the columns that only a function of the user could read
  columns: tuple[str, ...] = ()  # all columns

  def summary(self, name: str) -> str:
    """Returns a one-line summary for the user."""
    parts = [f"{name}: {len(self.problems)} problems of {self.rows} rows"]
    if self.duplicates:
      parts.append(f"{self.duplicates} duplicates dropped")
    if self.bad:
      parts.append(f"{len(self.bad)} skipped, first {self.bad[0]}")
    if self.note:
      parts.append(self.note)
    if self.unread:
      names = ", ".join(map(printable, self.unread))[:SHOWN_COLUMNS]
      parts.append(f"columns that nothing reads: {names}")
    return ", ".join(parts)


def hold_out(loaded: Loaded, name: str) -> tuple[Loaded, Loaded]:
  """Returns the problems to train on and the tenth to evaluate on, the same ones in every run.

  Args:
    loaded: the problems of a source.
    name: of the source, for errors.
  """
  if len(loaded.problems) == 1:
    raise UserError(
      f"{name} holds 1 problem, so none can be held out for evaluation; "
      "pass more, or others as held_out (on the command line data.eval)"
    )
  count = max(len(loaded.problems) // HELD_OUT_FRACTION, 1)
  held_out = fixed_sample(loaded.problems, count)
  ids = {id(problem) for problem in held_out}
  train = tuple(problem for problem in loaded.problems if id(problem) not in ids)
  return dataclasses.replace(loaded, problems=train), Loaded(tuple(held_out), count, 0, ())


def load_source(
  name: str,
  fields: str = "",
  bad_rows: int = 0,
  check: Check | None = None,
  needs: Needs = PROMPT_AND_ANSWER,
) -> Loaded:
  """Reads a source.

  Args:
    name: a path, `hf:...`, `tfds:...` or `rg:...`; see the module's docstring.
    fields: the columns to read if the layout is unknown, such as
      `prompt=instruction,answer=output,kind=math`; without effect on `rg:...`. A kind that is not
      the name of a column is the kind of all problems.
    bad_rows: number of malformed rows that may be skipped.
    check: decides whether completions can be checked, as `rewards.check_gold` does; a row that it
      refuses is malformed. None accepts all.
    needs: what a row must have, of "prompt" and "answer": both for verifiers, a prompt for a
      function of the user or a judge, nothing for an environment.

  Raises:
    UserError: there is no such source, it has more malformed rows than `bad_rows`, it has no
      problem at all, or one of its problems needs a package that is missing here.
  """
  columns = "" if name.startswith(GYM) else fields  # its rows have a known layout
  return _load(name, read_rows(name), columns, Malformed(bad_rows), check, needs)


def load_records(
  records: Iterable[Row],
  name: str,
  fields: str = "",
  bad_rows: int = 0,
  check: Check | None = None,
  needs: Needs = PROMPT_AND_ANSWER,
) -> Loaded:
  """Converts rows in memory, in the same way as `load_source` converts the rows of a file.

  Args:
    records: one dict per row.
    name: the name of the records in messages.
    fields: see `load_source`.
    bad_rows: see `load_source`.
    check: see `load_source`.
    needs: see `load_source`.

  Raises:
    UserError: `records` is not an iterable of dicts, or an error of `load_source`.
  """
  return _load(name, record_rows(records, name), fields, Malformed(bad_rows), check, needs)


def record_rows(records: Iterable[Row], name: str) -> Iterator[LocatedRow]:
  """Returns rows in memory with their locations."""
  if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
    raise UserError(
      f"{name} must be a list of dicts, got {type(records).__name__} {str(records)[:60]!r}; "
      "to read a file, name it in the config's data.train or data.eval"
    )
  is_row = lambda record: isinstance(record, Mapping)
  wrong = lambda record: ValueError(f"must be a dict, got {type(record).__name__}")
  rows = (dict(record) if is_row(record) else wrong(record) for record in records)
  return ((f"{name}[{i}]", row) for i, row in enumerate(rows))


def needs_of(opens: bool, needs_answer: bool) -> tuple[str, ...]:
  """Returns what a row must have.

  Args:
    opens: whether an environment adds the prompt and decides.
    needs_answer: whether a verifier reads the answer.
  """
  if opens:
    return ()
  return PROMPT_AND_ANSWER if needs_answer else ("prompt",)


class Malformed:
  """The malformed rows of a source, up to a limit.

  Attributes:
    rows: each as its location and the reason.
  """

  def __init__(self, limit: int):
    self.rows: list[str] = []
    self._limit = limit

  def add(self, location: str, error: ValueError) -> None:
    """Counts a row. Raises UserError if there are more than the limit."""
    self.rows.append(f"{location}: {first_line(error)}")
    if len(self.rows) > self._limit:
      raise too_many_bad(self.rows, self._limit) from error


def too_many_bad(bad: Sequence[str], bad_rows: int) -> UserError:
  """Returns the error for more malformed rows than `bad_rows`; it names the last one."""
  return UserError(
    f"{bad[-1]} ({len(bad)} malformed row(s), data.bad_rows = {bad_rows} allowed); "
    "fix it, set data.fields, or allow more"
  )


def _load(
  name: str,
  rows: Iterable[LocatedRow],
  fields: str,
  malformed: Malformed,
  check: Check | None,
  needs: Needs,
) -> Loaded:
  columns = parse_fields(fields)
  digests: set[bytes] = set()
  problems = []
  names: dict[str, None] = {}  # of all columns, in their order
  num_rows = 0
  duplicates = 0
  for location, row in rows:
    num_rows += 1
    try:
      problem = to_problem(row, columns, location, needs)
      if check and problem.kind and problem.answer:
        check(problem.kind, problem.answer, problem.extra)
    except MissingPackage as error:
      raise MissingPackage(f"{location}: {error}") from error
    except ValueError as error:
      malformed.add(location, error)
      continue
    names |= dict.fromkeys(row) | dict.fromkeys(row.get("extra") or ())
    digest = _digest(problem, row.get("id"))
    if digest in digests:
      duplicates += 1
      continue
    digests.add(digest)
    problems.append(problem)
  with_kind, note = with_kinds(problems)
  if check:
    stated = [problem.kind for problem in problems]
    with_kind = _checked(with_kind, stated, malformed, check)
  if not with_kind:
    raise no_rows(name, "problem", num_rows)
  unread = set()  # by layouts and verifiers
  for problem in with_kind:
    unread |= problem.extra.keys() - READ_BY_LAYOUTS - keys_read(problem.kind)
  unread -= mapped_columns(columns)
  in_order = tuple(name for name in names if name in unread)
  return Loaded(
    with_kind, num_rows, duplicates, tuple(malformed.rows), note, in_order, tuple(names)
  )


def _checked(
  problems: Sequence[Problem], stated: Sequence[str], malformed: Malformed, check: Check
) -> tuple[Problem, ...]:
  """Returns the problems that `check` accepts; it has seen problems that state a kind already."""
  accepted = []
  for problem, kind in zip(problems, stated, strict=True):
    try:
      if not kind:
        check(problem.kind, problem.answer, problem.extra)
    except ValueError as error:
      malformed.add(problem.location, error)
      continue
    accepted.append(problem)
  return tuple(accepted)


def no_rows(name: str, what: str, num_rows: int) -> UserError:
  """Returns the error for a source without a single well-formed row."""
  return UserError(f"{name!r} contains no {what} ({num_rows} rows)")


def _digest(problem: Problem, id: Any) -> bytes:
  """Returns a digest that is equal for problems whose rows have equal columns.

  `id` is the column; a row without one has an id of its own.
  """
  plain = lambda value: value.tolist() if hasattr(value, "tolist") else str(value)  # of NumPy
  fields = [problem.messages, problem.answer, problem.kind, problem.extra, id]
  return hashlib.blake2b(
    json.dumps(fields, default=plain, sort_keys=True).encode(), digest_size=16
  ).digest()
