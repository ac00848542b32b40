"""Ctrl-C and SIGTERM: the first asks the run to save and stop, the second quits at once.

Also the watchdog, which ends a run that makes no progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_EXIT = 128  # plus the signal's number: the exit status shells use
STDERR = 2
# JAX reports this event just before XLA starts to compile a program, and others when it is done.
COMPILE_EVENTS = "/jax/core/compile/"
COMPILE_BEGINS = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE_LIMIT_S = 3600.0  # the time for one program; the largest take minutes
GRACE_S = 5.0  # time for the watchdog's thread to act before faulthandler ends the process
SHOW_CURSOR = b"\x1b[?25h\n"
RESET_HANDLER = 4 if sys.platform == "darwin" else -(2**31)  # SA_RESETHAND of <signal.h>
MASK_BYTES = 4 if sys.platform == "darwin" else 128


class Stopped(Exception):
  """Raised by a long phase that was asked to stop before it was complete."""


def print_notice(text: str) -> None:
  """Prints a message about a signal to stderr."""
  print(f"\ngtpo: {text}", file=sys.stderr, flush=True)


class StopSignals:
  """Context manager: the first Ctrl-C or SIGTERM requests a stop, the second quits at once.

  The run checks `requested` between chunks of sampling and between steps. A separate thread reads
  the signals, because the main thread may spend minutes in a compiler or a collective. The second
  one ends the process even if that thread cannot run (`OneShot`). Quitting at once is safe: a file
  that is being written does not count until it is complete.

  Args:
    show: shows a message to the user; called on that thread.
  """

  def __init__(self, show: Callable[[str], None] = print_notice):
    self.signal: int | None = None
    self._show = show
    self._arrived = 0.0
    self._previous: dict[int, object] = {}

  def requested(self) -> bool:
    """Whether a signal has arrived."""
    return self.signal is not None

  def seconds_before(self, moment: float) -> float:
    """Returns the seconds from the first signal to `moment`, a value of `time.monotonic`."""
    return moment - self._arrived

  def __enter__(self) -> StopSignals:
    self._reader, self._writer = socket.socketpair()
    self._writer.setblocking(False)
    self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
    self._handlers = OneShot(SIGNALS)
    threading.Thread(target=self._listen, name="gtpo signals", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    signal.set_wakeup_fd(self._wakeup)
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._writer.close()  # ends the thread

  def _listen(self) -> None:
    with self._reader:
      while number := self._reader.recv(1):
        if number[0] in SIGNALS:
          self._on_signal(number[0])

  def _on_signal(self, number: int) -> None:
    if sys.stdout.isatty():
      os.write(sys.stdout.fileno(), SHOW_CURSOR)  # the progress bar hides it
    if self.signal is not None:  # in the first process of a container
      os._exit(SIGNAL_EXIT + number)
    self._arrived = time.monotonic()
    self.signal = number
    self._handlers.acted()
    self._show("stopping as soon as possible, then saving; repeat to quit at once, unsaved")


class _Action(ctypes.Structure):
  """`struct sigaction` of 64-bit Linux and macOS."""

  _fields_ = (
    ("handler", ctypes.c_void_p),  # NULL is the default, which ends the process
    ("mask", ctypes.c_byte * MASK_BYTES),
    ("flags", ctypes.c_int),
    ("restorer", ctypes.c_void_p),
  )


class OneShot:
  """Lets the handlers that signals have now act once; then the default ends the process.

  Handlers of Python need the interpreter's lock, and so does a thread that reads signals. C code
  may hold it for hours, such as a search with a regular expression. The kernel needs nothing.

  Args:
    numbers: the signals.
  """

  def __init__(self, numbers: Iterable[int]):
    self._libc = ctypes.CDLL(None)
    self._actions = {number: _Action() for number in numbers}
    for number, action in self._actions.items():
      self._libc.sigaction(number, None, ctypes.byref(action))
      action.flags |= RESET_HANDLER
    self._set(self._actions)

  def acted(self) -> None:
    """Lets the next one of all these signals end the process; may be called on any thread.

    The kernel does not end the first process of a container so. Its handlers act once again.
    """
    default = {number: _Action() for number in self._actions}
    self._set(self._actions if os.getpid() == 1 else default)

  def _set(self, actions: Mapping[int, _Action]) -> None:
    for number, action in actions.items():
      self._libc.sigaction(number, ctypes.byref(action), None)


class Interrupts:
  """Context manager: the first Ctrl-C requests a stop, the second raises KeyboardInterrupt.

  For programs and notebooks that call this package, where a second Ctrl-C must not end the process.
  It can be entered repeatedly; outside it, Ctrl-C does what it did before. Only the main thread
  receives signals: on other threads it does nothing.

  Args:
    show: shows a message to the user; called in a signal handler.
  """

  def __init__(self, show: Callable[[str], None] = print_notice):
    self._requested = False
    self._show = show

  def requested(self) -> bool:
    """Whether Ctrl-C was pressed."""
    return self._requested

  def __enter__(self) -> Interrupts:
    self._on_main_thread = threading.current_thread() is threading.main_thread()
    if self._on_main_thread:
      self._previous = signal.signal(signal.SIGINT, self._on_signal) or signal.SIG_DFL
    return self

  def __exit__(self, *_: object) -> None:
    if self._on_main_thread:
      signal.signal(signal.SIGINT, self._previous)

  def _on_signal(self, *_: object) -> None:
    if self._requested:
      raise KeyboardInterrupt
    self._requested = True
    self._show("stopping as soon as possible; repeat to quit at once")


class Watchdog:
  """Ends a process that makes no progress. Each call is a sign of progress.

  The run calls it whenever a piece of work is complete, to ask whether to stop; the answer is that
  of `stopping`. Every program that JAX has traced or compiled is a sign of progress too, and while
  XLA compiles one, it has at least `COMPILE_LIMIT_S`. After `limit_s` seconds without a sign, the
  process prints the stacks of all its threads and exits with status 1. The countdown starts with
  the first sign.

  Args:
    limit_s: seconds without progress that end the process; 0 turns the watchdog off.
    stopping: returns whether the run is asked to stop.
  """

  def __init__(self, limit_s: float, stopping: Callable[[], bool]):
    self._limit_s = limit_s
    self._allowed_s = limit_s
    self._stopping = stopping
    self._progress = threading.Event()
    self._thread: threading.Thread | None = None
    self._closed = False
    self._paused = False

  def __call__(self) -> bool:
    """Reports progress and returns whether the run is asked to stop."""
    self._restart(self._limit_s)
    return self.poll()

  def poll(self) -> bool:
    """Returns whether the run is asked to stop, without reporting progress."""
    return self._stopping()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Stops the countdown within the context, while the caller's own code runs."""
    faulthandler.cancel_dump_traceback_later()
    self._paused = True
    self._progress.set()
    try:
      yield
    finally:
      self._paused = False
      self._progress.set()

  def __enter__(self) -> Watchdog:
    if self._limit_s:
      self._thread = threading.Thread(target=self._watch, name="gtpo watchdog", daemon=True)
      self._thread.start()
      if jax := sys.modules.get("jax"):
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
    return self

  def __exit__(self, *_: object) -> None:
    self._closed = True
    self._progress.set()
    if self._thread:
      self._thread.join()
    faulthandler.cancel_dump_traceback_later()
    if self._limit_s and (jax := sys.modules.get("jax")):
      with contextlib.suppress(AssertionError, ValueError):  # not registered
        jax.monitoring.unregister_event_duration_listener(self._on_event)

  def _on_event(self, event: str, *_: object, **__: object) -> None:
    if event.startswith(COMPILE_EVENTS) and not self._paused:
      begins = event == COMPILE_BEGINS
      self._restart(max(self._limit_s, COMPILE_LIMIT_S) if begins else self._limit_s)

  def _restart(self, allowed_s: float) -> None:
    """Restarts the countdown with another time."""
    if self._limit_s and not self._closed:
      self._allowed_s = allowed_s
      # If native code holds the interpreter's lock, the thread below cannot run; this one can.
      faulthandler.dump_traceback_later(allowed_s + GRACE_S, exit=True, file=STDERR)
      self._progress.set()

  def _watch(self) -> None:
    while not self._closed:
      if not self._progress.wait(None if self._paused else self._allowed_s):
        print(
          f"\ngtpo: no progress for {self._allowed_s:g} s (guards.stall_s); the stacks of all "
          f"threads follow; run the same command again to resume from the latest checkpoint",
          file=sys.stderr,
          flush=True,
        )
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(1)
      self._progress.clear()


def poll(stopping: Callable[[], bool]) -> bool:
  """Returns what `stopping` returns, without reporting progress if it is a `Watchdog`."""
  return stopping.poll() if isinstance(stopping, Watchdog) else stopping()
