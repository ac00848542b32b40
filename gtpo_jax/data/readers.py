"""Reads the rows of files and datasets: JSONL, CSV, Parquet, Hugging Face, TFDS, reasoning-gym.

Every reader yields (location, row). The location names the row in messages, such as
`train.jsonl:7`. For a row that cannot be read, the reader yields a ValueError instead of the row.
"""

from __future__ import annotations

import contextlib
import csv
import decimal
import functools
import gzip
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any
from urllib.parse import unquote

import numpy as np
from etils import epath

from gtpo_jax.rewards.gym.rows import rows as gym_rows
from gtpo_jax.runtime.busy_hub import HubBusy, patiently
from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.files import printable, unique_keys
from gtpo_jax.runtime.installing import install_command
from gtpo_jax.runtime.paths import list_files, open_bytes, storage_errors, storage_path

TABLES = {".csv": ",", ".tsv": "\t"}  # texts with a first row of names, and their delimiters
EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet", *TABLES)
# Files of other forms, and the function of pandas that reads them.
OTHER_FILES = {".xlsx": "excel", ".json": "json"}
HUGGING_FACE = "hf:"
TFDS = "tfds:"
GYM = "rg:"
GYM_PARTS = ([""], ["train"], ["held_out"])
GYM_HELD_OUT = 8  # one problem in so many is held out
RECORDS = "records:"  # prefix of the names of rows that a Python program passed
PREFIXES = (HUGGING_FACE, TFDS, GYM, RECORDS)  # of names that are no path
DEFAULT_SPLIT = "train"
GYM_SIZE = 500  # problems, by default
PARQUET_BATCH = 4096  # rows
MAX_LINE_BYTES = 1 << 28  # of a row; a longer line is skipped without reading it into memory
MAX_REASON_CHARS = 200
MAX_HUB_CHARS = 300  # of an error that lists the configs or splits that exist

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|$)")  # the start of an array of objects

Row = dict[str, Any]
LocatedRow = tuple[str, Row | ValueError]


class ClassIndex(int):
  """A label, which is the index of a class, with the `name` of that class.

  A reward function may count with it, as in other trainers. As an answer it is the name.
  """

  name: str

  @classmethod
  def of(cls, index: int, names: Sequence[str]) -> ClassIndex | None:
    """Returns the label of an index; None for -1, which means that a row has no label."""
    if index < 0:
      return None
    label = cls(index)
    label.name = names[index]
    return label


def is_source(name: str) -> bool:
  """Returns whether `name` is a file, a folder or a dataset rather than a synthetic task."""
  return name.startswith(PREFIXES) or name.endswith((*EXTENSIONS, *OTHER_FILES)) or "/" in name


def read_rows(name: str) -> Iterator[LocatedRow]:
  """Yields the rows of a source.

  Raises:
    UserError: there is no such source, or it cannot be read.
  """
  if name.startswith(HUGGING_FACE):
    yield from _hugging_face(name)
  elif name.startswith(TFDS):
    yield from _tfds(name)
  elif name.startswith(GYM):
    yield from _reasoning_gym(name)
  elif name.startswith(RECORDS):
    raise UserError(
      f"{name!r} was passed by a Python program and is not in a file; pass it again, or name a file"
    )
  else:
    readers = {".parquet": _parquet, **dict.fromkeys(TABLES, _table)}
    for file in _files(name):
      yield from readers.get(file.suffix.lower(), _jsonl)(file)


def _other_form(name: str, reader: str, form: str) -> UserError:
  return UserError(
    f"{name!r} is {form}; write one JSON object per line instead, for example with pandas: "
    f"pd.read_{reader}(FILE).to_json('train.jsonl', orient='records', lines=True)"
  )


def check_exists(name: str) -> None:
  """Raises UserError if `name` is the path of a file or folder that does not exist."""
  if is_source(name) and not name.startswith(PREFIXES):
    _existing(name)


def _existing(name: str) -> epath.Path:
  path = storage_path(name)
  with storage_errors(f"{name!r} cannot be read", UserError):
    exists = path.exists()
  if not exists:
    raise UserError(
      f"no file or folder at {name!r}; data.train and data.eval name a task, a .jsonl, .csv or "
      ".parquet file, hf:ID, tfds:NAME or rg:NAME"
    )
  return path


def _files(name: str) -> list[epath.Path]:
  path = _existing(name)
  if not path.is_dir():
    reader = OTHER_FILES.get(path.suffix.lower(), "json")
    if reader != "json":
      raise _other_form(name, reader, f"a file of the form {path.suffix}")
    return [path]
  names = [name for name in list_files(path) if name.endswith(EXTENSIONS)]
  files = sorted(file for name in names if (file := path / name).is_file())
  if not files:
    raise UserError(f"no {', '.join(EXTENSIONS)} in {name!r}")
  return files


