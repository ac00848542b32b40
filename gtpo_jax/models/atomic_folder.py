"""Writes a folder atomically: it appears with all its files and checksums, or not at all."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, sync_global_devices

from gtpo_jax.runtime.errors import UserError

MANIFEST = "SHA256SUMS"


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path | None]:
  """Yields a temporary folder; on exit a manifest is added and it is renamed to `folder`.

  If the body raises, the temporary folder is deleted. Every process must enter the context. The
  first process gets the temporary folder and writes the files; the others get None, and their
  context exits once `folder` exists.

  Raises:
    UserError: `folder` is not empty or cannot be created (every process raises this), or a file
      cannot be written.
  """
  folder = Path(os.path.abspath(folder))  # a folder cannot be renamed to "."
  out = None
  failure = None
  if jax.process_index() == 0:
    try:
      out = _make_temporary(folder)
    except UserError as error:
      failure = error
  if broadcast_one_to_all(np.bool_(failure is not None)):
    raise failure or UserError(f"cannot write {str(folder)!r}: see the error of process 0")
  try:
    yield out
    if out is not None:
      _write_manifest(out)
      out.replace(folder)
    sync_global_devices("saved")
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
  finally:
    if out is not None:
      shutil.rmtree(out, ignore_errors=True)


def _make_temporary(folder: Path) -> Path:
  """Creates the temporary folder beside `folder`, and deletes those that killed processes left."""
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"{str(folder)!r} is not empty; name a new folder")
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
      shutil.rmtree(old)
    out = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    out.mkdir()
  except OSError as error:
    raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from error
  return out


def _write_manifest(folder: Path) -> None:
  """Writes the checksums of all files, in the format that `sha256sum -c` reads."""
  names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
  lines = [f"{_sha256(folder / name)}  {name}\n" for name in names]
  (folder / MANIFEST).write_text("".join(lines))


def _sha256(file: Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
