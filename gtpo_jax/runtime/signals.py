"""Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once. And the end of a run that has stalled."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
GRACE_S = 5.0


class StopSignals:
  """Within it, the first Ctrl-C or SIGTERM is a wish to stop at the next step boundary; the second leaves at once.

  Signals are read by a thread, since the main one may be in a compiler or in a collective for minutes. Nothing on disk needs a clean
  end: whatever is being written then does not count yet.
  """

  def __init__(self):
    self.signal: int | None = None
    self._before: dict[int, object] = {}

  def asked(self) -> bool:
    """Whether a signal came."""
    return self.signal is not None

  def __enter__(self) -> StopSignals:
    self._reads, self._writes = socket.socketpair()
    self._writes.setblocking(False)
    self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    self._wakeup = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=self._listen, name="gtpo signals", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    signal.set_wakeup_fd(self._wakeup)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._writes.close()  # which ends the thread

  def _listen(self) -> None:
    with self._reads:
      while number := self._reads.recv(1):
        if number[0] in SIGNALS:
          self._on_signal(number[0])

  def _on_signal(self, number: int) -> None:
    if self.signal is not None:
      if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the progress bar hid the cursor
      os._exit(128 + number)
    self.signal = number
    print(
      "\ngtpo: stopping at the next step boundary and saving; once more to leave at once",
      file=sys.stderr,
      flush=True,
    )


class Interrupts:
  """Within it, the first Ctrl-C is a wish to stop at the next step boundary, the second a KeyboardInterrupt as ever.

  It is for programs and notebooks that call us: a second Ctrl-C must not end them. It may be entered again and again; outside of it
  Ctrl-C does what it did before. Threads other than the main one get no signals, and there it does nothing.
  """

  def __init__(self):
    self._asked = False

  def asked(self) -> bool:
    """Whether a Ctrl-C came."""
    return self._asked

  def __enter__(self) -> Interrupts:
    self._main = threading.current_thread() is threading.main_thread()
    if self._main:
      self._before = signal.signal(signal.SIGINT, self._on_signal) or signal.SIG_DFL
    return self

  def __exit__(self, *_: object) -> None:
    if self._main:
      signal.signal(signal.SIGINT, self._before)

  def _on_signal(self, *_: object) -> None:
    if self._asked:
      raise KeyboardInterrupt
    self._asked = True
    print(
      "\ngtpo: stopping at the next step boundary; once more to leave at once",
      file=sys.stderr,
      flush=True,
    )


class Watchdog:
  """Asks `stopping` on behalf of whoever calls it, and takes the question for a sign of life: it is asked whenever something has ended.

  When nothing has for `limit_s` seconds (0: never mind), the process prints the stacks of all its threads and exits with status 1.
  """

  def __init__(self, limit_s: float, stopping: Callable[[], bool]):
    self._limit_s = limit_s
    self._stopping = stopping
    self._alive = threading.Event()
    self._over = False
    self._paused = False

  def __call__(self) -> bool:
    """Whether the run is asked to stop."""
    if self._limit_s:
      faulthandler.dump_traceback_later(
        self._limit_s + GRACE_S, exit=True, file=STDERR
      )  # for what keeps all of Python from running
      self._alive.set()
    return self._stopping()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Within it nothing is expected to end: another's code runs."""
    faulthandler.cancel_dump_traceback_later()
    self._paused = True
    self._alive.set()
    try:
      yield
    finally:
      self._paused = False
      self._alive.set()

  def __enter__(self) -> Watchdog:
    if self._limit_s:
      threading.Thread(target=self._watch, name="gtpo watchdog", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._over = True
    self._alive.set()
    faulthandler.cancel_dump_traceback_later()

  def _watch(self) -> None:
    while not self._over:
      if not self._alive.wait(None if self._paused else self._limit_s):
        print(
          f"\ngtpo: nothing has ended for {self._limit_s:g} s (guards.stall_s); the stacks of all threads follow; the same command "
          f"goes on from the newest checkpoint",
          file=sys.stderr,
          flush=True,
        )
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(1)
      self._alive.clear()