def _jsonl(file: epath.Path) -> Iterator[LocatedRow]:
  name = printable(str(file))
  compressed = file.name.endswith(".gz")
  with (
    storage_errors(f"{str(file)!r} cannot be read", UserError),
    open_bytes(file) as opened,
    gzip.open(opened) if compressed else contextlib.nullcontext(opened) as stream,
  ):
    for number, line in enumerate(_lines(stream), 1):
      if number == 1 and isinstance(line, bytes) and _ARRAY.match(line):
        raise _other_form(str(file), "json", "one JSON array")
      row = _json_object(line)
      if row is not None:
        yield f"{name}:{number}", row


def _table(file: epath.Path) -> Iterator[LocatedRow]:
  """Reads a CSV or TSV file. All its values are texts; an empty one is as good as none."""
  name = printable(str(file))
  csv.field_size_limit(MAX_LINE_BYTES)
  with (
    storage_errors(f"{str(file)!r} cannot be read", UserError),
    open_bytes(file) as opened,
    # A row whose text is not UTF-8 is malformed, and the rows after it are read.
    io.TextIOWrapper(opened, "utf-8-sig", errors="surrogateescape", newline="") as text,
  ):
    rows = csv.reader(text, delimiter=TABLES[file.suffix.lower()])
    names: list[str] = []
    while True:
      try:
        values = next(rows, None)
      except csv.Error as error:
        yield f"{name}:{rows.line_num}", ValueError(first_line(error))
        continue
      if values is None:
        return
      if not names and len({*values}) < len(values):
        raise UserError(f"the first row of {name!r} must name each column once, got {values!r:.80}")
      if names and len(names) == len(values):
        yield f"{name}:{rows.line_num}", dict(zip(names, values, strict=True))
      elif names and values:
        wrong = ValueError(f"has {len(values)} values for {len(names)} columns")
        yield f"{name}:{rows.line_num}", wrong
      names = names or values


def _lines(stream: IO[bytes]) -> Iterator[bytes | ValueError]:
  """Yields the lines of a file, and an error for a line of more than `MAX_LINE_BYTES`."""
  while line := stream.readline(MAX_LINE_BYTES):
    if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
      yield line
    else:
      while line and not line.endswith(b"\n"):
        line = stream.readline(MAX_LINE_BYTES)
      yield ValueError(f"is longer than {MAX_LINE_BYTES >> 20} MiB")


class WrittenFloat(float):
  """A number of JSON with more digits than a float has, and its text."""

  text: str

  @classmethod
  def of(cls, text: str) -> float:
    """Returns a number of JSON, with its text only if a float loses some of its digits."""
    number = float(text)
    if not math.isfinite(number) or decimal.Decimal(repr(number)) == decimal.Decimal(text):
      return number
    written = cls(number)
    written.text = text
    return written


def _json_object(line: bytes | ValueError) -> Row | ValueError | None:
  """Returns the row of a line, or None for a blank line. A byte order mark is ignored."""
  if isinstance(line, ValueError):
    return line
  try:
    text = line.decode("utf-8-sig")
    if not text.strip():
      return None
    row = json.loads(text, object_pairs_hook=unique_keys, parse_float=WrittenFloat.of)
  except (ValueError, RecursionError) as error:  # from JSON or UTF-8
    return ValueError(first_line(error))
  if not isinstance(row, dict):
    return ValueError(f"must be a JSON object, got {type(row).__name__}")
  return row


def _parquet(file: epath.Path) -> Iterator[LocatedRow]:
  import pyarrow.parquet

  name = printable(str(file))
  number = 0
  try:
    with file.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as parquet:
      for batch in parquet.iter_batches(batch_size=PARQUET_BATCH):
        for row in _batch_rows(batch):
          number += 1
          yield f"{name}:{number}", row
  except Exception as error:  # Arrow raises many types for damaged files
    where = f" after row {number}" if number else ""
    raise UserError(
      f"{str(file)!r} is not a valid Parquet file{where}: {first_line(error)[:MAX_REASON_CHARS]}"
    ) from error


def _batch_rows(batch: Any) -> list[Row | ValueError]:
  """Returns the rows of an Arrow batch.

  A value that Python cannot represent, such as text that is not UTF-8, invalidates only its row.
  """
  try:
    return [arrow_row(row, batch.schema) for row in batch.to_pylist()]
  except Exception as error:  # Arrow raises many types, and imports libraries for some columns
    if batch.num_rows == 1:
      return [ValueError(first_line(error))]
    return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]


def arrow_row(row: Row, schema: Any) -> Row:
  """Converts a row of Arrow to plain values.

  Numbers of less than 64 bits become the decimals that they stand for: Python has only 64-bit
  numbers, and the float32 number 0.1 would become 0.10000000149011612. Class labels of Hugging
  Face become `ClassIndex`.
  """
  changed: Row = {}
  for field in schema:
    if _has_short_floats(field.type) and row.get(field.name) is not None:
      changed[field.name] = _decimals(row[field.name], field.type)
  for name, classes in _class_names((schema.metadata or {}).get(b"huggingface", b"{}")).items():
    if isinstance(index := row.get(name), int):
      changed[name] = ClassIndex.of(index, classes)
  return {**row, **changed} if changed else row


