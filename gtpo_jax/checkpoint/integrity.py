"""The integrity record of a checkpoint: digests of its files and arrays at the time of writing.

A step without a record was not written completely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from etils import epath

from gtpo_jax.checkpoint.digests import digest_file
from gtpo_jax.runtime.errors import CorruptCheckpoint
from gtpo_jax.runtime.paths import list_files, write_atomically

RECORD_FILE = "integrity_record"  # its first line is the SHA-256 of the JSON that follows

# Orbax writes these files while it commits a step, after the integrity record.
COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


class IntegrityRecord(NamedTuple):
  """What a checkpoint contained when it was written."""

  leaves: Mapping[str, Mapping[str, str]]  # by item, the digest of each leaf by its path
  metadata: Mapping[str, Any]  # plain values saved with the checkpoint
  files: Mapping[str, str]  # the digest of each file by its path in the step's folder


def write_integrity_record(
  folder: epath.Path, leaves: Mapping[str, Mapping[str, str]], metadata: Mapping[str, Any]
) -> None:
  """Records the content of a checkpoint before it is committed.

  Args:
    folder: the folder of one step, complete except for the files of the commit.
    leaves: for each item, the digests of its leaves.
    metadata: plain values to save with the checkpoint.
  """
  not_recorded = (RECORD_FILE, *COMMIT_FILES)
  files = {
    name: digest_file(folder / name) for name in list_files(folder) if name not in not_recorded
  }
  _write(folder, IntegrityRecord(leaves, metadata, files))


def record_commit_files(folder: epath.Path) -> None:
  """Adds the files of the commit to the record, if they are not in it yet.

  They contain timestamps and notes, nothing that is restored.
  """
  record = _read(folder)
  added = {name: digest_file(folder / name) for name in COMMIT_FILES if (folder / name).exists()}
  if not added.keys() <= record.files.keys():
    _write(folder, record._replace(files={**record.files, **added}))


def check_integrity(folder: epath.Path, items: Collection[str]) -> IntegrityRecord:
  """Checks the files of some items, and files of no item, against the record.

  Args:
    folder: the folder of one step.
    items: names of items; the files of other items are not read.

  Returns:
    The record.

  Raises:
    CorruptCheckpoint: the record or a file is missing or differs from what was written.
  """
  record = _read(folder)
  for name, digest in record.files.items():
    item, slash, _ = name.partition("/")
    if slash and item not in items:
      continue
    file = folder / name
    if not file.exists():
      raise CorruptCheckpoint(f"{name} is missing")
    if digest_file(file) != digest:
      raise CorruptCheckpoint(f"{name} differs from what was written")
  return record


def _read(folder: epath.Path) -> IntegrityRecord:
  file = folder / RECORD_FILE
  if not file.exists():
    raise CorruptCheckpoint(f"{RECORD_FILE} is missing")
  digest, _, text = file.read_bytes().partition(b"\n")
  if digest != _sha256(text):
    raise CorruptCheckpoint(f"{RECORD_FILE} differs from what was written")
  values = json.loads(text)
  return IntegrityRecord(**values)


def _write(folder: epath.Path, record: IntegrityRecord) -> None:
  text = json.dumps(record._asdict(), indent=1).encode()
  write_atomically(folder / RECORD_FILE, _sha256(text) + b"\n" + text)


def _sha256(text: bytes) -> bytes:
  return hashlib.sha256(text).hexdigest().encode()
