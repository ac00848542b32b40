"""A place for programs that nobody has read: bubblewrap, seccomp and limits set inside. Linux alone; knows nothing about tests.

What is inside: a read-only copy of this interpreter, its standard library and the C libraries they load; /dev/null, zero and urandom;
64 MiB of private /tmp. Not inside: any other file, /proc, the network, the environment, other processes, capabilities, further
user namespaces. A program's processes end with the run, at the latest at the wall-clock limit.

What this does not cover: faults of the kernel itself, side channels, and the load of a run within its limits (a core, `memory_mb`).
The memory of a run's processes together is watched every 50 ms from outside, so it can overshoot by what a core fills in that time.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import inspect
import io
import marshal
import math
import os
import platform
import re
import selectors
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from gtpo_jax.runtime.errors import UserError, first_line

MIB = 2**20
TMP_MIB = 64  # size of the private /tmp
OUTPUT_LIMIT = 8 * MIB  # bytes of stdout or stderr; a run that writes more is killed
PROCESSES = 16  # and threads; three of them are the sandbox's own
START_S = 60.0  # from the launch to the first sign of life; only then the program's own time runs
NOBODY = 65534
ADVICE = (
  "install bubblewrap (`apt install bubblewrap` or `conda install -c conda-forge bubblewrap`); in a container allow user "
  "namespaces: `docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined`, Kubernetes `seccompProfile: "
  "{type: Unconfined}`; on Ubuntu 24.04 `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
LEFT_OUT = shutil.ignore_patterns(
  "test",
  "tests",
  "idlelib",
  "ensurepip",
  "lib2to3",
  "tkinter",
  "turtledemo",
  "site-packages",
  "dist-packages",
  "config-*",
  "*.opt-?.pyc",
  "*.a",
  "_sysconfigdata*",
  "__phello__",
)
# The first step inside. What is public comes from the front of a file; the rest is read later, by the side that may know it.
BOOT = "import sys,marshal,posix;f,n=map(int,sys.argv[1:]);c,x=marshal.loads(posix.pread(f,n,0));exec(c);enter(f,n,*x)"

# Calls that no program needs and that reach other processes, other namespaces, the keys of the host, or memory no limit counts.
_NEW_NUMBERS = (
  425,
  426,
  427,
  428,
  429,
  430,
  431,
  432,
  433,
  438,
  440,
  442,
  447,
)  # io_uring, new mount calls, pidfd_getfd, ... on all
_REFUSED = {  # machine: audit name, clone, then: ptrace, process_vm_*, kcmp, mounts, namespaces, keys, bpf, perf, memfd, System V, mq
  "x86_64": (
    0xC000003E,
    56,
    (
      101,
      310,
      311,
      312,
      165,
      166,
      155,
      161,
      272,
      308,
      248,
      249,
      250,
      321,
      298,
      323,
      319,
      29,
      30,
      64,
      68,
      240,
      135,
      300,
      303,
      304,
      278,
    ),
  ),
  "aarch64": (
    0xC00000B7,
    220,
    (
      117,
      270,
      271,
      272,
      40,
      39,
      41,
      51,
      97,
      268,
      217,
      218,
      219,
      280,
      241,
      282,
      279,
      194,
      196,
      190,
      186,
      180,
      92,
      262,
      264,
      265,
      75,
    ),
  ),
}
_CLONE_NEW = 0x7E020080  # CLONE_NEW{USER,PID,NET,IPC,UTS,CGROUP,NS,TIME}
_CLONE3 = 435  # its flags lie in memory that a filter cannot read: refused as unknown, and the C library falls back on clone


@dataclass(frozen=True)
class Ended:
  """How a run ended."""

  how: str  # "report": the trusted part has spoken or died; "timeout", "memory", "output": killed; "start": it never ran
  report: bytes  # what the trusted part wrote on its own pipe after its sign of life
  out: bytes  # stdout, at most OUTPUT_LIMIT
  err: bytes  # stderr, at most OUTPUT_LIMIT


def run_inside(
  code: bytes,
  public: tuple,
  private: bytes,
  *,
  stdin: bytes = b"",
  timeout_s: float = 5,
  memory_mb: int = 512,
  allow_unsandboxed: bool = False,
) -> Ended:
  """Runs trusted start-up code in a fresh sandbox; what that code forks is held by the sandbox and killed with it.

  Args:
    code: marshalled code object that defines main(report_fd, payload_fd, private_at, *public). It runs within the limits, in a
      process whose memory no other can read; it writes what it has to report to report_fd and ends.
    public: what main takes; plain data. Anything forked later can read it.
    private: the bytes of the payload file from offset private_at on, for main to read when nobody else can.
    stdin: bytes on the program's standard input.
    timeout_s: wall-clock seconds, from when main begins.
    memory_mb: MiB, the address space of each process and the resident memory of all together.
    allow_unsandboxed: DANGEROUS where no sandbox can be had: the program then runs as this user, on this machine's files and network.

  Returns:
    How it ended. Raises UserError, with advice, where there is no sandbox and none was waived; OSError where no process starts.
  """
  problem = sandbox_problem()
  if problem and not allow_unsandboxed:
    raise UserError(f"no sandbox for programs: {problem}")
  return _run(None if problem else _sandbox(), code, public, private, stdin, timeout_s, memory_mb)


@functools.cache
def sandbox_problem() -> str | None:
  """Why programs cannot be sandboxed here, in one line with advice, or None where they can. Tried once a process."""
  with _LOCK:
    try:
      _sandbox()
    except (OSError, UserError, subprocess.SubprocessError) as error:
      return first_line(error)
  return None


_LOCK = threading.Lock()


@functools.cache
def _sandbox() -> tuple[str, ...]:
  """The command that leads into the sandbox, tried out; UserError where there is none."""
  if sys.platform != "linux":
    raise UserError(f"bubblewrap needs Linux, this is {sys.platform}")
  bwrap = shutil.which("bwrap")
  if not bwrap:
    raise UserError(f"bwrap is not installed: {ADVICE}")
  root = _runtime()
  options = subprocess.run(
    [bwrap, "--help"], capture_output=True, text=True, timeout=30, check=False
  ).stdout
  if "--size" not in options:
    raise UserError(f"bubblewrap 0.7 or later is needed, {bwrap} is older")
  command = [
    bwrap,
    "--unshare-all",
    "--unshare-user",
    "--uid",
    str(NOBODY),
    "--gid",
    str(NOBODY),
    "--hostname",
    "sandbox",
    "--die-with-parent",
    "--new-session",
    "--cap-drop",
    "ALL",
    "--clearenv",
    "--setenv",
    "PATH",
    "/usr/bin:/bin",
    "--setenv",
    "HOME",
    "/tmp",
    "--setenv",
    "LD_LIBRARY_PATH",
    (root / ".libraries").read_text(),
    "--ro-bind",
    str(root),
    "/",
  ]
  for device in ("null", "zero", "urandom"):
    command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
  command += ["--size", str(TMP_MIB * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]
  if (
    os.geteuid() == 0
  ):  # as root no process limit holds, and files owned by root would be the program's own
    drop = shutil.which("setpriv")
    if not drop:
      raise UserError("setpriv (util-linux) is needed to leave root before programs run")
    command = [drop, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *command]
  variants = [[*command, "--disable-userns"]] if "--disable-userns" in options else []
  if (
    _filter()
  ):  # which refuses user namespaces too, where /proc/sys is read-only as in most containers
    variants.append(command)
  error = "no way to forbid user namespaces here: bubblewrap 0.8 or later is needed"
  for variant in variants:
    ended = _run(
      tuple(variant), marshal.dumps(compile(_PROBE, "<probe>", "exec")), (), b"", b"", 5, 512
    )
    if ended.report == b"probe":
      return tuple(variant)
    error = (
      ended.err.decode(errors="replace").strip().splitlines()
      or [f"the trial ended with {ended.how}"]
    )[-1]
  raise UserError(f"bubblewrap cannot build its namespaces here ({error[:200]}): {ADVICE}")


_PROBE = """
def main(report, payload, private_at):
  import os
  assert not os.path.exists("/proc") and os.getuid() == 65534 and not os.access("/", os.W_OK), "the sandbox is not tight"
  os.write(report, b"probe")
