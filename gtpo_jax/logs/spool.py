"""The log files of a run: written in its workdir, or uploaded to it if it is in an object store.

An object store cannot append to an object. There the files are written in a local folder, the
spool, and uploaded: when asked (`Logs.flush`), in the background, and at the end. A `.jsonl` file
becomes a folder of the same name whose objects are its consecutive blocks of 1 MiB, so that only
the last block is uploaded again as the file grows. `gsutil cat 'gs://.../metrics.jsonl/*'` prints
the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from gtpo_jax.runtime.distributed import is_first_process
from gtpo_jax.runtime.errors import RunError
from gtpo_jax.runtime.paths import is_remote, storage_errors

BLOCK_BYTES = 2**20
FLUSH_S = 20.0  # seconds between uploads in the background
# The files that a resumed run continues.
RESUMED = ("*.jsonl", "sessions.json", "wandb_id", "trackio_id")


class Logs:
  """Where a run writes its log files.

  Attributes:
    folder: a folder of a file system.
  """

  def __init__(self, folder: Path):
    self.folder = folder

  def flush(self) -> None:
    """Returns when everything written so far is in the workdir."""


class Spool(Logs):
  """A local folder whose files are uploaded to a folder of an object store.

  Args:
    remote: the workdir. The logs that it has already are downloaded.
  """

  def __init__(self, remote: epath.Path):
    self._temporary = tempfile.TemporaryDirectory(prefix="gtpo_")
    super().__init__(Path(self._temporary.name))
    self._remote = remote
    self._stamps: dict[str, tuple[int, int]] = {}  # of the files when they were last uploaded
    self._blocks: dict[str, list[bytes]] = {}  # the digests of the blocks of each .jsonl file
    self._lock = threading.Lock()
    self._ended = threading.Event()
    with storage_errors(f"cannot read the logs in {str(remote)!r}"):
      for entry in [entry for pattern in RESUMED for entry in remote.glob(pattern)]:
        data = b"".join(read_blocks(entry))
        (self.folder / entry.name).write_bytes(data)
        if entry.name.endswith(".jsonl"):
          self._blocks[entry.name] = [_digest(block) for block in _split(data)]
    self._thread = threading.Thread(target=self._upload_regularly, name="spool", daemon=True)
    self._thread.start()

  def flush(self) -> None:
    """See `Logs`."""
    with self._lock, storage_errors(f"cannot write the logs to {str(self._remote)!r}"):
      self._upload()

  def close(self) -> None:
    """Uploads the rest and deletes the local folder."""
    self._ended.set()
    self._thread.join()
    try:
      self.flush()
    finally:
      self._temporary.cleanup()

  def _upload_regularly(self) -> None:
    while not self._ended.wait(FLUSH_S):
      with contextlib.suppress(RunError):  # tried again, and raised by the next `flush`
        self.flush()

  def _upload(self) -> None:
    for file in sorted(self.folder.rglob("*")):
      if file.is_dir() or file.name.endswith(".tmp"):
        continue
      status = file.stat()
      stamp = (status.st_mtime_ns, status.st_size)
      name = str(file.relative_to(self.folder))
      if self._stamps.get(name) == stamp:
        continue
      data = file.read_bytes()
      if name.endswith(".jsonl"):
        self._upload_blocks(name, data)
      else:
        (self._remote / name).write_bytes(data)
      self._stamps[name] = stamp

  def _upload_blocks(self, name: str, data: bytes) -> None:
    """Uploads the blocks that changed, and removes those after the end of the file."""
    known = self._blocks.setdefault(name, [])
    blocks = _split(data)
    for i, block in enumerate(blocks):
      digest = _digest(block)
      if i < len(known) and known[i] == digest:
        continue
      _block(self._remote / name, i).write_bytes(block)
      known[i : i + 1] = [digest]
    while len(known) > len(blocks):
      _block(self._remote / name, len(known) - 1).unlink()
      known.pop()


@contextlib.contextmanager
def open_logs(workdir: epath.Path) -> Iterator[Logs]:
  """Yields where this process writes its log files; only the first process of a run writes any."""
  if not (is_remote(workdir) and is_first_process()):
    yield Logs(workdir)
    return
  spool = Spool(workdir)
  try:
    yield spool
  except BaseException:
    with contextlib.suppress(RunError):  # the first error says more
      spool.close()
    raise
  spool.close()


def read_blocks(file: epath.Path) -> Iterator[bytes]:
  """Yields the content of a log file in parts: a file, or the blocks that a `Spool` uploaded."""
  if is_remote(file) and file.is_dir():
    for block in sorted(file.iterdir()):
      yield block.read_bytes()
    return
  with file.open("rb") as opened:
    while block := opened.read(BLOCK_BYTES):
      yield block


def read_lines(file: epath.Path) -> Iterator[bytes]:
  """Yields the lines of a log file without their ends; see `read_blocks`."""
  rest = b""
  for block in read_blocks(file):
    *lines, rest = (rest + block).split(b"\n")
    yield from lines
  if rest:
    yield rest


def _split(data: bytes) -> list[bytes]:
  return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]


def _block(file: epath.Path, i: int) -> epath.Path:
  return file / f"{i:06d}"


def _digest(block: bytes) -> bytes:
  return hashlib.blake2b(block, digest_size=16).digest()
