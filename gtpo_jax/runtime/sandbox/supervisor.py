"""Supervises one run of the sandbox: reads its pipes, enforces its limits, and kills it."""

from __future__ import annotations

import io
import math
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
OUTPUT_LIMIT = 8 * MIB  # bytes of stdout or stderr; a run that writes more is killed
READ_BYTES = 65_536
PAGE_BYTES = 4096  # unit of /proc/PID/statm
START_LIMIT_S = 60.0  # from the launch to the ready message, when the run's own time starts
REAP_LIMIT_S = 10  # longest wait for the pipes of a killed run to close
MEMORY_CHECK_S = 0.05  # interval of the memory checks
READY = b"ready\n"  # the first thing the trusted code reports


@dataclass(frozen=True)
class RunResult:
  """How a run ended, and what it wrote.

  Attributes:
    ended_by: "report" if the trusted code reported or died; "timeout", "memory" or "output" if the
      run was killed at that limit; "start" if the trusted code never became ready.
    report: what the trusted code wrote to its own pipe after the ready message.
    stdout: at most OUTPUT_LIMIT bytes.
    stderr: at most OUTPUT_LIMIT bytes.
  """

  ended_by: str
  report: bytes
  stdout: bytes
  stderr: bytes


@contextmanager
def killed_at_exit(process: subprocess.Popen, sandboxed: bool) -> Iterator[None]:
  """Kills and reaps the process at the end of the context, also after an exception.

  When bubblewrap dies, the sandbox's first process dies with it, which ends all others in it.
  """
  try:
    yield
  finally:
    _kill(process, sandboxed)
    process.wait()
    process.stdout.close()
    process.stderr.close()


def _kill(process: subprocess.Popen, sandboxed: bool) -> None:
  if not sandboxed:
    with suppress(OSError):
      os.killpg(process.pid, 9)
  process.kill()


def watch(
  process: subprocess.Popen, report: io.FileIO, timeout_s: float, memory_mb: int, sandboxed: bool
) -> RunResult:
  """Reads the three pipes until the trusted code ends or a limit is exceeded.

  Then kills the process and reads the rest of the pipes.

  The time counts from the ready message. The memory is the private resident memory of the process
  and its descendants. Outside a sandbox, the process group is killed too.
  """
  received = {report: bytearray(), process.stdout: bytearray(), process.stderr: bytearray()}
  ended_by = ""
  deadline = time.monotonic() + START_LIMIT_S
  next_memory_check = math.inf  # finite once the trusted code is ready
  with selectors.PollSelector() as selector:
    for pipe in received:
      os.set_blocking(pipe.fileno(), False)
      selector.register(pipe, selectors.EVENT_READ)
    while selector.get_map():
      now = time.monotonic()
      if not ended_by and now >= deadline:
        ended_by = "timeout" if next_memory_check < math.inf else "start"
      if not ended_by and now >= next_memory_check:
        next_memory_check = now + MEMORY_CHECK_S
        ended_by = "memory" if _resident_bytes(process.pid) > memory_mb * MIB else ""
      if ended_by and process.returncode is None:
        _kill(process, sandboxed)
        process.wait()
        deadline = next_memory_check = now + REAP_LIMIT_S
      elif ended_by and now >= deadline:
        break  # a process has survived the kill; do not wait for it
      for key, _ in selector.select(max(0.0, min(deadline, next_memory_check) - now)):
        data = key.fileobj.read(READ_BYTES)
        if not data:
          selector.unregister(key.fileobj)
          ended_by = ended_by or ("report" if key.fileobj is report else "")
        elif len(received[key.fileobj]) + len(data) > OUTPUT_LIMIT:
          # Keep reading, so that no writer blocks, but store no more.
          ended_by = ended_by or "output"
        else:
          received[key.fileobj] += data
      if next_memory_check == math.inf and received[report].startswith(READY):
        deadline = time.monotonic() + timeout_s
        next_memory_check = time.monotonic() + MEMORY_CHECK_S
  if not received[report].startswith(READY):
    ended_by = "start"
  reported, stdout, stderr = map(bytes, received.values())
  return RunResult(ended_by, reported.removeprefix(READY), stdout, stderr)


def _resident_bytes(pid: int) -> int:
  """Returns the private resident memory of a process and its descendants.

  Processes that have ended in the meantime count as 0.
  """
  total = 0
  pids = [pid]
  while pids:
    folder = f"/proc/{pids.pop()}"
    with suppress(OSError, ValueError, IndexError):
      resident, shared = map(int, Path(folder, "statm").read_text().split()[1:3])
      total += (resident - shared) * PAGE_BYTES
      for thread in os.listdir(f"{folder}/task"):
        pids += map(int, Path(folder, "task", thread, "children").read_text().split())
  return total
