"""Limits of memory and time: of this process, and of code of others that it runs."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/statm")  # its first number is the size of the address space, in pages


def return_freed_memory() -> None:
  """Makes the C library return the memory of freed arrays to the operating system.

  glibc keeps arrays of less than 32 MiB for later allocations. On a CPU these are the weights in
  the layout of sampling, for example, which would stay in memory beside the update. Does nothing
  with another C library.
  """
  malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
  if malloc_trim is not None:
    malloc_trim(0)


def within(limit_s: float, function: Callable[[], Any], name: str = "gtpo limited") -> Any:
  """Returns what `function()` returns, or raises what it raises.

  It runs on a thread of its own, which is abandoned after `limit_s` seconds.

  Args:
    limit_s: the limit in seconds.
    function: the function.
    name: the name of the thread.
  """
  outcome: Future[Any] = Future()

  def work() -> None:
    try:
      outcome.set_result(function())
    except BaseException as error:  # SystemExit would otherwise end this thread silently
      outcome.set_exception(error)

  # A daemon, so that a function that hangs cannot keep the program from ending.
  threading.Thread(target=work, name=name, daemon=True).start()
  try:
    return outcome.result(limit_s)
  except TimeoutError:
    if outcome.done():  # the function's own TimeoutError
      raise
    raise TimeoutError(f"it took longer than {limit_s:g} s") from None


@contextlib.contextmanager
def limited_memory(additional: int) -> Iterator[None]:
  """Within the context, the process can allocate at most about `additional` more bytes.

  Python raises MemoryError beyond that, in any thread. Has no effect where /proc does not exist.
  """
  try:
    pages = int(STATUS.read_text().split()[0])
  except (OSError, ValueError):
    yield
    return
  soft, hard = resource.getrlimit(resource.RLIMIT_AS)
  limit = pages * resource.getpagesize() + additional
  if soft != resource.RLIM_INFINITY:
    limit = min(limit, soft)
  resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