"""


def enter(
  payload, private_at, report, sandboxed, limits, code, public
):  # runs inside, as its own text: nothing of ours is there
  """Sets the limits, hides this process's memory from those it will fork, says that it is ready, and runs the caller's main."""
  import _signal  # signal would load enum, which costs more than all the rest
  import os
  import resource

  if sandboxed:  # 4: PR_SET_DUMPABLE. No ptrace, no process_vm_readv, no pidfd_getfd, whatever the seccomp filter knows
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")
    assert _ctypes.call_function(prctl, (4, 0, 0, 0, 0)) == 0, (
      "this process's memory cannot be hidden"
    )
  _signal.signal(
    _signal.SIGINT, _signal.SIG_DFL
  )  # else a program could raise KeyboardInterrupt in here
  for name, value in limits.items():
    try:
      resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    except (ValueError, OSError):
      assert not sandboxed, f"the limit {name} cannot be set"
  os.write(report, b"ready\n")
  space = {}
  exec(code, space)
  space["main"](report, payload, private_at, *public)


@functools.cache
def _entrance() -> CodeType:
  return compile(inspect.getsource(enter), "<entrance>", "exec", dont_inherit=True)


def _interpreter() -> str:
  return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _run(
  prefix: tuple[str, ...] | None,
  code: bytes,
  public: tuple,
  private: bytes,
  stdin: bytes,
  timeout_s: float,
  memory_mb: int,
) -> Ended:
  """One run; without a prefix outside of any sandbox."""
  with ExitStack() as stack:
    report, write = os.pipe()
    report = stack.enter_context(open(report, "rb", buffering=0))
    closing = stack.enter_context(ExitStack())
    closing.callback(os.close, write)
    arguments = (
      write,
      prefix is not None,
      _limits(timeout_s, memory_mb, prefix is not None),
      marshal.loads(code),
      public,
    )
    front = marshal.dumps((_entrance(), arguments))
    payload = stack.enter_context(_file(front + private))
    source = stack.enter_context(_file(stdin))
    if prefix:  # a second door to the same file, that cannot write to this machine's disk
      source = stack.enter_context(open(f"/proc/self/fd/{source.fileno()}", "rb"))
    python = [
      _interpreter(),
      "-I",
      "-S",
      "-B",
      "-X",
      "utf8",
      "-c",
      BOOT,
      str(payload.fileno()),
      str(len(front)),
    ]
    fds = [payload.fileno(), write]
    if prefix and _filter():
      rules = stack.enter_context(_file(_filter()))
      prefix = (*prefix, "--seccomp", str(rules.fileno()))
      fds = [*fds, rules.fileno()]
    process = subprocess.Popen(
      [*prefix, "--", *python] if prefix else python,
      stdin=source,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=fds,
      env={},
      cwd="/",
      bufsize=0,
      start_new_session=True,
    )
    stack.enter_context(_ending(process, prefix is not None))
    closing.close()  # so that the end of the trusted part is the end of its pipe
    return _watch(process, report, timeout_s, memory_mb, prefix is not None)


@contextmanager
def _ending(process: subprocess.Popen, sandboxed: bool) -> Iterator[None]:
  """Kills and reaps whatever happens; the process ends the sandbox's first process with it, and that every other."""
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


