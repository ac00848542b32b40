"""A journal on disk, and in memory what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gtpo_jax.tinker.ledger.entries import Entries
from gtpo_jax.tinker.ledger.record_log import Record, RecordLog

COMPACT_BYTES = 1 << 30  # a journal of this size is rewritten


class Book:
  """A journal. What is written is in `entries` at once, and after `sync` on disk.

  Attributes:
    entries: what is written.
    changed: the lock of `entries`; threads that wait for work are woken up.
    closed: whether the server ends.
  """

  def __init__(self, file: Path, snapshot_of: Callable[[str], int]):
    """Args:
    file: the journal.
    snapshot_of: as in `Entries`.
    """
    self._journal = RecordLog(file)
    self._compact_at = COMPACT_BYTES
    self.entries = Entries(snapshot_of)
    self.changed = threading.Condition(threading.RLock())
    self.closed = False
    for record in self._journal.records():
      self.entries.add(record)
    self._journal.rewrite(self.entries.needs)

  @property
  def size(self) -> int:
    """What `sync` must wait for, so that all that was written is on disk."""
    return self._journal.size

  def write(self, kind: str, body: bytes = b"", **fields: Any) -> int:
    """Writes a record; returns what `sync` must wait for."""
    record = Record({"kind": kind, **fields}, body)
    size = self._journal.append(record)
    self.entries.add(record)
    self.changed.notify_all()
    return size

  def write_ahead(self, kind: str, body: bytes, **fields: Any) -> int:
    """Writes a record which the caller adds to `entries` once it is on disk."""
    return self._journal.append(Record({"kind": kind, **fields}, body))

  def sync(self, size: int) -> None:
    """Returns once what was written before is on disk."""
    self._journal.sync(size)

  def compact(self) -> None:
    """Removes what is no longer needed from a journal that is large."""
    if self._journal.size > self._compact_at:
      self._journal.rewrite(self.entries.needs)
      self._compact_at = max(COMPACT_BYTES, 2 * self._journal.size)

  def close(self) -> None:
    """Ends the work."""
    with self.changed:
      self.closed = True
      self.changed.notify_all()

  def close_journal(self) -> None:
    """Closes the file, after the last result."""
    self._journal.close()
