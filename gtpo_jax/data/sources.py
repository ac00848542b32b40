"""Problems from files and datasets: JSONL, Parquet, Hugging Face datasets and TFDS, as the one record type.

A source is named by a text: a path (`train.jsonl`, `train.jsonl.gz`, `math.parquet`, a folder of such), `hf:ID[:CONFIG][:SPLIT]`, or
`tfds:NAME[:SPLIT]`; or it is a sequence of dicts that a program hands over. Rows that cannot be read are counted and skipped up to a
limit; exact duplicates are dropped.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.data.records import Problem, user
from gtpo_jax.runtime.errors import UserError, first_line

FILES = (".jsonl", ".jsonl.gz", ".parquet")
RECORDS = "records:"  # begins the name of what a program handed over

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What a source holds.

  Attributes:
    problems: in the order of the source, each once.
    rows: read in all.
    duplicates: rows dropped because an earlier one asks the same and wants the same answer.
    bad: rows skipped, each with its place and what is wrong.
  """

  problems: tuple[Problem, ...]
  rows: int
  duplicates: int
  bad: tuple[str, ...]

  def summary(self, name: str) -> str:
    """One line for the user."""
    parts = [f"{name}: {len(self.problems)} problems of {self.rows} rows"]
    parts += [f"{self.duplicates} duplicates dropped"] if self.duplicates else []
    parts += [f"{len(self.bad)} skipped, first {self.bad[0]}"] if self.bad else []
    return ", ".join(parts)


def is_source(name: str) -> bool:
  """Whether `name` names a file, a folder or a dataset, rather than a synthetic task."""
  return name.startswith(("hf:", "tfds:", RECORDS)) or name.endswith(FILES) or "/" in name


def load_source(name: str, fields: str = "", bad_rows: int = 0) -> Loaded:
  """Reads a source.

  Args:
    name: see the module.
    fields: which columns mean what where the layout is none that is known, as `prompt=instruction,answer=output,kind=math`;
      a kind that is no column's name is taken as it stands.
    bad_rows: how many rows may be malformed and skipped.

  Raises:
    UserError: no such source, more malformed rows than `bad_rows`, or no problem at all.
  """
  return _loaded(name, _rows(name), fields, bad_rows)


def load_records(records: Iterable[Row], name: str, fields: str = "", bad_rows: int = 0) -> Loaded:
  """Takes rows from memory as `load_source` takes those of a file; `name` stands for them in messages.

  Raises:
    UserError: they are no sequence of dicts, or as `load_source`.
  """
  if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
    raise UserError(
      f"{name} must be a list of dicts, got {type(records).__name__} {str(records)[:60]!r}; a file is named in the config's "
      f"data.train and data.eval"
    )
  rows = (
    (
      f"{name}[{i}]",
      dict(row)
      if isinstance(row, Mapping)
      else ValueError(f"holds {type(row).__name__}, not a dict"),
    )
    for i, row in enumerate(records)
  )
  return _loaded(name, rows, fields, bad_rows)


def _loaded(
  name: str, places: Iterable[tuple[str, Row | ValueError]], fields: str, bad_rows: int
) -> Loaded:
  mapping = _mapping(fields)
  seen: set[bytes] = set()
  problems = []
  bad = []
  rows = 0
  duplicates = 0
  for place, row in places:
    rows += 1
    try:
      problem = _problem(row, mapping, place)
    except ValueError as error:
      bad.append(f"{place}: {first_line(error)}")
      if len(bad) > bad_rows:
        raise UserError(
          f"{bad[-1]} ({len(bad)} malformed row(s), data.bad_rows = {bad_rows} allowed); mend it, set data.fields, or allow "
          f"more"
        ) from error
      continue
    key = hashlib.blake2b(
      json.dumps([problem.messages, problem.answer, problem.extra.get("test")]).encode(),
      digest_size=16,
    ).digest()
    if key in seen:
      duplicates += 1
      continue
    seen.add(key)
    problems.append(problem)
  if not problems:
    raise UserError(f"{name!r} holds no problem ({rows} rows)")
  return Loaded(tuple(problems), rows, duplicates, tuple(bad))


def _rows(name: str) -> Iterator[tuple[str, Row | ValueError]]:
  """Rows with the places that they stand at; an error in place of one that cannot be read."""
  if name.startswith("hf:"):
    yield from _hugging_face(name)
  elif name.startswith("tfds:"):
    yield from _tfds(name)
  elif name.startswith(RECORDS):
    raise UserError(
      f"{name!r} was handed over by a Python program and is in no file; hand it over again, or name a file"
    )
  else:
    path = Path(name)
    if not path.exists():
      raise UserError(
        f"no file or folder at {name!r}; data.train and data.eval name a task, a .jsonl or .parquet file, hf:ID or tfds:NAME"
      )
    files = (
      sorted(file for file in path.rglob("*") if file.name.endswith(FILES))
      if path.is_dir()
      else [path]
    )
    if not files:
      raise UserError(f"no {', '.join(FILES)} in {name!r}")
    for file in files:
      yield from (_parquet if file.name.endswith(".parquet") else _jsonl)(file)


