"""A pool of killable worker processes for checks that may hang.

A worker is a fresh interpreter that runs `check_worker.py` as a script. A fork would be unsafe in a
process with JAX's threads, and a process spawned by multiprocessing would import the parent's main
module, and with it JAX.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("check_worker.py")
START_LIMIT_S = 60.0  # for a worker to import SymPy on a busy machine; not part of a check's time
JOIN_LIMIT_S = 5.0  # longest wait for each thread when a pool is closed
MAX_TIMEOUT_S = 86_400
MAX_DEFAULT_WORKERS = 8
MAX_FAILED_STARTS = 3  # in a row; after that, the pool starts no worker until it is closed
REQUEST_BYTES = 2**23  # a longer request gets no verdict
READ_BYTES = 4096
_VERDICTS = {b"1": True, b"0": False, b"?": None}
Verdict = bool | float | None
_log = logging.getLogger(__name__)
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
  """At most `workers` processes that run `check(gold, answer) -> bool | float | None`.

  Each check has a wall-clock limit. The first check starts the first worker; more start only while
  all are busy. A worker that hangs or dies is replaced and costs only its current check, which gets
  the verdict None. Every method may be called from any thread. A closed pool starts again when it
  is used. Workers end with their parent, even if it is killed, and ignore Ctrl-C.

  Args:
    workers: number of processes; by default the cores this process may use, at most 8.
    timeout_s: time limit in seconds of a check, counted from when a worker receives it. Waiting for
      a free worker is not counted.
    check: "module:function", importable in a fresh interpreter with this one's sys.path; by
      default `check_worker.equal_by_math_verify`.
    memory_mb: address space of a worker in MiB (2**20 bytes). A check that needs more ends without
      a verdict.

  Raises:
    ValueError: workers or timeout_s is out of bounds.
  """

  def __init__(
    self, workers: int | None = None, timeout_s: float = 5.0, check: str = "", memory_mb: int = 2048
  ):
    if workers is not None and workers < 1:
      raise ValueError(f"workers must be at least 1, got {workers}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
      raise ValueError(f"timeout_s must be in (0, {MAX_TIMEOUT_S}], got {timeout_s}")
    self.workers = workers or min(MAX_DEFAULT_WORKERS, _cores())
    self.timeout_s = timeout_s
    self.check_name = check
    self.memory_mb = memory_mb
    self._lock = threading.Lock()
    self._reset()
    _pools.add(self)

  def __enter__(self) -> WorkerPool:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def submit(self, gold: str, answer: str, timeout_s: float | None = None) -> Future[Verdict]:
    """Starts a check.

    Returns:
      A future of the verdict, or of None if no verdict is reached. `result()` raises no error of
      the check.
    """
    future: Future[Verdict] = Future()
    limit_s = timeout_s or self.timeout_s
    request = json.dumps([gold, answer, limit_s]).encode() + b"\n"  # all ASCII: JSON escapes others
    if len(request) > REQUEST_BYTES:
      future.set_result(None)
      return future
    with self._lock:
      self._pending += 1
      if self._pending > len(self._threads) < self.workers:
        state = (self._jobs, self._closed, self._alive)
        self._threads.append(threading.Thread(target=self._run_worker, args=state, daemon=True))
        self._threads[-1].start()
      self._jobs.put((future, request, limit_s))
    return future

  def close(self) -> None:
    """Ends all workers. Checks that are running or queued get the verdict None."""
    with self._lock:
      threads = self._threads
      jobs = self._jobs
      alive = list(self._alive)
      self._closed.set()
      self._reset()
    with contextlib.suppress(queue.Empty):
      while True:
        _resolve(jobs.get_nowait()[0], None)
    for _ in threads:
      jobs.put(None)
    for worker in alive:
      worker.kill()
    for thread in threads:
      if thread is not threading.current_thread():
        thread.join(JOIN_LIMIT_S)

  def _reset(self) -> None:
    """Resets the pool to having no workers.

    Threads that were started earlier keep their own queue, event and set.
    """
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []
    self._alive: set[_Worker] = set()
    self._closed = threading.Event()
    self._pending = 0
    self._failed_starts = 0

  def _run_worker(
    self, jobs: queue.SimpleQueue, closed: threading.Event, alive: set[_Worker]
  ) -> None:
    """Runs jobs on one worker. No other thread writes to, reads from or replaces this worker."""
    worker = None
    while (job := jobs.get()) is not None:
      future, request, limit_s = job
      verdict = None
      if not closed.is_set() and future.set_running_or_notify_cancel():
        try:
          # If the worker died between two checks, both still get their verdicts.
          if worker is None or worker.process.poll() is not None:
            worker = self._start(worker, closed, alive)
          verdict = worker.ask(request, limit_s) if worker else None
        except Exception:  # any error: an unresolved future would block its caller forever
          worker = self._end(worker, alive)
      with self._lock:
        self._pending -= jobs is self._jobs  # unless the pool was closed in the meantime
      _resolve(future, verdict)
    self._end(worker, alive)

  def _start(
    self, dead: _Worker | None, closed: threading.Event, alive: set[_Worker]
  ) -> _Worker | None:
    """Returns a worker that is ready, or None after MAX_FAILED_STARTS failures in a row."""
    self._end(dead, alive)
    if self._failed_starts >= MAX_FAILED_STARTS:
      return None
    worker = _Worker(self.check_name, self.memory_mb)
    with self._lock:
      alive.add(worker)
    try:
      if closed.is_set():
        raise EOFError("the pool was closed")
      reply = worker.read_line(time.monotonic() + START_LIMIT_S)
      if reply != b"ready":
        raise EOFError(reply.decode(errors="replace"))
    except (OSError, EOFError) as error:
      self._failed_starts += not closed.is_set()
      if self._failed_starts == MAX_FAILED_STARTS:
        _log.error("checks get no verdict: their worker does not start (%s)", error)
      return self._end(worker, alive)
    self._failed_starts = 0
    return worker

  def _end(self, worker: _Worker | None, alive: set[_Worker]) -> None:
    if worker:
      worker.kill()
      worker.close_pipes()
      with self._lock:
        alive.discard(worker)


class _Worker:
  """One process and its pipes. Used by one thread; only `kill` may be called from another."""

  def __init__(self, check: str, memory_mb: int):
    arguments = [str(os.getpid()), str(memory_mb), check, json.dumps(sys.path)]
    self.process = subprocess.Popen(
      [sys.executable, "-P", str(SCRIPT), *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
      env={**os.environ, "PYTHONHASHSEED": "0"},  # a check gives the same verdict in each worker
      start_new_session=True,  # a terminal's Ctrl-C does not reach another session
    )

  def ask(self, request: bytes, limit_s: float) -> Verdict:
    """Returns what the check returned.

    Raises:
      EOFError, OSError: the process died.
      TimeoutError: `limit_s` seconds have passed.
    """
    deadline = time.monotonic() + limit_s
    self._write(request, deadline)
    reply = self.read_line(deadline)
    return _VERDICTS[reply] if reply in _VERDICTS else float(reply)

  def _write(self, request: bytes, deadline: float) -> None:
    pipe = self.process.stdin.fileno()
    os.set_blocking(pipe, False)
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    while request:
      if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError
      request = request[os.write(pipe, request) :]

  def read_line(self, deadline: float) -> bytes:
    """Reads one line and strips it. Raises the same errors as `ask`."""
    pipe = self.process.stdout.fileno()
    line = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not line.endswith(b"\n"):
      if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError
      data = os.read(pipe, READ_BYTES)
      if not data:
        raise EOFError("the worker died")
      line += data
    return line.strip()

  def kill(self) -> None:
    """Kills the process and its process group."""
    if self.process.poll() is None:
      with contextlib.suppress(OSError):
        os.killpg(self.process.pid, signal.SIGKILL)
      self.process.wait()

  def close_pipes(self) -> None:
    """Closes the pipes.

    Only the thread that owns the worker may call this. Otherwise the thread could read from a
    descriptor that has been closed and reused.
    """
    self.process.stdin.close()
    self.process.stdout.close()


_shared: dict[int, WorkerPool] = {}
_shared_lock = threading.Lock()


def shared_pool(workers: int | None = None) -> WorkerPool:
  """Returns the pool shared by all callers that ask for this number of workers."""
  with _shared_lock:
    if (key := workers or 0) not in _shared:
      _shared[key] = WorkerPool(workers)
    return _shared[key]


def wait_all(verdicts: Iterable[Verdict | Future]) -> list[Any]:
  """Returns the verdicts in order, and waits for futures among them."""
  verdicts = list(verdicts)
  try:
    return [verdict.result() if isinstance(verdict, Future) else verdict for verdict in verdicts]
  finally:  # after an interrupt, nothing stays queued; cancelling a finished future has no effect
    for verdict in verdicts:
      if isinstance(verdict, Future):
        verdict.cancel()


def close_pools() -> None:
  """Closes every pool of this process. Also runs when the process exits."""
  for pool in list(_pools):
    pool.close()


def _after_fork() -> None:
  """Resets the pools in a forked child, since workers, threads and locks belong to the parent."""
  global _shared_lock
  _shared_lock = threading.Lock()
  for pool in list(_pools):
    pool._lock = threading.Lock()
    pool._reset()


def _resolve(future: Future, verdict: Verdict) -> None:
  if not future.done():
    future.set_result(verdict)


def _cores() -> int:
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


atexit.register(close_pools)
os.register_at_fork(after_in_child=_after_fork)
