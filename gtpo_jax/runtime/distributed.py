"""Communication between the processes of a run: broadcasts, votes, and arrays on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.experimental import multihost_utils

from gtpo_jax.runtime.errors import SHARED_ERRORS

T = TypeVar("T")
MAX_TEXT_BYTES = 256  # every process sends a buffer of this size
# Broadcasts consist of blocks of this size: each size would need a compiled program of its own.
BLOCK_BYTES = 64 * 1024
LENGTH_BYTES = 8  # at the start of the first block
UNKNOWN = -1  # a value that no process sends otherwise


def fetch(tree: Any) -> Any:
  """Returns a tree of device arrays as complete NumPy arrays on every process."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def is_first_process() -> bool:
  """Whether this is process 0, the one that writes files and prints."""
  return jax.process_index() == 0


def broadcast_from_first(make: Callable[[], T]) -> T:
  """Calls `make` on the first process and returns its result on every process.

  Use it for everything that depends on clocks, files or user code, so that all processes agree.
  The result consists of dicts, lists, plain values and host arrays.

  Raises:
    Exception: what `make` raised on the first process is raised on every process: with its own type
      if that is one of `SHARED_ERRORS`, else as a RuntimeError.
  """
  if jax.process_count() == 1:
    return make()
  payload = b""
  if is_first_process():
    try:
      payload = msgpack_serialize({"value": make()})
    except Exception as error:  # of any type: the other processes are waiting
      payload = msgpack_serialize({"error": [type(error).__name__, str(error)]})
  reply = msgpack_restore(_broadcast_bytes(payload))
  if "error" not in reply:
    return reply["value"]
  kind, message = reply["error"]
  if kind in SHARED_ERRORS:
    raise SHARED_ERRORS[kind](message)
  raise RuntimeError(f"the first process failed: {kind}: {message}")


def _broadcast_bytes(payload: bytes) -> bytes:
  """Returns the first process's `payload` on every process. All sizes share one program."""
  message = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
  received = _broadcast_block(message[:BLOCK_BYTES])
  end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
  blocks = [received]
  for start in range(BLOCK_BYTES, end, BLOCK_BYTES):
    blocks.append(_broadcast_block(message[start : start + BLOCK_BYTES]))
  return b"".join(blocks)[LENGTH_BYTES:end]


def _broadcast_block(block: bytes) -> bytes:
  padded = np.frombuffer(block.ljust(BLOCK_BYTES, b"\0"), np.uint8)
  return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()


def first_nonempty_text(text: str) -> str:
  """Returns the non-empty `text` of the lowest process index, or "" if all are empty.

  Every process returns the same text. With several processes it is cut to `MAX_TEXT_BYTES`.
  """
  if jax.process_count() == 1:
    return text
  padded = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
  rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
  for row in np.asarray(rows, np.uint8):
    if decoded := row.tobytes().rstrip(b"\0").decode(errors="ignore"):
      return decoded
  return ""


def least_of_processes(value: int | None) -> int | None:
  """Returns the smallest `value` of all processes, rounded down to MiB; None if any has None."""
  mib = UNKNOWN if value is None else value >> 20
  if jax.process_count() > 1:
    mib = int(multihost_utils.process_allgather(np.asarray(mib, np.int32)).min())
  return None if mib == UNKNOWN else mib << 20


def any_process(flag: bool) -> bool:
  """Whether `flag` is True on at least one process."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.asarray(flag)).any())
