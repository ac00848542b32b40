"""Checks that may hang, in worker processes that can be killed. Nothing here knows what is checked, but for the default check.

A worker is a fresh interpreter that runs this file as a script (`python -P pool.py ...`): neither a fork, which a parent with JAX
and its threads would not survive, nor multiprocessing's spawn, which imports the parent's main module and so JAX again. It imports
the standard library and the check, nothing of gtpo_jax; hence no import of this package in this file.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

START_LIMIT_S = 60.0  # to import SymPy on a busy machine; not counted as time of a check
GRACE_S = (
  1.0  # the worker ends itself this long after the limit, where no parent is left to kill it
)
REQUEST_BYTES = 32_768  # below the 64 KiB of a pipe, so that writing a request never blocks
_VERDICTS = {b"1": True, b"0": False, b"?": None}
_log = logging.getLogger(__name__)
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
  """At most `workers` processes that run `check(gold, answer) -> bool | None`, each check under one wall-clock limit.

  The first check starts the first worker, and more start only while all are busy. A worker that hangs or dies costs the check it
  had, whose verdict is None, and is replaced. Every method may be called from any thread; a closed pool starts again when used.
  Workers end with their parent, also where it is killed, and do not hear Ctrl-C.

  Args:
    workers: processes; by default the cores this process may use, at most 8.
    timeout_s: seconds a check may take, from the moment a worker has it. Waiting for a worker to be free is not counted.
    check: "module:function", importable in a fresh interpreter with this one's sys.path; by default `equal_by_math_verify`.
    memory_mb: MiB of address space of a worker (1 MiB = 2**20 bytes); a check that needs more ends without a verdict.
  """

  def __init__(
    self, workers: int | None = None, timeout_s: float = 5.0, check: str = "", memory_mb: int = 2048
  ):
    if workers is not None and workers < 1:
      raise ValueError(f"workers must be at least 1, got {workers}")
    if not 0 < timeout_s <= 86_400:
      raise ValueError(f"timeout_s must be in (0, 86400], got {timeout_s}")
    self.workers = workers or min(8, _cores())
    self.timeout_s = timeout_s
    self.check_name = check
    self.memory_mb = memory_mb
    self._lock = threading.Lock()
    self._forget()
    _pools.add(self)

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def submit(self, gold: str, answer: str, timeout_s: float | None = None) -> Future[bool | None]:
    """The verdict to come. Its `result()` never raises; None where no verdict was reached."""
    future: Future[bool | None] = Future()
    limit = timeout_s or self.timeout_s
    request = json.dumps([gold, answer, limit]).encode() + b"\n"  # ASCII, whatever the text holds
    if len(request) > REQUEST_BYTES:
      future.set_result(None)
      return future
    with self._lock:
      self._pending += 1
      if self._pending > len(self._threads) < self.workers:
        self._threads.append(
          threading.Thread(
            target=self._own, args=(self._jobs, self._closed, self._alive), daemon=True
          )
        )
        self._threads[-1].start()
      self._jobs.put((future, request, limit))
    return future

  def check(self, gold: str, answer: str, timeout_s: float | None = None) -> bool | None:
    """The verdict, waited for."""
    return self.submit(gold, answer, timeout_s).result()

  def check_all(
    self, pairs: Iterable[tuple[str, str]], timeout_s: float | None = None
  ) -> list[bool | None]:
    """The verdicts of (gold, answer) pairs in their order, checked side by side."""
    return wait_all([self.submit(gold, answer, timeout_s) for gold, answer in pairs])

  def pids(self) -> list[int]:
    """Process ids of the workers that live."""
    with self._lock:
      return [worker.process.pid for worker in self._alive]

  def close(self) -> None:
    """Ends all workers. What is being checked or waits gets the verdict None."""
    with self._lock:
      threads = self._threads
      jobs = self._jobs
      alive = list(self._alive)
      self._closed.set()
      self._forget()
    with contextlib.suppress(queue.Empty):
      while True:
        _resolve(jobs.get_nowait()[0], None)
    for _ in threads:
      jobs.put(None)
    for worker in alive:
      worker.kill()
    for thread in threads:
      if thread is not threading.current_thread():
        thread.join(5.0)

  def _forget(self) -> None:
    """The state of a pool without workers; what a closed pool and its threads still hold is the former life's."""
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []
    self._alive: set[_Worker] = set()
    self._closed = threading.Event()
    self._pending = self._failures = 0

  def _own(self, jobs: queue.SimpleQueue, closed: threading.Event, alive: set[_Worker]) -> None:
    """One thread owns one worker: it alone writes to it, reads from it and replaces it."""
    worker = None
    while (job := jobs.get()) is not None:
      future, request, limit = job
      verdict = None
      if not closed.is_set() and future.set_running_or_notify_cancel():
        try:
          if (
            worker is None or worker.process.poll() is not None
          ):  # one that died between two checks costs none
            worker = self._start(worker, closed, alive)
          verdict = worker.ask(request, limit) if worker else None
        except Exception:  # of any kind, since a future left open would hang its caller
          worker = self._end(worker, alive)
      with self._lock:
        self._pending -= jobs is self._jobs  # of this life of the pool, not of one that was closed
      _resolve(future, verdict)
    self._end(worker, alive)

  def _start(
    self, dead: _Worker | None, closed: threading.Event, alive: set[_Worker]
  ) -> _Worker | None:
    """A worker that has said it is ready, or None; after three failures in a row no more is tried until the pool is closed."""
    self._end(dead, alive)
    if self._failures >= 3:
      return None
    worker = _Worker(self.check_name, self.memory_mb)
    with self._lock:
      alive.add(worker)
    try:
      if closed.is_set():
        raise EOFError("the pool was closed")
      reply = worker.read(time.monotonic() + START_LIMIT_S)
      if reply != b"ready":
        raise EOFError(reply.decode(errors="replace"))
    except (OSError, EOFError) as error:
      self._failures += not closed.is_set()
      if self._failures == 3:
        _log.error("checks have no verdict: their worker does not start (%s)", error)
      return self._end(worker, alive)
    self._failures = 0
    return worker

  def _end(self, worker: _Worker | None, alive: set[_Worker]) -> None:
    if worker:
      worker.kill()
      worker.release()
      with self._lock:
        alive.discard(worker)


