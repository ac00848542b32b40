"""The seal of a checkpoint: what its files and arrays were when it was written. A step without one was not written whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from gtpo_jax.checkpoint.digests import digest_file
from gtpo_jax.runtime.errors import Damaged

NAME = "seal"  # the sha256 of the JSON below its first line
LATE = (
  "_CHECKPOINT_METADATA",
  "commit_success.txt",
)  # what Orbax writes in committing, when the seal is in its place already


def write_seal(
  folder: epath.Path, leaves: Mapping[str, Mapping[str, str]], facts: Mapping[str, Any]
) -> None:
  """Seals a checkpoint's folder before it is committed.

  Args:
    folder: of one step, with all its files.
    leaves: for each item, the digests of its leaves.
    facts: plain values that belong to the checkpoint.
  """
  files = {name: digest_file(folder / name) for name in _files(folder) if name not in (NAME, *LATE)}
  _write(folder, {"leaves": leaves, "facts": facts, "files": files})


def seal_late_files(folder: epath.Path) -> None:
  """Takes the files of the commit itself into the seal, where that is still to do. They hold times and notes, nothing that is restored."""
  seal = _read(folder)
  late = {name: digest_file(folder / name) for name in LATE if (folder / name).exists()}
  if not late.keys() <= seal["files"].keys():
    _write(folder, {**seal, "files": seal["files"] | late})


def check_seal(folder: epath.Path, items: Collection[str]) -> dict[str, Any]:
  """The seal of a folder whose files are as they were: those of `items`, and those that are of none.

  Raises:
    Damaged: no seal, another seal than was written, or a file that is missing or differs.
  """
  seal = _read(folder)
  for name, digest in seal["files"].items():
    item, slash, _ = name.partition("/")
    if not slash or item in items:
      file = folder / name
      if not file.exists():
        raise Damaged(f"{name} is missing")
      if digest_file(file) != digest:
        raise Damaged(f"{name} is not what was written")
  return seal


def _read(folder: epath.Path) -> dict[str, Any]:
  if not (folder / NAME).exists():
    raise Damaged(f"it has no {NAME}")
  digest, _, text = (folder / NAME).read_bytes().partition(b"\n")
  if digest != _sha256(text):
    raise Damaged(f"{NAME} is not what was written")
  return json.loads(text)


def _write(folder: epath.Path, seal: Mapping[str, Any]) -> None:
  text = json.dumps(seal, indent=1).encode()
  fresh = folder / f"{NAME}.tmp"
  fresh.write_bytes(_sha256(text) + b"\n" + text)
  fresh.replace(folder / NAME)


def _sha256(text: bytes) -> bytes:
  return hashlib.sha256(text).hexdigest().encode()


def _files(folder: epath.Path, above: str = "") -> list[str]:
  """Every file below `folder` by its path in it."""
  return [
    name
    for entry in sorted(folder.iterdir())
    for name in (
      _files(entry, f"{above}{entry.name}/") if entry.is_dir() else [f"{above}{entry.name}"]
    )
  ]
