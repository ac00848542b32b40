"""Runs calls of environments on threads, with a time limit for each.

A thread takes further calls for as long as there are any: starting one takes longer than many a
tool. It cannot be stopped. A call that exceeds its limit is abandoned: it has failed, its thread no
longer takes the place of a worker, and what it returns later is dropped. `async` calls share an
event loop, on which they are cancelled.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from gtpo_jax.runtime.errors import FunctionError, RunError, described, escape_controls
from gtpo_jax.runtime.event_loop import EventLoop

# Calls that hang at the same time before a run ends; each of them keeps a thread and its memory.
MAX_HANGING = 256
IDLE_S = 1.0  # a thread that gets no further call for so long ends


class Outcome(NamedTuple):
  """How a call ended.

  Attributes:
    key: what was given to `Workers.submit`.
    value: what the call returned; None if it failed.
    seconds: how long it took.
    timed_out: whether it exceeded its limit.
    hangs: whether it has not returned yet, so that `cleanup` is still to come.
    error: what it raised, in one line; "" if nothing.
    details: the traceback of `error`.
  """

  key: Hashable
  value: Any
  seconds: float
  timed_out: bool = False
  hangs: bool = False
  error: str = ""
  details: str = ""


class _Call:
  """A call that waits or runs."""

  def __init__(
    self, key: Hashable, work: Callable[[], Any], limit_s: float, cleanup: Callable[[], Any]
  ):
    self.key = key
    self.work = work
    self.limit_s = limit_s
    self.cleanup = cleanup
    self.began = 0.0
    self.future: concurrent.futures.Future[Any] | None = None  # of an `async` call

  def outcome(self, value: Any = None, error: str = "", details: str = "") -> Outcome:
    """Returns the outcome of a call that returns now. Its own time tells whether it is too late."""
    seconds = time.monotonic() - self.began
    if seconds > self.limit_s:
      return Outcome(self.key, None, seconds, timed_out=True)
    return Outcome(self.key, value, seconds, error=error, details=details)


class Workers:
  """Runs at most `count` calls at a time. One thread submits calls and takes their outcomes.

  Attributes:
    abandoned: how many calls were abandoned so far.
  """

  def __init__(self, count: int):
    """Args:
    count: the most calls that run at the same time.
    """
    self.abandoned = 0
    self._count = count
    self._waiting: collections.deque[_Call] = collections.deque()
    self._running: set[_Call] = set()
    self._hanging = 0
    self._outcomes: list[Outcome] = []
    self._fatal: FunctionError | None = None
    lock = threading.RLock()
    self._changed = threading.Condition(lock)
    self._woken = False
    self._idle = 0  # threads without a call
    self._handed: collections.deque[_Call] = collections.deque()  # calls for threads that were idle
    self._called = threading.Condition(lock)
    self._loop = EventLoop()

  def submit(
    self,
    key: Hashable,
    work: Callable[[], Any],
    limit_s: float,
    cleanup: Callable[[], Any] = lambda: None,
  ) -> None:
    """Adds a call.

    Args:
      key: names it in its outcome.
      work: the call; what it returns is awaited if it is awaitable.
      limit_s: seconds that it may take from its beginning, not counting the wait for a worker.
      cleanup: called on the same thread if the call returns after it was abandoned.
    """
    with self._changed:
      self._waiting.append(_Call(key, work, limit_s, cleanup))
      self._start()

  def poll(self) -> list[Outcome]:
    """Returns the outcomes since the last poll, in the order in which calls ended.

    Raises:
      FunctionError: a call raised this, or KeyboardInterrupt or the like.
      RunError: too many calls hang.
    """
    with self._changed:
      self._abandon()
      if fatal := self._fatal:
        self._fatal = None
        raise fatal
      if self._hanging > MAX_HANGING:
        raise RunError(
          f"{self._hanging} calls of the environment hang beyond env.step_timeout_s; give what "
          "they wait for a time limit, and resume the run"
        )
      outcomes, self._outcomes = self._outcomes, []
    return outcomes

  def limit(self, key: Hashable, limit_s: float) -> None:
    """Sets the limit of a call that runs: seconds from now, `math.inf` for none."""
    with self._changed:
      for call in self._running:
        if call.key == key:
          call.limit_s = time.monotonic() - call.began + limit_s
      self._changed.notify_all()

  def wake(self) -> None:
    """Ends the current or the next `wait`; called on any thread."""
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def wait(self, timeout_s: float) -> None:
    """Waits until a poll has outcomes, at most `timeout_s` seconds, and not if no call runs."""
    until = time.monotonic() + timeout_s
    with self._changed:
      while self._running and not (self._outcomes or self._fatal or self._woken):
        limit = min(call.began + call.limit_s for call in self._running)
        left = min(until, limit) - time.monotonic()
        if left < 0:
          break
        self._changed.wait(left + 0.001)
      self._woken = False

  def _start(self) -> None:
    """Starts calls as long as there are free workers."""
    while self._waiting and len(self._running) < self._count:
      call = self._waiting.popleft()
      call.began = time.monotonic()
      self._running.add(call)
      if self._idle:
        self._idle -= 1
        self._handed.append(call)
        self._called.notify()
      else:
        # A daemon, so that a call that hangs cannot keep the program from ending.
        work = threading.Thread(target=self._work, args=(call,), name="gtpo environment")
        work.daemon = True
        work.start()

  def _work(self, call: _Call) -> None:
    """Runs a call, and the next ones; on a thread of its own."""
    while self._run(call):
      with self._called:
        if not self._called.wait_for(lambda: self._handed, IDLE_S):
          self._idle -= 1
          return
        call = self._handed.popleft()

  def _run(self, call: _Call) -> bool:
    """Runs a call; returns whether its thread may run another one."""
    value = fatal = None
    error = details = ""
    try:
      value = call.work()
      if inspect.isawaitable(value):
        call.future = self._loop.start(value)
        value = call.future.result()
    except FunctionError as raised:
      fatal = raised
    except (Exception, SystemExit, asyncio.CancelledError) as raised:  # the user's code
      value = None
      error = described(raised)
      details = escape_controls(traceback.format_exc())
    except BaseException as raised:
      fatal = FunctionError(f"an environment raised {described(raised)}, which ends the run")
    with self._changed:
      abandoned = call not in self._running
      if abandoned:
        self._hanging -= 1
      else:
        self._running.remove(call)
        self._outcomes.append(call.outcome(value, error, details))
        self._idle += 1
      self._fatal = self._fatal or fatal
      self._start()
      self._changed.notify_all()
    if abandoned:
      with contextlib.suppress(Exception):
        call.cleanup()
    return not abandoned

  def _abandon(self) -> None:
    """Abandons the calls that have exceeded their limits, and starts others in their place."""
    now = time.monotonic()
    late = [call for call in self._running if now - call.began > call.limit_s]
    for call in late:
      self._running.remove(call)
      self._hanging += 1
      self.abandoned += 1
      self._outcomes.append(call.outcome()._replace(hangs=True))
      if call.future:
        self._loop.cancel(call.future)
    self._start()