def _watch(
  process: subprocess.Popen, report: io.FileIO, timeout_s: float, memory_mb: int, sandboxed: bool
) -> Ended:
  """Reads the three pipes until the trusted part has ended or a limit is passed, kills, and reads what is left in them."""
  found = {report: bytearray(), process.stdout: bytearray(), process.stderr: bytearray()}
  how = ""  # look: when to look at the memory; not before it is ready
  deadline = time.monotonic() + START_S
  look = math.inf
  with selectors.PollSelector() as selector:
    for pipe in found:
      os.set_blocking(pipe.fileno(), False)
      selector.register(pipe, selectors.EVENT_READ)
    while selector.get_map():
      now = time.monotonic()
      if not how and now >= deadline:
        how = "timeout" if look < math.inf else "start"
      if not how and now >= look:
        look = now + 0.05
        how = "memory" if _resident(process.pid) > memory_mb * MIB else ""
      if how and process.returncode is None:
        _kill(process, sandboxed)
        process.wait()
        deadline = look = now + 10
      elif how and now >= deadline:
        break  # something has outlived its killing: nobody waits for it
      for key, _ in selector.select(max(0.0, min(deadline, look) - now)):
        data = key.fileobj.read(65536)
        if not data:
          selector.unregister(key.fileobj)
          how = how or ("report" if key.fileobj is report else "")
        elif len(found[key.fileobj]) + len(data) > OUTPUT_LIMIT:
          how = how or "output"  # read on, so that nobody blocks, but keep no more
        else:
          found[key.fileobj] += data
      if look == math.inf and found[report].startswith(b"ready\n"):
        deadline = time.monotonic() + timeout_s
        look = time.monotonic() + 0.05
  if not found[report].startswith(b"ready\n"):
    how = "start"
  return Ended(
    how,
    bytes(found[report]).removeprefix(b"ready\n"),
    bytes(found[process.stdout]),
    bytes(found[process.stderr]),
  )


def _resident(pid: int) -> int:
  """Bytes of private resident memory of a process and all that descend from it; 0 for what has gone meanwhile."""
  total = 0
  left = [pid]
  while left:
    folder = f"/proc/{left.pop()}"
    with suppress(OSError, ValueError, IndexError):
      resident, shared = map(int, Path(folder, "statm").read_text().split()[1:3])
      total += (resident - shared) * 4096
      for thread in os.listdir(f"{folder}/task"):
        left += map(int, Path(folder, "task", thread, "children").read_text().split())
  return total


