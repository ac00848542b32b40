"""Paths in object stores, such as gs://bucket/run, and in file systems.

`epath` opens both. What an object store lacks (appending, renaming, links and locks) is handled
where a program needs it: `Spool` for log files, `claim_lease` for the lock of a workdir.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
from collections.abc import Iterator

from etils import epath

from gtpo_jax.runtime.errors import RunError, UserError, first_line
from gtpo_jax.runtime.installing import install_command

# The package that opens the URLs of a scheme, and how to install it.
PACKAGES = {
  "gs": ("gcsfs", install_command("gcp")),
  "s3": ("s3fs", "pip install s3fs"),
  "az": ("adlfs", "pip install adlfs"),
}
NO_LISTING_CACHE = {"use_listings_cache": False}  # other processes write to the same folders
RANGE_BYTES = 32 * 2**20  # a longer range is read in several requests at once
MAX_REASON_CHARS = 200


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a URL rather than a path of a file system."""
  return "://" in os.fspath(path)


def scheme(url: str | os.PathLike[str]) -> str:
  """Returns the scheme of a URL, such as gs."""
  return os.fspath(url).partition("://")[0]


def storage_path(name: str | os.PathLike[str]) -> epath.Path:
  """Returns the path of a file, a folder or a URL.

  Raises:
    UserError: no package here opens URLs of this kind.
  """
  if is_remote(name):
    _open_store(scheme(name))
  return epath.Path(name)


def absolute_path(path: epath.Path) -> epath.Path:
  """Returns a path that does not depend on the current folder."""
  return path if is_remote(path) else path.absolute()


@functools.cache
def _open_store(name: str) -> None:
  """Checks that URLs of the scheme `name` can be opened, and lets fsspec keep no listings of them.

  `runtime.startup` names this setting of the process, and silences the package's logger.
  """
  if name not in PACKAGES:
    valid = ", ".join(f"{known}://" for known in PACKAGES)
    raise UserError(f"{name}:// is not supported; valid are {valid} and paths of a file system")
  package, install = PACKAGES[name]
  if importlib.util.find_spec(package) is None:
    raise UserError(f"{name}:// needs the package {package}: {install}")
  import fsspec

  for protocol in fsspec.get_filesystem_class(name).protocol:
    fsspec.config.conf.setdefault(protocol, {}).update(NO_LISTING_CACHE)


def write_atomically(file: epath.Path, data: bytes) -> None:
  """Writes a file so that it never has only a part of `data`, even if the process is killed."""
  if is_remote(file):
    file.write_bytes(data)  # an object appears when it is complete
    return
  temporary = file.with_name(f"{file.name}.tmp")
  temporary.write_bytes(data)
  temporary.replace(file)


def create_exclusively(file: epath.Path, data: bytes) -> bool:
  """Creates an object. Returns False, and leaves it as it is, if there is one already."""
  filesystem, path = _filesystem(file)
  try:
    filesystem.pipe_file(path, data, mode="create")
  except FileExistsError:
    return False
  return True


def open_bytes(file: epath.Path) -> io.BufferedReader:
  """Opens a file or an object for reading.

  Files of fsspec lack a part of Python's interface, such as a limit for `readline`.
  """
  opened = file.open("rb")
  return opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(opened)


def check_object_writable(file: epath.Path) -> None:
  """Writes and removes an object beside `file`. Raises what the object store raises."""
  probe = file.with_name(f"{file.name}.tmp")
  probe.write_bytes(b"")
  probe.unlink()


def read_range(file: epath.Path, start: int, end: int) -> bytes:
  """Returns the bytes [start, end) of an object, read in parallel requests."""
  filesystem, path = _filesystem(file)
  starts = list(range(start, end, RANGE_BYTES))
  ends = [min(begin + RANGE_BYTES, end) for begin in starts]
  parts = filesystem.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
  return b"".join(parts)


def list_files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
  """Yields the path of every file below `folder`, relative to it and in order."""
  for entry in sorted(folder.iterdir()):
    if entry.is_dir():
      yield from list_files(entry, f"{prefix}{entry.name}/")
    else:
      yield f"{prefix}{entry.name}"


@contextlib.contextmanager
def storage_errors(
  what: str, error_type: type[UserError] | type[RunError] = RunError
) -> Iterator[None]:
  """Turns every error of a file system or an object store into one line.

  The packages that open object stores raise errors of many types, most of them not OSError.

  Args:
    what: what could not be done, such as "cannot write into gs://bucket/run".
    error_type: the error to raise.
  """
  try:
    yield
  except (UserError, RunError):
    raise
  except Exception as error:
    raise error_type(f"{what}: {storage_reason(error)}") from error


def storage_reason(error: BaseException) -> str:
  """Returns why a file system or an object store failed, in a few words."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  text = first_line(error)
  if isinstance(error, FileNotFoundError):
    return "no such bucket or object"
  return (text or type(error).__name__)[:MAX_REASON_CHARS]


def _filesystem(file: epath.Path):
  import fsspec

  return fsspec.core.url_to_fs(os.fspath(file))
