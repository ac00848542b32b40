"""Files of unknown origin: read as data only and never from outside their folder, or set aside."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.paths import is_remote, storage_reason

MAX_CHARS = 80  # of a name or value of a file in an error message


def safe_join(folder: Path, name: str) -> Path:
  """Returns the path of the file `name` in `folder`. If it is a link, it must stay in the folder.

  The Hugging Face cache stores its files behind links from `snapshots/REVISION` to `blobs`, so in
  such a folder a link may lead anywhere in the cached repository.

  Raises:
    UserError: the name contains a path, or a link leads out of the folder.
  """
  if not name or "\0" in name or Path(name).name != name or name in (".", ".."):
    raise UserError(f"{name!r}, referred to in {str(folder)!r}, is not a file name in that folder")
  file = folder / name
  if is_remote(folder):  # an object store has no links
    return file
  try:  # with pathlib, because epath does not resolve links
    home = Path(folder).resolve()
    target = Path(file).resolve()
    is_other = target.exists() and not (target.is_file() or target.is_dir())
  except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or no name of a file
    raise UserError(f"{str(file)!r} cannot be resolved: {first_line(error)}") from error
  if is_other:  # reading a pipe would wait for its writer
    raise UserError(f"{str(file)!r} is not a regular file; copy its contents into one")
  cached = home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir()
  if not target.is_relative_to(home.parent.parent if cached else home):
    raise UserError(f"{str(file)!r} is a link out of its folder; copy the file itself")
  return file


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the JSON object in the file `name` of `folder`.

  Raises:
    UserError: the file is missing, links out of the folder, does not contain a JSON object, or
      has a key twice in one object.
  """
  file = safe_join(folder, name)
  try:
    values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
  except OSError as error:
    reason = storage_reason(error)
    raise UserError(f"cannot read {name} in {str(folder)!r} ({reason})") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {first_line(error)}") from error
  if not isinstance(values, dict):
    raise UserError(f"{str(file)!r} holds {type(values).__name__}, not an object")
  return values


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns the pairs of a JSON object as a dict; raises ValueError if a key is there twice."""
  values = dict(pairs)
  if len(values) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    both = " and ".join(repr(value)[:MAX_CHARS] for name, value in pairs if name == twice)
    raise ValueError(
      f"has the key {repr(twice)[:MAX_CHARS]} twice ({both[:MAX_CHARS]}); leave one out"
    )
  return values


def set_aside(path: Path) -> Path:
  """Renames a damaged file or folder to the first free of NAME.damaged, NAME.damaged.2, ..."""
  count = 1
  target = path.with_name(f"{path.name}.damaged")
  while target.exists():
    count += 1
    target = path.with_name(f"{path.name}.damaged.{count}")
  path.rename(target)
  return target


@contextlib.contextmanager
def local_copy(folder: Path, names: Collection[str]) -> Iterator[Path]:
  """Yields a folder of the file system with the files `names` of `folder`, as far as they exist.

  A folder of the file system is yielded itself.
  """
  if not is_remote(folder):
    yield folder
    return
  with tempfile.TemporaryDirectory(prefix="gtpo_") as copies:
    for entry in epath.Path(folder).iterdir():
      if entry.name in names:
        (Path(copies) / entry.name).write_bytes(entry.read_bytes())
    yield Path(copies)


def printable(name: str) -> str:
  """Returns a name from a file in a form that is safe to print: one line, no terminal codes."""
  return name if name.isprintable() else repr(name)
