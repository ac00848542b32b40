"""Connects the processes of a run, within a time limit. Importing this module imports no JAX."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

from gtpo_jax.runtime.cluster.launchers import (
  ADDRESS,
  COUNT,
  INDEX,
  Launch,
  find_launch,
  has_tpu,
  local_gpus,
)
from gtpo_jax.runtime.errors import RunError, UserError, first_line

TIMEOUT = "GTPO_JOIN_TIMEOUT_S"
# A process waits this long for the others. Hosts may need 10 minutes or more to pull an image.
JOIN_TIMEOUT_S = 1200
NOTICE_S = 60  # after which a process says what it waits for
CONNECT_TIMEOUT_S = 3


def join_processes() -> None:
  """Connects the processes of this run if a launcher has started several.

  `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` override what a launcher says;
  `JAX_NUM_PROCESSES=1` runs a process alone. If not all processes have joined after
  `GTPO_JOIN_TIMEOUT_S` seconds, each of them prints one line and exits with status 1.

  Raises:
    UserError: the variables contradict one another, or are incomplete.
    RunError: JAX could not connect the processes, or sees fewer or more than were started.
  """
  timeout = join_timeout()
  launch = find_launch()
  if launch is None or launch.count == 1:
    if has_tpu():
      _check_count(1, "nothing says that this process is one of several")
    return
  import jax

  # At its own time limit JAX aborts the process with a stack trace, so ours must be reached first.
  options = {"local_device_ids": local_gpus(launch), "initialization_timeout": 2 * timeout + 60}
  if launch.address:
    options["coordinator_address"] = launch.address
    options["num_processes"] = launch.count
    options["process_id"] = launch.index
    options["cluster_detection_method"] = "deactivate"
  with _time_limit(launch, timeout):
    try:
      jax.distributed.initialize(**options)
    except Exception as error:
      # JAX does not recognise the launcher, or would ask Open MPI 5 through mpi4py.
      if isinstance(error, ValueError) or "requires mpi4py" in str(error):
        raise UserError(
          f"{launch.launcher} has started {launch.count} processes, but JAX cannot tell where the "
          f"first one is ({first_line(error)}); set {ADDRESS}=HOST:PORT in every process, with a "
          f"free port of the first process's host"
        ) from error
      raise RunError(  # for example, the port is already in use
        f"{launch}: JAX could not connect the processes ({first_line(error)}); "
        f"{launch.advice(_found_address())}"
      ) from error
  _check_count(launch.count, f"{launch.launcher} has started {launch.count}")


def join_timeout() -> int:
  """Returns the seconds for which processes wait for each other at the start of a run."""
  text = os.environ.get(TIMEOUT) or str(JOIN_TIMEOUT_S)
  if not text.isdigit() or int(text) < 1:
    raise UserError(f"{TIMEOUT} must be a whole number of seconds, at least 1; got {text!r}")
  return int(text)


@contextlib.contextmanager
def _time_limit(launch: Launch, timeout: int) -> Iterator[None]:
  """Exits with status 1 and one line if the body takes longer than `timeout` seconds.

  After `NOTICE_S` seconds one line says what it waits for.
  """

  def say(what: str, end: str) -> None:
    advice = launch.advice(_found_address())
    print(f"gtpo: {launch}: {what}; {advice}{end}", file=sys.stderr, flush=True)

  def end() -> None:
    address = launch.address or _found_address() or launch.expected
    what = f"not all processes joined within {timeout} s"
    if launch.index and address and not _answers(address):
      what = f"cannot reach the first process at {address} within {timeout} s"
    say(what, f", or raise {TIMEOUT}")
    os._exit(1)  # the main thread waits in JAX

  notice = lambda: say(f"waiting for the others, for up to {timeout} s", "")
  timers = [threading.Timer(timeout, end)]
  timers += [threading.Timer(NOTICE_S, notice)] if timeout > NOTICE_S else []
  for timer in timers:
    timer.daemon = True
    timer.start()
  try:
    yield
  finally:
    for timer in timers:
      timer.cancel()


def _found_address() -> str | None:
  """Returns host:port of the first process, if JAX has found it."""
  state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
  return getattr(state, "coordinator_address", None)


def _answers(address: str) -> bool:
  """Whether something listens at host:port."""
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
  except OSError:
    return False
  return True


def _check_count(expected: int, reason: str) -> None:
  """Raises RunError if the number of processes that JAX sees is not `expected`."""
  import jax

  if (found := jax.process_count()) != expected:
    raise RunError(
      f"JAX sees {found} process(es), but {reason}; set {ADDRESS}, {COUNT} and {INDEX} in every "
      f"process, or restart all hosts"
    )
