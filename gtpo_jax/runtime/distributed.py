"""What several processes do together: values sent from the first to the others, and arrays gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.experimental import multihost_utils

from gtpo_jax.runtime.errors import KINDS

Made = TypeVar("Made")


def fetch(tree: Any) -> Any:
  """Whole device arrays to NumPy on every process."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def is_first_process() -> bool:
  """Whether this is the process that writes."""
  return jax.process_index() == 0


def broadcast_from_first(make: Callable[[], Made]) -> Made:
  """What `make` gives on the first process, on every process: for all that depends on clocks, files or users.

  It is made of dicts, lists, plain values and host arrays. What it raises there is raised everywhere.
  """
  if jax.process_count() == 1:
    return make()
  made = b""
  if is_first_process():
    try:
      made = msgpack_serialize({"value": make()})
    except Exception as error:  # whatever it is, the others wait
      made = msgpack_serialize({"error": [type(error).__name__, str(error)]})
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(made))))
  sent = multihost_utils.broadcast_one_to_all(np.frombuffer(made.ljust(size, b"\0"), np.uint8))
  told = msgpack_restore(np.asarray(sent, np.uint8).tobytes())
  if "error" in told:
    kind, message = told["error"]
    raise (
      KINDS[kind](message)
      if kind in KINDS
      else RuntimeError(f"on the first process: {kind}: {message}")
    )
  return told["value"]


def any_text(here: str) -> str:
  """The first of the processes' texts that is not empty, the same on every process, cut after some 200 characters."""
  if jax.process_count() == 1:
    return here
  room = np.frombuffer(here.encode()[:256].ljust(256, b"\0"), np.uint8)
  texts = np.asarray(multihost_utils.process_allgather(room), np.uint8)
  return next(
    (text for row in texts if (text := row.tobytes().rstrip(b"\0").decode(errors="ignore"))), ""
  )


def any_process(here: bool) -> bool:
  """Whether `here` is True on some process."""
  return (
    here
    if jax.process_count() == 1
    else bool(multihost_utils.process_allgather(np.asarray(here)).any())
  )