class _Worker:
  """One process with the pipes to and from it, used by one thread; `kill` alone may come from another."""

  def __init__(self, check: str, memory_mb: int):
    command = [
      sys.executable,
      "-P",
      str(Path(__file__).resolve()),
      str(os.getpid()),
      str(memory_mb),
      check,
      json.dumps(sys.path),
    ]
    self.process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
      start_new_session=True,
    )  # a terminal's Ctrl-C does not reach another session

  def ask(self, request: bytes, limit_s: float) -> bool | None:
    """The verdict; raises EOFError or OSError where the process died, TimeoutError after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    os.write(self.process.stdin.fileno(), request)
    return _VERDICTS[self.read(deadline)]

  def read(self, deadline: float) -> bytes:
    """One line without its end."""
    pipe = self.process.stdout.fileno()
    line = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not line.endswith(b"\n"):
      if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError
      part = os.read(pipe, 4096)
      if not part:
        raise EOFError("it died")
      line += part
    return line.strip()

  def kill(self) -> None:
    """Ends the process and what it started."""
    if self.process.poll() is None:
      with contextlib.suppress(OSError):
        os.killpg(self.process.pid, signal.SIGKILL)
      self.process.wait()

  def release(self) -> None:
    """Closes the pipes; the owner's part, so that no other thread sees their numbers used again."""
    self.process.stdin.close()
    self.process.stdout.close()


_shared: dict[int, Pool] = {}
_shared_lock = threading.Lock()


def shared_pool(workers: int | None = None) -> Pool:
  """The pool that all callers asking for this many workers share."""
  with _shared_lock:
    if (key := workers or 0) not in _shared:
      _shared[key] = Pool(workers)
    return _shared[key]


