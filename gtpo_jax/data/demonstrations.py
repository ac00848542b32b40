"""Demonstrations for a warm start: prompts with the completions to imitate.

They are training data and not problems, so nothing is done for a verifier: no character of a
completion changes, and a demonstration that occurs nine times is imitated nine times as often.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtpo_jax.data.layouts import parse_fields, to_demonstration
from gtpo_jax.data.readers import LocatedRow, Row, read_rows
from gtpo_jax.data.sources import Loaded, Malformed, no_rows, record_rows


def load_demonstrations(name: str, fields: str, bad_rows: int = 0) -> Loaded:
  """Reads a source of demonstrations.

  Args:
    name: a path, `hf:...` or `tfds:...`, as `sources.load_source` reads it.
    fields: the columns, as `warm_start.columns` of a config gives them.
    bad_rows: number of malformed rows that may be skipped.

  Returns:
    One problem per well-formed row, in the order of the source, with the completion as its answer.

  Raises:
    UserError: there is no such source, it has more malformed rows than `bad_rows`, or it has no
      demonstration at all.
  """
  return _load(name, read_rows(name), fields, bad_rows)


def demonstrations_of(records: Iterable[Row], name: str, fields: str, bad_rows: int = 0) -> Loaded:
  """Converts rows in memory, in the same way as `load_demonstrations` converts those of a file.

  Args:
    records: one dict per row.
    name: the name of the records in messages.
    fields: see `load_demonstrations`.
    bad_rows: see `load_demonstrations`.

  Raises:
    UserError: `records` is not an iterable of dicts, or an error of `load_demonstrations`.
  """
  return _load(name, record_rows(records, name), fields, bad_rows)


def _load(name: str, rows: Iterable[LocatedRow], fields: str, bad_rows: int) -> Loaded:
  columns = parse_fields(fields)
  malformed = Malformed(bad_rows)
  kept = []
  num_rows = 0
  for location, row in rows:
    num_rows += 1
    try:
      kept.append(to_demonstration(row, columns, location))
    except ValueError as error:
      malformed.add(location, error)
  if not kept:
    raise no_rows(name, "demonstration", num_rows)
  return Loaded(tuple(kept), num_rows, 0, tuple(malformed.rows))
