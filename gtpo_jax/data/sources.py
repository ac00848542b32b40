"""Problems from files and datasets: JSONL, Parquet, Hugging Face datasets and TFDS.

A source is named by a path (`train.jsonl`, `train.jsonl.gz`, `math.parquet`, or a folder of them),
by `hf:ID[:CONFIG][:SPLIT]`, or by `tfds:NAME[:SPLIT]`. A Python program can pass a sequence of
dicts instead. Malformed rows are counted and skipped up to a limit. Exact duplicates are dropped.

This is the one place where untrusted bytes become problems. Whatever the bytes, the result is a
tuple of well-formed problems or a `UserError` of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gtpo_jax.data.kinds import DEFAULT_KIND, with_kinds
from gtpo_jax.data.layouts import parse_fields, to_problem
from gtpo_jax.data.readers import RECORDS, LocatedRow, Row, is_source, read_rows
from gtpo_jax.data.records import Problem
from gtpo_jax.runtime.errors import UserError, first_line

# Raises ValueError if completions of a problem of this kind, with this answer and extra, cannot be
# checked.
Check = Callable[[str, str, Mapping[str, Any]], None]

__all__ = ["RECORDS", "Check", "Loaded", "is_source", "load_records", "load_source", "too_many_bad"]


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The problems of a source.

  Attributes:
    problems: in the order of the source, without duplicates.
    rows: number of rows read.
    duplicates: number of rows dropped because an earlier row is the same problem.
    bad: the skipped rows, each as its location and the reason.
    note: how the verifier was chosen for rows that name none; "" if that is not worth a line.
  """

  problems: tuple[Problem, ...]
  rows: int
  duplicates: int
  bad: tuple[str, ...]
  note: str = ""

  def summary(self, name: str) -> str:
    """Returns a one-line summary for the user."""
    parts = [f"{name}: {len(self.problems)} problems of {self.rows} rows"]
    if self.duplicates:
      parts.append(f"{self.duplicates} duplicates dropped")
    if self.bad:
      parts.append(f"{len(self.bad)} skipped, first {self.bad[0]}")
    if self.note:
      parts.append(self.note)
    return ", ".join(parts)


def load_source(
  name: str, fields: str = "", bad_rows: int = 0, check: Check | None = None
) -> Loaded:
  """Reads a source.

  Args:
    name: a path, `hf:...` or `tfds:...`; see the module's docstring.
    fields: the columns to read if the layout is unknown, such as
      `prompt=instruction,answer=output,kind=math`. A kind that is not the name of a column is the
      kind of all problems.
    bad_rows: number of malformed rows that may be skipped.
    check: decides whether completions can be checked, as `rewards.check_gold` does; a row that it
      refuses is malformed. None accepts all.

  Raises:
    UserError: there is no such source, it has more malformed rows than `bad_rows`, or it has no
      problem at all.
  """
  return _load(name, read_rows(name), fields, bad_rows, check)


def load_records(
  records: Iterable[Row], name: str, fields: str = "", bad_rows: int = 0, check: Check | None = None
) -> Loaded:
  """Converts rows in memory, in the same way as `load_source` converts the rows of a file.

  Args:
    records: one dict per row.
    name: the name of the records in messages.
    fields: see `load_source`.
    bad_rows: see `load_source`.
    check: see `load_source`.

  Raises:
    UserError: `records` is not an iterable of dicts, or an error of `load_source`.
  """
  if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
    raise UserError(
      f"{name} must be a list of dicts, got {type(records).__name__} {str(records)[:60]!r}; "
      "to read a file, name it in the config's data.train or data.eval"
    )
  rows = ((f"{name}[{i}]", _as_row(record)) for i, record in enumerate(records))
  return _load(name, rows, fields, bad_rows, check)


def _as_row(record: object) -> Row | ValueError:
  if isinstance(record, Mapping):
    return dict(record)
  return ValueError(f"must be a dict, got {type(record).__name__}")


def too_many_bad(bad: Sequence[str], bad_rows: int) -> UserError:
  """Returns the error for more malformed rows than `bad_rows`; it names the last one."""
  return UserError(
    f"{bad[-1]} ({len(bad)} malformed row(s), data.bad_rows = {bad_rows} allowed); "
    "fix it, set data.fields, or allow more"
  )


def _load(
  name: str, rows: Iterable[LocatedRow], fields: str, bad_rows: int, check: Check | None
) -> Loaded:
  columns = parse_fields(fields)
  digests: set[bytes] = set()
  problems = []
  bad = []
  num_rows = 0
  duplicates = 0
  for location, row in rows:
    num_rows += 1
    try:
      problem = to_problem(row, columns, location)
      if check:
        check(problem.kind or DEFAULT_KIND, problem.answer, problem.extra)
    except ValueError as error:
      bad.append(f"{location}: {first_line(error)}")
      if len(bad) > bad_rows:
        raise too_many_bad(bad, bad_rows) from error
      continue
    digest = _digest(problem)
    if digest in digests:
      duplicates += 1
      continue
    digests.add(digest)
    problems.append(problem)
  if not problems:
    raise UserError(f"{name!r} contains no problem ({num_rows} rows)")
  with_kind, note = with_kinds(problems)
  return Loaded(with_kind, num_rows, duplicates, tuple(bad), note)


def _digest(problem: Problem) -> bytes:
  """Returns a digest that is equal for problems with the same prompt, answer and tests."""
  content = json.dumps([problem.messages, problem.answer, problem.extra.get("test")], default=str)
  return hashlib.blake2b(content.encode(), digest_size=16).digest()