def _limits(timeout_s: float, memory_mb: int, sandboxed: bool) -> dict[str, int]:
  """Limits for the trusted part to set inside; set outside they would count, or bind, this user's other processes."""
  limits = {
    "AS": int(memory_mb * MIB),
    "CPU": math.ceil(timeout_s) + 2,
    "FSIZE": TMP_MIB * MIB,
    "NOFILE": 64,
    "CORE": 0,
  }
  return limits | {"NPROC": PROCESSES} if sandboxed else limits


def _file(content: bytes) -> io.BufferedRandom:
  """A nameless file, at its beginning."""
  file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
  file.write(content)
  file.seek(0)
  return file


@functools.cache
def _filter() -> bytes:
  """The seccomp program: refused calls fail with EPERM, all others pass. Empty for a machine whose call numbers are not listed."""
  if platform.machine() not in _REFUSED or sys.byteorder != "little" or struct.calcsize("P") != 8:
    return b""
  audit, clone, numbers = _REFUSED[platform.machine()]
  load = 0x20
  equal = 0x15
  at_least = 0x35
  any_bit = 0x45
  end = 0x06
  refuse = 0x00050001
  unknown = 0x00050026
  allow = 0x7FFF0000
  kill = 0x80000000
  rows = [
    (load, 0, 0, 4),
    (equal, 1, 0, audit),
    (end, 0, 0, kill),
    (load, 0, 0, 0),
    (at_least, 0, 1, 0x40000000),
    (end, 0, 0, refuse),
  ]  # x32 calls, the same kernel under other numbers
  for number in (*numbers, *_NEW_NUMBERS):
    rows += [(equal, 0, 1, number), (end, 0, 0, refuse)]
  rows += [
    (equal, 0, 1, _CLONE3),
    (end, 0, 0, unknown),
    (equal, 0, 3, clone),
    (load, 0, 0, 16),
    (any_bit, 0, 1, _CLONE_NEW),
    (end, 0, 0, refuse),
    (end, 0, 0, allow),
  ]
  return b"".join(struct.pack("<HBBI", *row) for row in rows)


@functools.cache
def _runtime() -> Path:
  """Copies the interpreter and what it loads into a folder that is the sandbox's whole file system; removed at exit.

  A copy, for a trainer that is root cannot show an unprivileged user what lies in its home, and one mount is faster than forty.
  """
  _sweep()
  root = Path(tempfile.mkdtemp(prefix="gtpo_sandbox_"))
  lock = os.open(root, os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_SH)  # says "in use", to _sweep and to systemd-tmpfiles
  atexit.register(_remove, root, os.getpid())
  root.chmod(0o755)
  for name in ("dev", "tmp"):
    (root / name).mkdir()
  for name in ("null", "zero", "urandom"):
    (root / "dev" / name).touch()
  binaries = [_interpreter()]
  bases = {
    "base": sys.base_prefix,
    "platbase": sys.base_exec_prefix,
  }  # those of the interpreter, not of a virtual environment
  for folder in {sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")}:
    shutil.copytree(
      os.path.realpath(folder), str(root) + folder, ignore=LEFT_OUT, dirs_exist_ok=True
    )
    binaries += map(str, Path(folder, "lib-dynload").glob("*.so"))
  listing = subprocess.run(
    ["ldd", *binaries], capture_output=True, text=True, timeout=120, check=False
  ).stdout
  libraries = sorted(set(re.findall(r"(?m)^\s+(?:\S+ => )?(/\S+) \(0x", listing)))
  for path in (binaries[0], *libraries):
    Path(str(root) + path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, str(root) + path)
  (root / ".libraries").write_text(
    ":".join(dict.fromkeys(os.path.dirname(path) for path in libraries))
  )
  return root


def _remove(root: Path, pid: int) -> None:
  if os.getpid() == pid:  # a forked child leaves its parent's folder alone
    shutil.rmtree(root, ignore_errors=True)


def _sweep() -> None:
  """Removes the folders of processes that were killed before they could: ours, an hour old, and locked by nobody."""
  for folder in Path(tempfile.gettempdir()).glob("gtpo_sandbox_*"):
    with suppress(OSError):
      status = folder.stat(follow_symlinks=False)
      if status.st_uid != os.geteuid() or time.time() - status.st_mtime < 3600:
        continue
      handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
      try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
      finally:
        os.close(handle)
