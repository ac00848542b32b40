"""A file of records, written before requests are acknowledged; a torn end is cut off."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gtpo_jax.runtime.errors import UserError

# Of a record: the bytes of its head and of its body, and a checksum of both.
_SIZES = struct.Struct("<III")


class Record(NamedTuple):
  """A record: what JSON can hold, and bytes."""

  head: dict[str, Any]
  body: bytes = b""


class RecordLog:
  """Appends records to a file.

  Attributes:
    size: bytes written.
  """

  def __init__(self, file: Path):
    """Opens or makes the file, and cuts off a record that a killed process has begun.

    Raises:
      UserError: another process has it open, or it cannot be written.
    """
    self._path = file
    self._lock = threading.Lock()
    self._sync_lock = threading.Lock()  # taken before the other one
    try:
      file.parent.mkdir(parents=True, exist_ok=True)
      self._guard = _claim(file.with_suffix(".lock"))
      file.with_suffix(".new").unlink(missing_ok=True)
      file.touch()
      self.size = _intact(file)
      os.truncate(file, self.size)
      self._file = file.open("ab")
    except OSError as error:
      raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from error
    self._synced = self.size

  def records(self) -> Iterator[Record]:
    """Yields the records so far."""
    with self._path.open("rb") as opened:
      yield from _read(opened)

  def append(self, record: Record) -> int:
    """Writes a record, which `sync` makes last; returns the size with it."""
    data = _packed(record)
    with self._lock:
      self._file.write(data)
      self._file.flush()
      self.size += len(data)
      return self.size

  def sync(self, size: int) -> None:
    """Returns once the first `size` bytes are on disk; one call does the work of all that wait."""
    with self._sync_lock:
      if self._synced >= size:
        return
      with self._lock:
        written = self.size
      os.fsync(self._file.fileno())  # while others write
      self._synced = written

  def rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drops the records whose heads `keep` does not accept; the file is replaced at once."""
    with self._sync_lock, self._lock:
      new = self._path.with_suffix(".new")
      with new.open("wb") as out:
        for record in self.records():
          if keep(record.head):
            out.write(_packed(record))
        out.flush()
        os.fsync(out.fileno())
        self.size = self._synced = out.tell()
      os.replace(new, self._path)
      self._file.close()
      self._file = self._path.open("ab")

  def close(self) -> None:
    """Closes the file."""
    with self._lock:
      self._file.close()
      self._guard.close()


def _claim(file: Path) -> BinaryIO:
  import fcntl

  opened = file.open("ab")
  try:
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    opened.close()
    raise UserError(
      f"another process serves {str(file.parent)!r}; stop it, or name another --workdir"
    ) from None
  return opened


def _packed(record: Record) -> bytes:
  head = json.dumps(record.head).encode()
  checksum = zlib.crc32(record.body, zlib.crc32(head))
  return _SIZES.pack(len(head), len(record.body), checksum) + head + record.body


def _read(opened: BinaryIO) -> Iterator[Record]:
  while len(sizes := opened.read(_SIZES.size)) == _SIZES.size:
    head_size, body_size, checksum = _SIZES.unpack(sizes)
    head = opened.read(head_size)
    body = opened.read(body_size)
    if zlib.crc32(body, zlib.crc32(head)) != checksum or len(body) != body_size:
      return
    yield Record(json.loads(head), body)


def _intact(file: Path) -> int:
  """Returns the bytes of the whole records at the beginning of a file."""
  with file.open("rb") as opened:
    end = 0
    for record in _read(opened):
      end += len(_packed(record))
  return end