def wait_all(verdicts: Iterable[bool | Future | None]) -> list[bool | None]:
  """The verdicts, waited for where they are still to come."""
  verdicts = list(verdicts)
  try:
    return [verdict.result() if isinstance(verdict, Future) else verdict for verdict in verdicts]
  finally:  # an interrupt leaves nothing behind in the queue; a future that is done takes no notice
    for verdict in verdicts:
      if isinstance(verdict, Future):
        verdict.cancel()


def close_pools() -> None:
  """Closes every pool of this process; also done at its end."""
  for pool in list(_pools):
    pool.close()


def _after_fork() -> None:
  """A forked child starts with empty pools: the workers, the threads and whoever held a lock stayed with its parent."""
  global _shared_lock
  _shared_lock = threading.Lock()
  for pool in list(_pools):
    pool._lock = threading.Lock()
    pool._forget()


def _resolve(future: Future, verdict: bool | None) -> None:
  if not future.done():
    future.set_result(verdict)


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


atexit.register(close_pools)
os.register_at_fork(after_in_child=_after_fork)


# What follows runs in a worker.


def equal_by_math_verify(gold: str, answer: str) -> bool | None:
  """Whether two LaTeX expressions are equivalent for math-verify (github.com/huggingface/Math-Verify).

  False also where it cannot read the answer; None where it cannot read the gold, since then nothing was compared. Its own limits
  are off: they raise in threads, do not end C code, and their failures look like wrong answers.
  """
  from math_verify import LatexExtractionConfig, parse, verify

  read = lambda text: parse(
    f"${text}$",
    [LatexExtractionConfig()],
    fallback_mode="no_fallback",
    parsing_timeout=None,
    raise_on_error=True,
  )
  target = read(gold)
  return (
    bool(verify(target, read(answer), timeout_seconds=None, raise_on_error=True))
    if target
    else None
  )


def _load(name: str) -> Callable[[str, str], bool | None]:
  if name:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)
  equal_by_math_verify("\\sqrt{8}+x", "x+2\\sqrt{2}")  # builds the tables of the parser
  return equal_by_math_verify


def _listen(parent: int, requests: queue.SimpleQueue) -> None:
  """Passes lines on; ends the process with its parent, whose death shows as the end of file, or, if a fork holds the pipe, as
  another parent's id."""
  buffer = b""
  while True:
    if select.select([0], [], [], 1.0)[0]:
      part = os.read(0, 65_536)
      if not part:
        os._exit(0)
      *lines, buffer = (buffer + part).split(b"\n")
      for line in lines:
        requests.put(line)
    elif os.getppid() != parent:
      os._exit(0)


def _serve(parent: int, memory_mb: int, check_name: str, path: list[str]) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_SETMASK, [])
  verdicts = os.dup(1)
  os.dup2(2, 1)  # what a library prints must not be read as a verdict
  sys.path[:] = path
  requests: queue.SimpleQueue = queue.SimpleQueue()
  threading.Thread(target=_listen, args=(parent, requests), daemon=True).start()
  try:
    check = _load(check_name)
  except Exception as error:
    os.write(
      verdicts,
      f"{type(error).__name__}: {error}".replace("\n", " ").encode(errors="replace")[:1000] + b"\n",
    )
    return
  with contextlib.suppress(
    ImportError, ValueError, OSError
  ):  # a bound the system does not know is no reason to stop
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20,) * 2)
  os.write(verdicts, b"ready\n")
  while True:
    gold, answer, limit = json.loads(requests.get())
    signal.setitimer(
      signal.ITIMER_REAL, limit + GRACE_S
    )  # the kernel's, so that it also ends C code that holds the GIL
    try:
      verdict = check(gold, answer)
    except Exception:
      verdict = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.write(verdicts, b"?\n" if verdict is None else b"1\n" if verdict else b"0\n")


if __name__ == "__main__":
  _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