def _jsonl(file: Path) -> Iterator[tuple[str, Row | ValueError]]:
  try:
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rb") as lines:
      for number, line in enumerate(lines, 1):
        if not line.strip():
          continue
        try:
          row = json.loads(line.decode("utf-8"))
          yield (
            f"{file}:{number}",
            row
            if isinstance(row, dict)
            else ValueError(f"holds {type(row).__name__}, not an object"),
          )
        except (ValueError, RecursionError) as error:  # JSON's and UTF-8's own
          yield f"{file}:{number}", ValueError(first_line(error))
  except (OSError, EOFError) as error:
    raise UserError(f"{str(file)!r} cannot be read: {first_line(error)}") from error


def _parquet(file: Path) -> Iterator[tuple[str, Row | ValueError]]:
  import pyarrow
  import pyarrow.parquet

  try:
    number = 0
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=4096):
      for row in _batch_rows(batch):
        number += 1
        yield f"{file}:{number}", row
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(f"{str(file)!r} is not a sound Parquet file: {first_line(error)}") from error


def _batch_rows(batch: Any) -> list[Row | ValueError]:
  """The rows of an Arrow batch. What is no UTF-8 spoils its own row alone."""
  try:
    return batch.to_pylist()
  except ValueError as error:
    return (
      [ValueError(first_line(error))]
      if batch.num_rows == 1
      else [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
    )


def _hugging_face(name: str) -> Iterator[tuple[str, Row]]:
  try:
    import datasets
  except ImportError as error:
    raise UserError(f"{name!r} needs the datasets library: pip install 'gtpo_jax[data]'") from error
  where, config, split = _parts(name, "hf:", "train")
  try:
    data = datasets.load_dataset(where, config, split=split)
  except Exception as error:  # the hub's, the builder's and the disk's own kinds
    raise UserError(f"{name!r} cannot be loaded: {first_line(error)[:200]}") from error
  for number, row in enumerate(data):
    yield f"{name}:{number}", row


def _tfds(name: str) -> Iterator[tuple[str, Row | ValueError]]:
  from gtpo_jax.data.tfds_tasks import tfds  # with our own tasks among its data sets

  where, _, split = _parts(name, "tfds:", "train")
  try:
    if where == "gsm8k":
      from tensorflow_datasets.text.gsm8k import gsm8k  # noqa: F401 (registers itself)
    data = tfds.data_source(where, split=split)
  except Exception as error:  # TFDS has many kinds of its own
    raise UserError(f"{name!r} cannot be loaded: {first_line(error)[:200]}") from error
  for number in range(len(data)):
    try:
      yield f"{name}:{number}", _text(data[number])
    except ValueError as error:  # bytes that are no UTF-8
      yield f"{name}:{number}", ValueError(first_line(error))


def _parts(name: str, prefix: str, split: str) -> tuple[str, str | None, str]:
  """`hf:ID`, `hf:ID:SPLIT` or `hf:ID:CONFIG:SPLIT`."""
  where, *rest = name.removeprefix(prefix).split(":")
  if len(rest) > 2 or not where:
    raise UserError(f"{name!r} is not {prefix}ID, {prefix}ID:SPLIT or {prefix}ID:CONFIG:SPLIT")
  return where, rest[0] if len(rest) == 2 else None, rest[-1] if rest else split


def _text(value: Any) -> Any:
  """TFDS gives text as bytes, scalars and lists as NumPy's."""
  if isinstance(value, bytes):
    return value.decode("utf-8")
  if isinstance(value, Mapping):
    return {key: _text(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_text(item) for item in value]
  return _text(value.tolist()) if hasattr(value, "tolist") else value


def _problem(row: Row | ValueError, mapping: dict[str, str], place: str) -> Problem:
  """A row as a problem. Raises ValueError where something is missing."""
  if isinstance(row, ValueError):
    raise row
  if mapping:
    prompt, answer = (_field(row, mapping[key]) for key in ("prompt", "answer"))
    kind = row.get(mapping["kind"], mapping["kind"]) if "kind" in mapping else "math"
    return _record(row, place, prompt, answer, kind)
  for needed, make in LAYOUTS:
    if needed <= row.keys():
      return make(row, place)
  raise ValueError(
    f"has the columns {', '.join(map(str, row))}, no known layout; say with data.fields which is prompt and which answer"
  )


def _record(
  row: Row, place: str, prompt: Any, answer: Any, kind: Any, extra: Mapping[str, Any] | None = None
) -> Problem:
  if isinstance(prompt, str):
    messages = user(prompt)
  elif (
    isinstance(prompt, list | tuple)
    and prompt
    and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)
  ):
    messages = tuple({"role": str(m["role"]), "content": m["content"]} for m in prompt)
  else:
    raise ValueError(f"has a prompt that is neither text nor messages: {str(prompt)[:80]!r}")
  for message in messages:
    if not isinstance(message["content"], str) or not message["content"].strip():
      raise ValueError(f"has an empty {message['role']} message")
    message["content"].encode()  # surrogates are no text; UnicodeEncodeError is a ValueError
  if (
    not isinstance(answer, str | int | float) or isinstance(answer, bool) or not str(answer).strip()
  ):
    raise ValueError(f"has no answer: {answer!r}")
  name = row.get(
    "id", row.get("task_id", Path(place).name)
  )  # the file and line; not where the file lies
  return Problem(
    str(name), messages, str(answer).strip(), str(kind), extra or row.get("extra") or {}
  )


def _field(row: Row, name: str) -> Any:
  """A column by name; a dot goes into a nested one."""
  value: Any = row
  for part in name.split("."):
    if not isinstance(value, Mapping) or part not in value:
      raise ValueError(f"has no column {name!r}")
    value = value[part]
  return value


def _own(row: Row, place: str) -> Problem:
  return _record(row, place, row["prompt"], row["answer"], row.get("kind", "math"))


def _verl(row: Row, place: str) -> Problem:
  truth = _field(row, "reward_model.ground_truth")
  return _record(
    {"id": _index(row, place)},
    place,
    row["prompt"],
    truth,
    "math",
    {"data_source": row.get("data_source", "")},
  )


def _index(row: Row, place: str) -> str:
  extra = row.get("extra_info")
  return (
    str(extra["index"]) if isinstance(extra, Mapping) and "index" in extra else Path(place).name
  )


def _gsm8k(row: Row, place: str) -> Problem:
  if not isinstance(row["answer"], str):
    return _record(row, place, row["question"], row["answer"], "math")
  solution, mark, answer = row["answer"].rpartition("####")
  return _record(
    row, place, row["question"], answer, "math", {"solution": solution.strip()} if mark else {}
  )


def _math(row: Row, place: str) -> Problem:
  return _record(row, place, row["problem"], row["answer"], "math")


def _humaneval(row: Row, place: str) -> Problem:
  tests = {key: row[key] for key in ("prompt", "test", "entry_point")}
  return _record(row, place, row["prompt"], row["entry_point"], "code", tests)


def _mbpp(row: Row, place: str) -> Problem:
  tests = {
    "test_list": list(row["test_list"]),
    "test_setup_code": row.get("test_setup_code", ""),
    "test_imports": list(row.get("test_imports") or ()),
  }
  return _record(
    row, place, row.get("text", row.get("prompt")), str(row.get("task_id", place)), "code", tests
  )


def _stdin(row: Row, place: str) -> Problem:
  if not row["input_output"]:
    raise ValueError("has no tests: its input_output is empty")
  name = str(row.get("problem_id", Path(place).name))
  return _record(
    {"id": name}, place, row["question"], name, "code", {"input_output": row["input_output"]}
  )


# The layouts that are known by their columns, the most particular first.
LAYOUTS: tuple[tuple[set[str], Callable[[Row, str], Problem]], ...] = (
  ({"prompt", "reward_model"}, _verl),  # DAPO-Math-17k and the other files of verl
  ({"prompt", "test", "entry_point"}, _humaneval),
  ({"text", "test_list"}, _mbpp),
  ({"prompt", "test_list"}, _mbpp),  # MBPP sanitized
  ({"question", "input_output"}, _stdin),  # APPS, TACO
  ({"prompt", "answer"}, _own),
  ({"question", "answer"}, _gsm8k),
  ({"problem", "answer"}, _math),  # MATH-500, AIME
)


def _mapping(fields: str) -> dict[str, str]:
  pairs = [part.partition("=") for part in fields.replace(" ", "").split(",") if part]
  mapping = {key: value for key, _, value in pairs}
  if mapping and not (
    all(mapping.values()) and {"prompt", "answer"} <= mapping.keys() <= {"prompt", "answer", "kind"}
  ):
    raise UserError(
      f"data.fields must name prompt and answer (and kind), as prompt=question,answer=answer,kind=math; got {fields!r}"
    )
  return mapping
