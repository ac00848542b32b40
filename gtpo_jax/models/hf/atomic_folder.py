"""Writes a folder atomically: it appears with all its files and checksums, or not at all.

An object store cannot rename a folder. There the files are written where they belong, and the
checksums last: a folder without checksums is incomplete.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath
from jax.experimental.multihost_utils import broadcast_one_to_all, sync_global_devices

from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import (
  check_object_writable,
  is_remote,
  list_files,
  storage_errors,
  storage_reason,
)

MANIFEST = "SHA256SUMS"


@contextlib.contextmanager
def atomic_folder(folder: epath.Path) -> Iterator[epath.Path | None]:
  """Yields a temporary folder; on exit a manifest is added and it is renamed to `folder`.

  If the body raises, the temporary folder is deleted. In an object store `folder` itself takes the
  place of the temporary folder. Every process must enter the context. The first process gets the
  temporary folder and writes the files; the others get None, and their context exits once `folder`
  exists.

  Raises:
    UserError: `folder` is not empty or cannot be created (every process raises this), or a file
      cannot be written.
  """
  if not is_remote(folder):
    folder = epath.Path(os.path.abspath(folder))  # a folder cannot be renamed to "."
  out = None
  finished = False
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
      if not is_remote(out):
        os.replace(out, folder)  # epath refuses an empty folder
    finished = True
    sync_global_devices("saved")
  except Exception as error:
    in_store = is_remote(folder) and not isinstance(error, UserError | RunError)
    if not in_store and not isinstance(error, OSError):  # object stores raise many types
      raise
    raise UserError(f"cannot write {str(folder)!r}: {storage_reason(error)}") from error
  finally:
    if out is not None and not (finished and is_remote(out)):
      with contextlib.suppress(Exception):
        out.rmtree()


def _make_temporary(folder: epath.Path) -> epath.Path:
  """Creates the temporary folder beside `folder`, and deletes what killed processes left."""
  if is_remote(folder):
    return _check_empty(folder)
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


def _check_empty(folder: epath.Path) -> epath.Path:
  """Returns a folder of an object store. Raises UserError if it has any object."""
  with storage_errors(f"cannot write {str(folder)!r}", UserError):
    if folder.exists():
      complete = (folder / MANIFEST).exists()
      state = "not empty" if complete else f"not empty, and incomplete: it has no {MANIFEST}"
      raise UserError(f"{str(folder)!r} is {state}; remove it, or name a new folder")
    check_object_writable(folder / MANIFEST)
  return folder


def _write_manifest(folder: epath.Path) -> None:
  """Writes the checksums of all files, in the format that `sha256sum -c` reads."""
  lines = [f"{_sha256(folder / name)}  {name}\n" for name in sorted(list_files(folder))]
  (folder / MANIFEST).write_text("".join(lines))


def _sha256(file: epath.Path) -> str:
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
