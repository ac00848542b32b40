"""An event loop on a thread of its own, for code that runs on other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

LOOP_CHECK_S = 1.0  # a loop that does nothing for so long is blocked
CLOSE_S = 5.0  # seconds that cancelled work may take to end


class EventLoop:
  """An event loop on a daemon thread, which starts with the first work."""

  def __init__(self, name: str = "gtpo event loop"):
    self._name = name  # of the thread
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._closed = False

  def start(self, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
    """Starts to await something. On a closed loop, the future is cancelled."""
    with self._lock:
      return self._start(awaitable)

  def _start(self, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
    work = _result_of(awaitable)
    if self._closed:
      work.close()
      future = concurrent.futures.Future()
      future.cancel()
      return future
    if self._loop is None:
      self._loop = asyncio.new_event_loop()
      arguments = (self._loop,)
      self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
      self._thread.start()
    return asyncio.run_coroutine_threadsafe(work, self._loop)

  def cancel(self, future: concurrent.futures.Future[Any]) -> None:
    """Cancels work, and leaves the loop to it if it blocks the loop."""
    future.cancel()
    with self._lock:
      if self._loop:
        lives = threading.Event()
        self._loop.call_soon_threadsafe(lives.set)
        if not lives.wait(LOOP_CHECK_S):
          self._loop = None

  def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
    """Cancels all work, awaits the last, and ends the thread, which may take `CLOSE_S` seconds."""

    async def end() -> None:
      tasks = asyncio.all_tasks() - {asyncio.current_task()}
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      if last:
        await last()

    with self._lock:
      ended = self._start(end()) if self._loop else None
      loop, self._loop = self._loop, None
      self._closed = True
    if ended:
      with contextlib.suppress(TimeoutError):
        ended.result(CLOSE_S)
      loop.call_soon_threadsafe(loop.stop)
      self._thread.join(CLOSE_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
  loop.run_forever()
  loop.close()


async def _result_of(awaitable: Awaitable[Any]) -> Any:
  return await awaitable
