"""A sandbox for untrusted programs: bubblewrap, seccomp, and limits set inside. Linux only.

A program has a read-only copy of this interpreter, its standard library and the C libraries they
load; /dev/null, /dev/zero and /dev/urandom; and a private /tmp of 64 MiB. It has no access to other
files, /proc, the network, the environment, other processes, capabilities, or further user
namespaces. Its processes end with the run, at the latest at the wall-clock limit.

The sandbox does not protect against bugs in the kernel, side channels, or the load of a run within
its limits (16 processes and threads, `memory_mb`). The memory of all processes of a run together is
checked from outside every 50 ms, so it can exceed the limit by as much as they fill in that time.

This module runs any code; `rewards/code.py` runs programs with tests.
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
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType

from gtpo_jax.runtime.errors import UserError, first_line
from gtpo_jax.runtime.sandbox.seccomp import seccomp_filter
from gtpo_jax.runtime.sandbox.supervisor import MIB, RunResult, killed_at_exit, watch

PREFIX = "gtpo_sandbox_"
DEVICES = ("null", "zero", "urandom")
LIBRARY_PATH_FILE = ".libraries"  # contains the sandbox's value of LD_LIBRARY_PATH
LDD_TIMEOUT_S = 120
STALE_AFTER_S = 3600  # an unlocked folder older than this is left over from a killed process
# Parts of the standard library that programs do not need.
_LEFT_OUT = shutil.ignore_patterns(
  *str.split("test tests idlelib ensurepip lib2to3 tkinter turtledemo __phello__"),
  *str.split("site-packages dist-packages config-* *.opt-?.pyc *.a _sysconfigdata*"),
)
TMP_MIB = 64  # size of the private /tmp
MAX_PROCESSES = 16  # processes and threads; three of them are the sandbox's own
MAX_OPEN_FILES = 64
EXTRA_CPU_S = 2  # by which the CPU limit exceeds the wall-clock limit, which should apply first
PROBE_TIMEOUT_S = 5
PROBE_MEMORY_MB = 512
NOBODY = 65534
ADVICE = (
  "install bubblewrap (`apt install bubblewrap` or `conda install -c conda-forge bubblewrap`); in "
  "a container allow user namespaces: `docker run --security-opt seccomp=unconfined "
  "--security-opt apparmor=unconfined`, Kubernetes `seccompProfile: {type: Unconfined}`; on "
  "Ubuntu 24.04 `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)
# The first statements that run in the sandbox. The payload file begins with the public part. Its
# private part is read later, by a process that may know it.
BOOT = (
  "import sys,marshal,posix;f,n=map(int,sys.argv[1:]);"
  "c,x=marshal.loads(posix.pread(f,n,0));exec(c);enter(f,n,*x)"
)
_ISOLATION = str.split(
  f"--unshare-all --unshare-user --uid {NOBODY} --gid {NOBODY} --hostname sandbox "
  "--die-with-parent --new-session --cap-drop ALL "
  "--clearenv --setenv PATH /usr/bin:/bin --setenv HOME /tmp"
)


def run_inside(
  code: bytes,
  public: tuple,
  private: bytes,
  *,
  stdin: bytes = b"",
  timeout_s: float = 5,
  memory_mb: int = 512,
  allow_unsandboxed: bool = False,
) -> RunResult:
  """Runs trusted start-up code, and all processes that it forks, in a fresh sandbox.

  Args:
    code: marshalled code object that defines main(report_fd, payload_fd, private_at, *public). Main
      runs within the limits, in a process with memory that no other process can read. It writes its
      report to report_fd and ends.
    public: plain data, passed to main as arguments. Processes that main forks can read it.
    private: the bytes of the payload file from offset private_at on. Main should read them at a
      point where no other process can.
    stdin: bytes on the program's standard input.
    timeout_s: wall-clock seconds, counted from the start of main.
    memory_mb: MiB; limits the address space of each process, and the resident memory of all
      processes together.
    allow_unsandboxed: DANGEROUS. If no sandbox is available, run the program as this user, with
      this machine's files and network.

  Raises:
    UserError: no sandbox is available, and allow_unsandboxed is not set; the message says what to
      do.
    OSError: no process could be started.
  """
  problem = sandbox_problem()
  if problem and not allow_unsandboxed:
    raise UserError(f"no sandbox for programs: {problem}")
  command = None if problem else _sandbox_command()
  return _run(command, code, public, private, stdin, timeout_s, memory_mb)


@functools.cache
def sandbox_problem() -> str | None:
  """Returns one line on why programs cannot be sandboxed here and what to do, or None if they can.

  The first call in a process makes a trial run; later calls return the same result.
  """
  with _LOCK:
    try:
      _sandbox_command()
    except (OSError, UserError, subprocess.SubprocessError) as error:
      return first_line(error)
  return None


_LOCK = threading.Lock()


@functools.cache
def _sandbox_command() -> tuple[str, ...]:
  """Returns a command prefix for the sandbox, tested by a trial run."""
  if sys.platform != "linux":
    raise UserError(f"bubblewrap needs Linux, but this is {sys.platform}")
  bwrap = shutil.which("bwrap")
  if not bwrap:
    raise UserError(f"bwrap is not installed: {ADVICE}")
  root = root_filesystem()
  listing = subprocess.run(
    [bwrap, "--help"], capture_output=True, text=True, timeout=30, check=False
  )
  if listing.returncode:
    reason = " ".join(listing.stderr.split())[:200]
    raise UserError(f"{bwrap} does not start ({reason}): {ADVICE}")
  options = listing.stdout
  if "--size" not in options:
    raise UserError(f"bubblewrap 0.7 or later is needed, but {bwrap} is older")
  command = [*_drop_root(), bwrap, *_ISOLATION]
  command += ["--setenv", "LD_LIBRARY_PATH", (root / LIBRARY_PATH_FILE).read_text()]
  command += ["--ro-bind", str(root), "/"]
  for device in DEVICES:
    command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
  command += ["--size", str(TMP_MIB * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp"]

  variants = [[*command, "--disable-userns"]] if "--disable-userns" in options else []
  # --disable-userns fails if /proc/sys is read-only, as in most containers. The seccomp filter
  # blocks user namespaces too, so with the filter the option is not necessary.
  if seccomp_filter():
    variants.append(command)
  error = "no way to forbid user namespaces here: bubblewrap 0.8 or later is needed"
  probe = marshal.dumps(compile(_PROBE, "<probe>", "exec"))
  for variant in map(tuple, variants):
    result = _run(variant, probe, (), b"", b"", PROBE_TIMEOUT_S, PROBE_MEMORY_MB)
    if result.report == b"probe":
      return variant
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    error = lines[-1] if lines else f"the trial run ended with {result.ended_by}"
  raise UserError(f"bubblewrap cannot build its namespaces here ({error[:200]}): {ADVICE}")


def interpreter() -> str:
  """Returns the path of the Python executable itself, not of a virtual environment's link."""
  return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def root_filesystem() -> Path:
  """Copies the interpreter and the libraries it loads into a temporary folder, and returns it.

  The folder is removed at exit. A copy is needed because the sandbox's unprivileged user cannot
  read files in the home of a trainer that runs as root. Also, one mount is faster than forty.
  """
  _remove_stale()
  root = Path(tempfile.mkdtemp(prefix=PREFIX))
  lock = os.open(root, os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_SH)  # tells _remove_stale and systemd-tmpfiles that it is in use
  atexit.register(_remove, root, os.getpid())
  root.chmod(0o755)
  for name in ("dev", "tmp"):
    (root / name).mkdir()
  for name in DEVICES:
    (root / "dev" / name).touch()

  binaries = [interpreter()]
  # The folders of the interpreter, not those of a virtual environment.
  bases = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
  for folder in {sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")}:
    source = os.path.realpath(folder)
    shutil.copytree(source, str(root) + folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
    binaries += map(str, Path(folder, "lib-dynload").glob("*.so"))
  ldd = subprocess.run(
    ["ldd", *binaries], capture_output=True, text=True, timeout=LDD_TIMEOUT_S, check=False
  )
  libraries = sorted(set(re.findall(r"(?m)^\s+(?:\S+ => )?(/\S+) \(0x", ldd.stdout)))
  for path in (binaries[0], *libraries):
    Path(str(root) + path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, str(root) + path)
  library_folders = dict.fromkeys(os.path.dirname(path) for path in libraries)
  (root / LIBRARY_PATH_FILE).write_text(":".join(library_folders))
  return root


def _remove(root: Path, pid: int) -> None:
  if os.getpid() == pid:  # a forked child must not remove its parent's folder
    shutil.rmtree(root, ignore_errors=True)


def _remove_stale() -> None:
  """Removes folders that killed processes left: this user's, older than an hour, and unlocked."""
  for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
    with suppress(OSError):
      status = folder.stat(follow_symlinks=False)
      if status.st_uid != os.geteuid() or time.time() - status.st_mtime < STALE_AFTER_S:
        continue
      handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
      try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
      finally:
        os.close(handle)


def _drop_root() -> list[str]:
  """Returns a command prefix that switches from root to an unprivileged user; empty if not root.

  Process limits do not apply to root, and a program that runs as root owns the files of root.
  """
  if os.geteuid() != 0:
    return []
  setpriv = shutil.which("setpriv")
  if not setpriv:
    raise UserError("setpriv (util-linux) is needed to drop root privileges before programs run")
  return [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


_PROBE = """
def main(report, payload, private_at):
  import os
  assert not os.path.exists("/proc") and os.getuid() == 65534 and not os.access("/", os.W_OK), \\
    "the sandbox does not isolate"
  os.write(report, b"probe")
"""


def enter(payload, private_at, report, sandboxed, limits, code, public):
  """Hides this process's memory, sets the limits, reports that it is ready, and runs main.

  Only the source text of this function is sent to the sandbox, so it cannot use other names of this
  module. Memory is hidden before anything is forked.
  """
  import _signal  # signal would import enum, which takes longer than everything else here
  import os
  import resource

  if sandboxed:
    # PR_SET_DUMPABLE (4) = 0 forbids ptrace, process_vm_readv and pidfd_getfd on this process, even
    # without the seccomp filter.
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")
    hidden = _ctypes.call_function(prctl, (4, 0, 0, 0, 0)) == 0
    assert hidden, "this process's memory cannot be hidden"
  # Otherwise a program could raise KeyboardInterrupt in this process.
  _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
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


def _run(
  command: tuple[str, ...] | None,
  code: bytes,
  public: tuple,
  private: bytes,
  stdin: bytes,
  timeout_s: float,
  memory_mb: int,
) -> RunResult:
  """Runs the code once through `command`, or without a sandbox if `command` is None."""
  sandboxed = command is not None
  with ExitStack() as stack:
    report_fd, write_fd = os.pipe()
    report = stack.enter_context(open(report_fd, "rb", buffering=0))
    closing = stack.enter_context(ExitStack())
    closing.callback(os.close, write_fd)

    limits = _limits(timeout_s, memory_mb, sandboxed)
    arguments = (write_fd, sandboxed, limits, marshal.loads(code), public)
    front = marshal.dumps((_entrance(), arguments))
    payload = stack.enter_context(_temporary_file(front + private))
    source = stack.enter_context(_temporary_file(stdin))
    if sandboxed:  # reopened read-only, so that the program cannot write to this machine's disk
      source = stack.enter_context(open(f"/proc/self/fd/{source.fileno()}", "rb"))
    python = [interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", BOOT]
    python += [str(payload.fileno()), str(len(front))]
    fds = [payload.fileno(), write_fd]
    if sandboxed and seccomp_filter():
      rules = stack.enter_context(_temporary_file(seccomp_filter()))
      command = (*command, "--seccomp", str(rules.fileno()))
      fds.append(rules.fileno())

    process = subprocess.Popen(
      [*command, "--", *python] if sandboxed else python,
      stdin=source,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=fds,
      env={},
      cwd="/",
      bufsize=0,
      start_new_session=True,
    )
    stack.enter_context(killed_at_exit(process, sandboxed))
    closing.close()  # so that the report pipe closes when the trusted code ends
    return watch(process, report, timeout_s, memory_mb, sandboxed)


def _limits(timeout_s: float, memory_mb: int, sandboxed: bool) -> dict[str, int]:
  """Returns the resource limits, by RLIMIT name.

  The trusted code sets them in the sandbox. Outside, they would also count or limit this user's
  other processes.
  """
  limits = {
    "AS": int(memory_mb * MIB),
    "CPU": math.ceil(timeout_s) + EXTRA_CPU_S,
    "FSIZE": TMP_MIB * MIB,
    "NOFILE": MAX_OPEN_FILES,
    "CORE": 0,
  }
  return limits | {"NPROC": MAX_PROCESSES} if sandboxed else limits


def _temporary_file(content: bytes) -> io.BufferedRandom:
  """Returns a nameless file with this content, positioned at its beginning."""
  file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
  file.write(content)
  file.seek(0)
  return file
