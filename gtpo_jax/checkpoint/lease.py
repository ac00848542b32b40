"""The lock of a workdir in an object store, which has no file locks.

The lock is a folder of objects with rising numbers. The process that creates the next number holds
the lock; the store lets only one process create an object. The holder rewrites its object
regularly. An object that stays as it is for `LEASE_S` seconds belongs to a process that died, and
is succeeded. This needs no clock that several machines share.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from etils import epath

from gtpo_jax.runtime.errors import RunError, UserError
from gtpo_jax.runtime.paths import create_exclusively, storage_errors

FOLDER = "lock"
RENEW_S = 10.0  # seconds between two renewals
LEASE_S = 45.0  # seconds without a renewal after which the holder is taken to be dead
POLL_S = 1.0


class Lease:
  """A held lock.

  Args:
    folder: the folder of the lock's objects.
    number: the number of the held object.
  """

  def __init__(self, folder: epath.Path, number: int):
    self._folder = folder
    self._number = number
    self._lost = ""
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raises RunError if another process has taken the lock."""
    if self._lost:
      raise RunError(self._lost)

  def release(self) -> None:
    """Gives the lock up."""
    self._ended.set()
    self._thread.join()
    if not self._lost:
      with contextlib.suppress(Exception):  # the lease runs out by itself
        _object(self._folder, self._number).unlink()

  def _renew(self) -> None:
    while not self._ended.wait(RENEW_S):
      with contextlib.suppress(Exception):  # the store may be back before the lease runs out
        newest = max(_numbers(self._folder), default=self._number)
        if newest > self._number:
          self._lost = (
            f"another process has taken over workdir {str(self._folder.parent)!r}, because the "
            f"object store had no sign of this one for {LEASE_S:.0f} s"
          )
          return
        _object(self._folder, self._number).write_bytes(_owner())


@contextlib.contextmanager
def claim_lease(workdir: epath.Path, say: Callable[[str], None]) -> Iterator[Lease]:
  """Holds the lock of a workdir in an object store.

  If the last holder did not give the lock up, waits until it has been silent for `LEASE_S` seconds,
  except if it was a process of this machine that no longer exists.

  Args:
    workdir: the workdir.
    say: shows a message to the user.
  """
  with storage_errors(f"cannot write into workdir {str(workdir)!r}", UserError):
    lease = _acquire(workdir, say)
  try:
    yield lease
  finally:
    lease.release()


def _acquire(workdir: epath.Path, say: Callable[[str], None]) -> Lease:
  folder = workdir / FOLDER
  numbers = _numbers(folder)
  newest = max(numbers, default=0)
  if newest:
    _wait_for_death(_object(folder, newest), say)
  if not create_exclusively(_object(folder, newest + 1), _owner()):
    raise UserError(_in_use(workdir, _object(folder, newest + 1)))
  for number in numbers:
    _object(folder, number).unlink(missing_ok=True)
  return Lease(folder, newest + 1)


def _wait_for_death(file: epath.Path, say: Callable[[str], None]) -> None:
  """Returns when the holder of a lock's object is dead, and raises UserError if it is alive."""
  seen = _read(file)
  if seen is None or _died_here(seen):
    return
  say(
    f"workdir {str(file.parent.parent)!r} was not closed by {_name(seen)}: waiting "
    f"{LEASE_S:.0f} s for a sign of it"
  )
  end = time.monotonic() + LEASE_S
  asked_at = 0.0
  while asked_at < end:  # a process that was paused asks again before it takes over
    time.sleep(POLL_S)
    asked_at = time.monotonic()
    current = _read(file)
    if current is None:
      return
    if current != seen:
      raise UserError(_in_use(file.parent.parent, file))


def _in_use(workdir: epath.Path, file: epath.Path) -> str:
  return (
    f"workdir {str(workdir)!r} is in use by {_name(_read(file))}; "
    "wait until that ends, or name another workdir"
  )


def _died_here(data: bytes) -> bool:
  """Whether the holder was a process of this machine, since its start, that no longer exists."""
  with contextlib.suppress(ValueError, TypeError, KeyError):
    owner = json.loads(data)
    if owner["boot"] == _boot():
      return not os.path.exists(f"/proc/{int(owner['process'])}")
  return False


def _name(data: bytes | None) -> str:
  with contextlib.suppress(ValueError, TypeError, KeyError):
    owner = json.loads(data or b"")
    return f"process {owner['process']} on {owner['host']}"
  return "another process"


def _owner() -> bytes:
  """Returns the content of a lock's object, different at each call."""
  owner = {
    "process": os.getpid(),
    "host": platform.node(),
    "boot": _boot(),
    "renewal": uuid.uuid4().hex,
  }
  return json.dumps(owner).encode()


def _boot() -> str:
  """Returns an id of this machine, since its start, and of this container.

  If it is unknown, the id is another one at each call.
  """
  with contextlib.suppress(OSError):
    with open("/proc/sys/kernel/random/boot_id") as file:
      boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
  return str(uuid.uuid4())


def _read(file: epath.Path) -> bytes | None:
  try:
    return file.read_bytes()
  except FileNotFoundError:
    return None


def _numbers(folder: epath.Path) -> list[int]:
  return [int(entry.name) for entry in folder.glob("*") if entry.name.isdigit()]


def _object(folder: epath.Path, number: int) -> epath.Path:
  return folder / f"{number:08d}"
