"""An event loop on a thread of its own, for callers on other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gtpo_jax.runtime.errors import JudgeError

CLOSE_S = 5.0  # seconds that cancelled requests may take to end


class LoopThread:
  """Runs coroutines of the judge; the thread starts with the first of them."""

  def __init__(self, name: str, at_end: Callable[[], Awaitable[None]]):
    """Args:
    name: of the thread.
    at_end: called on the loop, after everything on it has been cancelled.
    """
    self._name = name
    self._at_end = at_end
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._thread: threading.Thread | None = None
    self._closed = False

  def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns.

    Raises:
      JudgeError: `close` was called.
    """
    with self._lock:
      if self._closed:
        coroutine.close()
        raise JudgeError("the judge was closed")
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a request cannot keep the program from ending.
        self._thread = threading.Thread(
          target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()
      future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    return future.result()

  def close(self) -> None:
    """Cancels what is under way and ends the thread."""
    with self._lock:
      self._closed = True
      loop, self._loop = self._loop, None
    if loop:
      loop.call_soon_threadsafe(loop.stop)
      self._thread.join(CLOSE_S)

  def _run(self, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
      loop.run_forever()
      loop.run_until_complete(self._cancel_all())
    finally:
      loop.close()

  async def _cancel_all(self) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self._at_end()