@functools.lru_cache(maxsize=16)
def _class_names(metadata: bytes) -> dict[str, list[str]]:
  """Returns the names of the classes of each column of class labels."""
  features = json.loads(metadata).get("info", {}).get("features", {})
  return {
    name: feature["names"]
    for name, feature in features.items()
    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
  }


@functools.lru_cache(maxsize=1024)
def _has_short_floats(kind: Any) -> bool:
  from pyarrow import types

  if types.is_struct(kind):
    return any(_has_short_floats(field.type) for field in kind)
  if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
    return _has_short_floats(kind.value_type)
  return types.is_float16(kind) or types.is_float32(kind)


def _decimals(value: Any, kind: Any) -> Any:
  """Converts the numbers in a value of Arrow; other values stay as they are."""
  if isinstance(value, list):
    return [_decimals(item, kind.value_type) for item in value]
  if isinstance(value, dict):
    members = {field.name: field.type for field in kind}
    return {name: _decimals(item, members[name]) for name, item in value.items()}
  if isinstance(value, float) and _has_short_floats(kind):
    return shortest(np.asarray(value, kind.to_pandas_dtype()))
  return value


def shortest(values: np.ndarray) -> Any:
  """Returns numbers as Python objects with the fewest digits that identify them in their dtype."""
  return values.astype(str).astype(np.float64).tolist()


def _hugging_face(name: str) -> Iterator[tuple[str, Row]]:
  try:
    import datasets
  except ImportError as error:
    raise UserError(f"{name!r} needs the datasets library: {install_command('data')}") from error
  dataset, config, split = _parse(name, HUGGING_FACE)
  try:
    rows = patiently(name, lambda: datasets.load_dataset(dataset, config, split=split))
  except HubBusy:
    raise
  except Exception as error:  # the hub, the builder and the disk raise many types
    reason = " ".join(str(error).split())  # its second line names the configs that exist
    raise UserError(
      f"{name!r} (ID, ID:SPLIT or ID:CONFIG:SPLIT) cannot be loaded: "
      f"{printable(reason)[:MAX_HUB_CHARS]}"
    ) from error
  number = 0
  try:
    schema = rows.features.arrow_schema
    for number, row in enumerate(rows):
      yield f"{name}:{number}", arrow_row(row, schema)
  except Exception as error:  # for example a damaged file in the cache
    raise _cannot_load(f"{name}:{number}", error) from error


def _tfds(name: str) -> Iterator[LocatedRow]:
  from gtpo_jax.data.tfds_tasks import tfds  # registers this package's tasks

  dataset, _, split = _parse(name, TFDS)
  try:
    if dataset == "gsm8k":
      from tensorflow_datasets.text.gsm8k import gsm8k  # noqa: F401 (registers itself)
    rows = tfds.data_source(dataset, split=split)
    classes = {
      name: feature.names
      for name, feature in rows.dataset_info.features.items()
      if isinstance(feature, tfds.features.ClassLabel) and feature.names
    }
  except Exception as error:  # TFDS raises many types
    raise _cannot_load(name, error) from error
  for number in range(len(rows)):
    try:
      row = _plain(rows[number])
      labels = {column: ClassIndex.of(row[column], names) for column, names in classes.items()}
      yield f"{name}:{number}", {**row, **labels}
    except Exception as error:  # bytes that are not UTF-8, or a damaged file
      yield f"{name}:{number}", ValueError(first_line(error))


def _reasoning_gym(name: str) -> Iterator[LocatedRow]:
  task, _, query = name.removeprefix(GYM).partition("?")
  knobs: dict[str, list[str]] = {}
  for part in filter(None, query.split("&")):
    key, _, value = part.partition("=")
    knobs.setdefault(key, []).append(unquote(value))
  size, seed = (
    _whole_number(name, key, knobs.pop(key, [str(default)]), least)
    for key, default, least in (("size", GYM_SIZE, 1), ("seed", 0, 0))
  )
  part = knobs.pop("part", [""])
  if part not in GYM_PARTS:
    raise UserError(f"{name!r} needs train or held_out for part, got {', '.join(part)!r}")
  for index, row in enumerate(gym_rows(task, knobs, size, seed)):
    if part == [""] or isinstance(row, ValueError) or part == [_part(row["prompt"])]:
      yield f"{name}:{index}", row


def _part(prompt: str) -> str:
  """Returns the part of a problem of reasoning-gym, which depends on nothing else."""
  digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
  return "train" if int.from_bytes(digest) % GYM_HELD_OUT else "held_out"


def _whole_number(name: str, key: str, texts: list[str], least: int) -> int:
  if len(texts) != 1 or not re.fullmatch(r"[0-9]{1,9}", texts[0]) or int(texts[0]) < least:
    raise UserError(
      f"{name!r} needs a whole number of at least {least} for {key}, got {', '.join(texts)!r}"
    )
  return int(texts[0])


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
  if isinstance(value, np.ndarray | np.generic):
    is_short = value.dtype in (np.float16, np.float32)
    return shortest(value) if is_short else _plain(value.tolist())
  return value
