"""Reads files from folders of unknown origin: as data only, and never from outside the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.errors import UserError, first_line


def safe_join(folder: Path, name: str) -> Path:
  """Returns the path of the file `name` in `folder`, which may be a link only within the folder.

  The Hugging Face cache stores its files behind links from `snapshots/REVISION` to `blobs`, so in
  such a folder a link may lead anywhere in the cached repository.

  Raises:
    UserError: the name contains a path, or a link leads out of the folder.
  """
  if not name or "\0" in name or Path(name).name != name or name in (".", ".."):
    raise UserError(f"{name!r}, referred to in {str(folder)!r}, is not a file name in that folder")
  file = folder / name
  try:
    home = folder.resolve()
    target = file.resolve()
  except (OSError, RuntimeError) as error:  # for example links that form a cycle
    raise UserError(f"{str(file)!r} cannot be resolved: {first_line(error)}") from error
  cached = home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir()
  if not target.is_relative_to(home.parent.parent if cached else home):
    raise UserError(f"{str(file)!r} is a link out of its folder; copy the file itself")
  return file


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the JSON object in the file `name` of `folder`.

  Raises:
    UserError: the file is missing, leads out of the folder, or is not a JSON object.
  """
  file = safe_join(folder, name)
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {name} in {str(folder)!r} ({error.strerror})") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {first_line(error)}") from error
  if not isinstance(values, dict):
    raise UserError(f"{str(file)!r} holds {type(values).__name__}, not an object")
  return values


def printable(name: str) -> str:
  """Returns a name from a file in a form that is safe to print: one line, no terminal codes."""
  return name if name.isprintable() else repr(name)
