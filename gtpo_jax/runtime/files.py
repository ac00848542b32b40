"""Files of folders that others made: read as data, never followed out of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.errors import UserError, first_line


def inside(folder: Path, name: str) -> Path:
  """The file `name` of a folder; the hub's cache keeps its files behind links of its own, other links must not leave the folder.

  Raises:
    UserError: the name or a link leads elsewhere.
  """
  if not name or "\0" in name or Path(name).name != name or name in (".", ".."):
    raise UserError(f"{name!r}, named in {str(folder)!r}, is not the name of a file in it")
  file = folder / name
  try:
    home = folder.resolve()
    target = file.resolve()
  except (OSError, RuntimeError) as error:  # a link that goes round in circles
    raise UserError(f"{str(file)!r} cannot be followed: {first_line(error)}") from error
  cached = home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir()
  if not target.is_relative_to(home.parent.parent if cached else home):
    raise UserError(f"{str(file)!r} is a link out of its folder; copy the file itself")
  return file


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """An object from a JSON file of the folder.

  Raises:
    UserError: it is not there, leads out of the folder, or is not a JSON object.
  """
  file = inside(folder, name)
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"no {name} in {str(folder)!r} that can be read ({error.strerror})") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{str(file)!r} is not valid JSON: {first_line(error)}") from error
  if not isinstance(values, dict):
    raise UserError(f"{str(file)!r} holds {type(values).__name__}, not an object")
  return values


def printable(name: str) -> str:
  """A name from a file as it may stand in a message: one line, no terminal codes."""
  return name if name.isprintable() else repr(name)
