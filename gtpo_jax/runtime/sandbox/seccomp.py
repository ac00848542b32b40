"""The seccomp filter of the sandbox, which blocks system calls that no program needs.

These calls reach other processes, other namespaces, the host's keys, or memory that no limit
counts.
"""

from __future__ import annotations

import functools
import platform
import struct
import sys
from typing import NamedTuple

# Blocked calls: name, number on x86_64, number on aarch64.
_BLOCKED = (
  ("ptrace", 101, 117),
  ("process_vm_readv", 310, 270),
  ("process_vm_writev", 311, 271),
  ("kcmp", 312, 272),
  ("mount", 165, 40),
  ("umount2", 166, 39),
  ("pivot_root", 155, 41),
  ("chroot", 161, 51),
  ("unshare", 272, 97),
  ("setns", 308, 268),
  ("add_key", 248, 217),
  ("request_key", 249, 218),
  ("keyctl", 250, 219),
  ("bpf", 321, 280),
  ("perf_event_open", 298, 241),
  ("userfaultfd", 323, 282),
  ("memfd_create", 319, 279),
  ("shmget", 29, 194),
  ("shmat", 30, 196),
  ("semget", 64, 190),
  ("msgget", 68, 186),
  ("mq_open", 240, 180),
  ("personality", 135, 92),
  ("fanotify_init", 300, 262),
  ("name_to_handle_at", 303, 264),
  ("open_by_handle_at", 304, 265),
  ("vmsplice", 278, 75),
)
# Newer blocked calls, which have the same number on every machine.
_BLOCKED_EVERYWHERE = (
  ("io_uring_setup", 425),
  ("io_uring_enter", 426),
  ("io_uring_register", 427),
  ("open_tree", 428),
  ("move_mount", 429),
  ("fsopen", 430),
  ("fsconfig", 431),
  ("fsmount", 432),
  ("fspick", 433),
  ("pidfd_getfd", 438),
  ("process_madvise", 440),
  ("mount_setattr", 442),
  ("memfd_secret", 447),
)
# The flags of clone3 are in memory that a filter cannot read. The call fails as unknown (ENOSYS),
# and the C library falls back to clone.
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{USER,PID,NET,IPC,UTS,CGROUP,NS,TIME}
_X32_BIT = 0x40000000  # set in the numbers of x32 calls: the same calls under other numbers


class _Machine(NamedTuple):
  audit_arch: int  # AUDIT_ARCH_*
  clone: int
  column: int  # in _BLOCKED


_MACHINES = {"x86_64": _Machine(0xC000003E, 56, 1), "aarch64": _Machine(0xC00000B7, 220, 2)}

# Instructions of classic BPF.
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
# Offsets in struct seccomp_data.
_CALL_NUMBER = 0
_ARCH = 4
_FIRST_ARGUMENT = 16
# Results of a filter.
_BLOCK = (_RETURN, 0, 0, 0x00050001)  # EPERM
_UNKNOWN = (_RETURN, 0, 0, 0x00050026)  # ENOSYS
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_KILL = (_RETURN, 0, 0, 0x80000000)


@functools.cache
def seccomp_filter() -> bytes:
  """Returns the filter as a BPF program; empty on a machine whose call numbers are not listed here.

  Blocked calls fail with EPERM, clone3 with ENOSYS. A call for another architecture kills the
  process. All other calls are allowed.
  """
  machine = _MACHINES.get(platform.machine())
  if machine is None or sys.byteorder != "little" or struct.calcsize("P") != 8:
    return b""
  numbers = [row[machine.column] for row in _BLOCKED]
  numbers += [number for _, number in _BLOCKED_EVERYWHERE]
  # An instruction is (code, jump if true, jump if false, operand).
  program = [
    (_LOAD, 0, 0, _ARCH),
    (_JUMP_EQUAL, 1, 0, machine.audit_arch),
    _KILL,
    (_LOAD, 0, 0, _CALL_NUMBER),
    (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
    _BLOCK,
  ]
  for number in numbers:
    program += [(_JUMP_EQUAL, 0, 1, number), _BLOCK]
  program += [
    (_JUMP_EQUAL, 0, 1, _CLONE3),
    _UNKNOWN,
    (_JUMP_EQUAL, 0, 3, machine.clone),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES),
    _BLOCK,
    _ALLOW,
  ]
  return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
