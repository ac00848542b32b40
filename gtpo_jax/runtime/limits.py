"""Runs code of others, such as reward functions and chat templates, with limits."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/statm")  # its first number is the size of the address space, in pages


def within(limit_s: float, function: Callable[[], Any], name: str = "gtpo limited") -> Any:
  """Returns what `function()` returns, or raises what it raises.

  It runs on a thread of its own, which is abandoned after `limit_s` seconds.

  Args:
    limit_s: the limit in seconds.
    function: the function.
    name: the name of the thread.

  Raises:
    TimeoutError: it took longer than `limit_s`.
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
