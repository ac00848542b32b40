"""Reads the rows of files and datasets: JSONL, Parquet, Hugging Face datasets, TFDS.

Every reader yields (location, row). The location names the row in messages, such as
`train.jsonl:7`. For a row that cannot be read, the reader yields a ValueError instead of the row.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.errors import UserError, first_line

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet")
HUGGING_FACE = "hf:"
TFDS = "tfds:"
RECORDS = "records:"  # prefix of the names of rows that a Python program passed
DEFAULT_SPLIT = "train"
PARQUET_BATCH = 4096  # rows
MAX_REASON_CHARS = 200

Row = dict[str, Any]
LocatedRow = tuple[str, Row | ValueError]


def is_source(name: str) -> bool:
  """Returns whether `name` is a file, a folder or a dataset rather than a synthetic task."""
  prefixes = (HUGGING_FACE, TFDS, RECORDS)
  return name.startswith(prefixes) or name.endswith(EXTENSIONS) or "/" in name


def read_rows(name: str) -> Iterator[LocatedRow]:
  """Yields the rows of a source.

  Raises:
    UserError: there is no such source, or it cannot be read.
  """
  if name.startswith(HUGGING_FACE):
    yield from _hugging_face(name)
  elif name.startswith(TFDS):
    yield from _tfds(name)
  elif name.startswith(RECORDS):
    raise UserError(
      f"{name!r} was passed by a Python program and is not in a file; pass it again, or name a file"
    )
  else:
    for file in _files(name):
      yield from (_parquet if file.name.endswith(".parquet") else _jsonl)(file)


def _files(name: str) -> list[Path]:
  path = Path(name)
  if not path.exists():
    raise UserError(
      f"no file or folder at {name!r}; data.train and data.eval name a task, a .jsonl or .parquet "
      "file, hf:ID or tfds:NAME"
    )
  if not path.is_dir():
    return [path]
  files = sorted(file for file in path.rglob("*") if file.name.endswith(EXTENSIONS))
  if not files:
    raise UserError(f"no {', '.join(EXTENSIONS)} in {name!r}")
  return files


def _jsonl(file: Path) -> Iterator[LocatedRow]:
  try:
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as lines:
      for number, line in enumerate(lines, 1):
        if line.strip():
          yield f"{file}:{number}", _json_object(line)
  except (OSError, EOFError) as error:
    raise UserError(f"{str(file)!r} cannot be read: {first_line(error)}") from error


def _json_object(line: bytes) -> Row | ValueError:
  try:
    row = json.loads(line.decode("utf-8"))
  except (ValueError, RecursionError) as error:  # from JSON or UTF-8
    return ValueError(first_line(error))
  if not isinstance(row, dict):
    return ValueError(f"must be a JSON object, got {type(row).__name__}")
  return row


def _parquet(file: Path) -> Iterator[LocatedRow]:
  import pyarrow
  import pyarrow.parquet

  try:
    number = 0
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=PARQUET_BATCH):
      for row in _batch_rows(batch):
        number += 1
        yield f"{file}:{number}", row
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(f"{str(file)!r} is not a valid Parquet file: {first_line(error)}") from error


def _batch_rows(batch: Any) -> list[Row | ValueError]:
  """Returns the rows of an Arrow batch. Text that is not UTF-8 invalidates only its own row."""
  try:
    return batch.to_pylist()
  except ValueError as error:
    if batch.num_rows == 1:
      return [ValueError(first_line(error))]
    return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]


def _hugging_face(name: str) -> Iterator[tuple[str, Row]]:
  try:
    import datasets
  except ImportError as error:
    raise UserError(f"{name!r} needs the datasets library: pip install 'gtpo_jax[data]'") from error
  dataset, config, split = _parse(name, HUGGING_FACE)
  try:
    rows = datasets.load_dataset(dataset, config, split=split)
  except Exception as error:  # the hub, the builder and the disk raise many types
    raise _cannot_load(name, error) from error
  for number, row in enumerate(rows):
    yield f"{name}:{number}", row


def _tfds(name: str) -> Iterator[LocatedRow]:
  from gtpo_jax.data.tfds_tasks import tfds  # registers this package's tasks

  dataset, _, split = _parse(name, TFDS)
  try:
    if dataset == "gsm8k":
      from tensorflow_datasets.text.gsm8k import gsm8k  # noqa: F401 (registers itself)
    rows = tfds.data_source(dataset, split=split)
  except Exception as error:  # TFDS raises many types
    raise _cannot_load(name, error) from error
  for number in range(len(rows)):
    try:
      yield f"{name}:{number}", _plain(rows[number])
    except ValueError as error:  # bytes that are not UTF-8
      yield f"{name}:{number}", ValueError(first_line(error))


def _cannot_load(name: str, error: Exception) -> UserError:
  return UserError(f"{name!r} cannot be loaded: {first_line(error)[:MAX_REASON_CHARS]}")


def _parse(name: str, prefix: str) -> tuple[str, str | None, str]:
  """Returns the dataset, config and split of `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT`."""
  dataset, *rest = name.removeprefix(prefix).split(":")
  if len(rest) > 2 or not dataset:
    raise UserError(f"{name!r} is not {prefix}ID, {prefix}ID:SPLIT or {prefix}ID:CONFIG:SPLIT")
  config = rest[0] if len(rest) == 2 else None
  return dataset, config, rest[-1] if rest else DEFAULT_SPLIT


def _plain(value: Any) -> Any:
  """Converts a value of TFDS to plain Python.

  TFDS returns text as bytes, and numbers and lists as NumPy arrays.
  """
  if isinstance(value, bytes):
    return value.decode("utf-8")
  if isinstance(value, Mapping):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_plain(item) for item in value]
  return _plain(value.tolist()) if hasattr(value, "tolist") else value
