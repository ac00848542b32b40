"""Attacks on the sandbox, each with a judge who says "passed" if it works. Some are also run outside, where they must work."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gtpo_jax.rewards import sandbox
from gtpo_jax.rewards.code import OUTPUT_KEPT, run_code
from gtpo_jax.rewards.sandbox import sandbox_problem
from gtpo_jax.runtime.errors import UserError

SECRET = "canary-5d1f90c2"
TIMEOUT = 3
# What lies in the home, but for the folder where the interpreter may be
HOME = [
  str(path)
  for path in Path.home().glob("*")
  if not Path(sandbox._interpreter()).is_relative_to(path)
]
HOME += [
  str(path)
  for path in Path.home().glob(".*")
  if not Path(sandbox._interpreter()).is_relative_to(path)
]

# name: (program, what the reason begins with, whether the attack works outside a sandbox). attack() is true where it succeeds.
ATTACKS = {
  "read the host's users": (
    "def attack(): return 'root' in open('/etc/passwd').read()",
    "error: FileNotFoundError",
    True,
  ),
  "read the project": (
    "import os\ndef attack(): return os.listdir(PROJECT)",
    "error: FileNotFoundError",
    True,
  ),
  "read the home": (
    "import os\ndef attack(): return any(map(os.path.exists, HOME))",
    "failed",
    True,
  ),
  "read a canary": (
    "def attack(): return SECRET in open(CANARY).read()",
    "error: FileNotFoundError",
    True,
  ),
  "overwrite a file": (
    "def attack(): return open(CANARY, 'w').write('gone')",
    "error: FileNotFoundError",
    True,
  ),
  "delete a file": (
    "import os\ndef attack(): return os.remove(CANARY) is None",
    "error: FileNotFoundError",
    True,
  ),
  "environment": (
    "import os\ndef attack(): return any(SECRET in value for value in os.environ.values())",
    "failed",
    True,
  ),
  "environment of process 1": (
    "def attack(): return open('/proc/1/environ', 'rb').read()",
    "error: FileNotFoundError",
    False,
  ),
  "own process file": (
    "def attack(): return open('/proc/self/status').read()",
    "error: FileNotFoundError",
    True,
  ),
  "loopback socket": (
    "import socket\ndef attack(): return socket.create_connection(('127.0.0.1', PORT), 2)",
    "error: ",
    True,
  ),
  "outside socket": (
    "import socket\ndef attack(): return socket.create_connection(('1.1.1.1', 53), 2)",
    "error: OSError",
    False,
  ),
  "abstract socket": (
    """
        import socket
        def attack(): return socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT) is None""",
    "error: ConnectionRefused",
    True,
  ),
  "many processes": (
    """
        import os, time
        def attack():
          for i in range(100):
            if os.fork() == 0:
              time.sleep(60)
              os._exit(0)
          return True""",
    "error: BlockingIOError",
    False,
  ),
  "fork bomb": (
    """
        import os
        def attack():
          while True:
            try: os.fork()
            except OSError: pass""",
    "",
    False,
  ),
  "memory": ("def attack(): return bytearray(4 * 10**8)", "memory", True),
  "memory of many processes": (
    """
        import os, time
        def attack():
          for i in range(8):
            if os.fork() == 0:
              x = bytearray(80 * 2**20)
              for k in range(0, len(x), 4096): x[k] = 1
              time.sleep(60)
          time.sleep(60)""",
    "memory",
    False,
  ),
  "memory that no limit counts": (
    """
        import ctypes, os
        def attack():
          try: return os.memfd_create('x') >= 0
          except OSError: return ctypes.CDLL(None).shmget(0, 2**20, 0o1777) >= 0""",
    "failed",
    True,
  ),
  "flood of stdout": (
    """
        import os
        def attack():
          while True: os.write(1, b'x' * 65536)""",
    "output",
    False,
  ),
  "flood of stderr": (
    """
        import os
        def attack():
          while True: os.write(2, b'x' * 65536)""",
    "output",
    False,
  ),
  "ignored signals": (
    """
        import signal
        for number in range(1, 65):
          try: signal.signal(number, signal.SIG_IGN)
          except (OSError, ValueError): pass
        while True: pass""",
    "timeout",
    False,
  ),
  "orphans": (
    """
        import os, time
        def attack():
          for i in range(3):
            if os.fork() == 0:
              os.setsid()
              if os.fork() == 0: time.sleep(600)
              os._exit(0)
          return False""",
    "failed",
    False,
  ),
  "exit 0": ("import os\nos._exit(0)", "error: the program ended itself", True),
  "exit 0 when asked": (
    "import os\ndef attack(): os._exit(0)",
    "error: the program ended itself",
    True,
  ),
  "forged verdict": (
    """
        import os
        for fd in range(256):
          for word in (b'ready\\npassed\\n', b'passed\\n', b'PASSED\\n', b'0' * 32 + b'passed\\n'):
            try: os.write(fd, word)
            except OSError: pass
        os._exit(0)""",
    "error",
    True,
  ),
  "search of frames, heap and descriptors": (
    """
        import gc, os, sys
        def attack():
          mark, seen = 'stset-eht-fo-kram', []  # backwards, not to find itself
          frame = sys._getframe()
          while frame:
            seen += [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
            frame = frame.f_back
          for x in gc.get_objects():
            seen += [y for y in gc.get_referents(x) if isinstance(y, (str, bytes))]
          for fd in range(3, 256):
            try: seen.append(os.pread(fd, 10**6, 0))
            except OSError: pass
          return any(mark in str(x)[::-1] for x in seen if isinstance(x, (str, bytes, bytearray)))""",
    "failed",
    True,
  ),
  "patched builtins": (
    """
        import atexit, builtins, gc, os, sys
        builtins.AssertionError = builtins.exec = builtins.compile = builtins.bool = lambda *a, **k: True
        sys.exit = os._exit = builtins.exit = lambda *a: None
        atexit.register(os._exit, 0)
        sys.settrace(lambda *a: None)
        for x in gc.get_objects():
          if type(x).__name__ == 'function' and x.__name__ in ('judge', 'names_in', 'error'):
            x.__code__ = (lambda *a: 'passed').__code__
        for module in list(sys.modules.values()):
          for name in ('judge', 'compare', 'check', 'attack'):
            try: setattr(module, name, lambda *a, **k: 'passed')
            except Exception: pass
        def attack(): return 0""",
    "failed",
    False,
  ),
  "an object equal to all": (
    """
        class Any(int):
          __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True
          __sub__ = __rsub__ = __abs__ = lambda self, *other: 0
          __hash__ = int.__hash__
        class Other(Any.__base__.__base__):
          __eq__ = __lt__ = __contains__ = lambda self, other: True
          __sub__ = __rsub__ = __abs__ = __float__ = lambda self, *other: 0.0
          __hash__ = lambda self: 42
        def attack(): return False
        def answer(plain): return Any(1) if plain else Other()""",
    "failed",
    False,
  ),
  "shadowed builtins": (
    """
        def all(x): return True
        any = sorted = bool = isinstance = len = all
        def attack(): return []""",
    "failed",
    False,
  ),
  "a hostile answer": (
    """
        import os
        def attack():
          for text in ('1 T', '5 Veval', '5 q9999', '99999 l999999999', '21 l4 s3 s7 n u1 s4asksystem', '26 l2 s5 pvalue'):
            for fd in range(3, 10):
              try: os.write(fd, b'%016x' % len(text) + text.encode())
              except OSError: pass
          return 0""",
    "error",
    False,
  ),
  "ptrace": (
    """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def attack():
          word, parent = ctypes.create_string_buffer(8), os.getppid()
          class Vec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
          here, there = Vec(ctypes.addressof(word), 8), Vec(ctypes.addressof(word), 8)
          return (libc.ptrace(16, parent, 0, 0) == 0 or libc.ptrace(0x4206, parent, 0, 0) == 0
                  or libc.process_vm_readv(parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0)""",
    "failed",
    False,
  ),
  "namespaces and mounts": (
    """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def attack():
          return (libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0 or libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0
                  or libc.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0 or libc.syscall(435, 0, 0) >= 0
                  or libc.syscall(250, 0, -3, 1) >= 0)""",
    "failed",
    False,
  ),
  "writing outside /tmp": (
    """
        import os
        def attack():
          for folder in ('/', '/dev', '/dev/shm', '/usr', '/lib', '/etc', os.path.dirname(os.__file__)):
            try: open(folder + '/x', 'w').close()
            except OSError: pass
            else: return True
          return False""",
    "failed",
    False,
  ),
  "filling the disk": (
    """
        def attack():
          for i in range(40):
            open(f'/tmp/{i}', 'wb').write(b'x' * 2**22)
          return True""",
    "error: OSError",
    False,
  ),
  "crash of the interpreter": (
    """
        import ctypes, sys
        sys.setrecursionlimit(10**8)
        def attack(): ctypes.string_at(0)""",
    "error: the program ended with signal 11",
    False,
  ),
  "deep recursion": (
    """
        import sys
        sys.setrecursionlimit(10**8)
        def attack():
          x = []
          for i in range(10**5): x = [x]
          return repr(x)""",
    "",
    False,
  ),
  "setuid and devices": (
    """
        import os
        open('/tmp/x', 'w').close()
        def attack():
          for step in (lambda: os.setuid(0), lambda: os.setgroups([0]), lambda: os.chroot('/tmp'), lambda: os.chown('/tmp/x', 0, 0),
                       lambda: os.mknod('/tmp/d', 0o60600, os.makedev(254, 0)), lambda: os.nice(-5), lambda: os.chmod('/', 0o777),
                       lambda: __import__('socket').sethostname('x')):
            try: step()
            except OSError: pass
            else: return True
          return os.getuid() == 0""",
    "failed",
    False,
  ),
  "killing everybody": (
    """
        import os
        def attack():
          for pid in (1, os.getppid(), -1):
            try: os.kill(pid, 9)
            except OSError: pass
          return 0""",
    "error",
    False,
  ),
  "interrupting the judge": (
    "import os, time\ndef attack():\n  os.kill(os.getppid(), 2)\n  time.sleep(1)\n  return 0",
    "error",
    False,
  ),
  "stopping the judge": (
    "import os\ndef attack():\n  os.kill(os.getppid(), 19)\n  return 1",
    "timeout",
    False,
  ),
}


@dataclass
class Host:
  names: str
  canary: Path
  listeners: list

  def unharmed(self):
    assert self.canary.read_text() == SECRET and list(self.canary.parent.iterdir()) == [self.canary]
    for listener in self.listeners:
      with pytest.raises(BlockingIOError):
        listener.accept()
    end = time.monotonic() + 10
    while left := inside():
      assert time.monotonic() < end, f"still alive: {left}"
      time.sleep(0.01)


def inside():
  """The processes whose root is our sandbox's, or whose root we may not see."""
  root = sandbox._runtime().stat()
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      if sandbox.BOOT.encode() in Path("/proc", pid, "cmdline").read_bytes() and os.path.samestat(
        Path("/proc", pid, "root").stat(), root
      ):
        found.append(int(pid))
    except OSError:
      pass
  return found


@pytest.fixture
def host(monkeypatch):
  """A file and two listening sockets that anybody on this machine may use, and a secret in the environment."""
  monkeypatch.setenv("GTPO_SECRET", SECRET)
  with (
    tempfile.TemporaryDirectory() as folder,
    socket.create_server(("127.0.0.1", 0)) as tcp,
    socket.socket(socket.AF_UNIX) as unix,
  ):
    os.chmod(folder, 0o777)
    canary = Path(folder, "canary")
    canary.write_text(SECRET)
    canary.chmod(0o666)
    unix.bind(f"\0{folder}")
    unix.listen()
    for listener in (tcp, unix):
      listener.setblocking(False)
    values = {
      "CANARY": str(canary),
      "SECRET": SECRET,
      "PORT": tcp.getsockname()[1],
      "ABSTRACT": folder,
      "HOME": HOME,
      "PROJECT": str(Path(__file__).parents[2]),
    }
    yield Host(
      "".join(f"{name} = {value!r}\n" for name, value in values.items()), canary, [tcp, unix]
    )


def judge_of(name):
  if name == "an object equal to all":
    return (
      "a, b = answer(True), answer(False)\nfor wrong in (lambda: a == 2, lambda: b == 2, lambda: abs(a - 9) < 1, lambda: a < 0, "
      "lambda: abs(b - 9) < 1, lambda: b < 0, lambda: 2 in [b], lambda: b in {42}, lambda: 2 in b, lambda: b - 9 == 0.0):\n"
      "  try: assert not wrong()\n  except TypeError: pass\nassert attack()"
    )
  if name == "shadowed builtins":
    return "assert all(x == 1 for x in [2]) or sorted(attack()) == [1] or len(attack()) == 3"
  return "'mark-of-the-tests'\nassert attack()"


def attacked(name, host):
  program = host.names + textwrap.dedent(ATTACKS[name][0])
  return run_code(program, judge_of(name), timeout_s=TIMEOUT, memory_mb=256)


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_succeeds(name, host):
  began = time.monotonic()
  verdict = attacked(name, host)
  assert verdict.passed is False and verdict.reason.startswith(ATTACKS[name][1]), verdict
  assert time.monotonic() - began < TIMEOUT + 10 and len(verdict.output) <= OUTPUT_KEPT
  assert SECRET not in verdict.output
  host.unharmed()


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name][2]])
def test_the_attack_is_one(name, host):
  """Outside, in the same interpreter as its judge, it ends with the exit status of success."""
  if name == "read the home" and not HOME:
    pytest.skip("the home is empty")
  program = host.names + textwrap.dedent(ATTACKS[name][0]) + "\n" + judge_of(name)
  done = subprocess.run(
    [sys.executable, "-c", program], timeout=60, capture_output=True, check=False
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.sandbox
def test_sixteen_attacks_at_once(host):
  """One good program among them is still judged right, and wrong ones never."""
  names = [name for name in ATTACKS if name != "memory of many processes"]
  good = "def f(x):\n  return x + 1"
  with ThreadPoolExecutor(16) as pool:
    verdicts = list(pool.map(lambda name: attacked(name, host), names[: len(names) // 2]))
    mixed = [pool.submit(attacked, name, host) for name in names[len(names) // 2 :]]
    right = pool.submit(run_code, good, "assert f(1) == 2", 60)
    verdicts += [job.result() for job in mixed]
  assert not any(verdict.passed for verdict in verdicts)
  assert right.result().passed
  host.unharmed()


@pytest.mark.sandbox
def test_a_flood_costs_the_trainer_no_memory():
  import psutil

  before = psutil.Process().memory_info().rss
  run_code("import os\nwhile True: os.write(1, b'x' * 65536)", "", timeout_s=2)
  assert psutil.Process().memory_info().rss - before < 64 * 2**20


@pytest.mark.sandbox
def test_runs_do_not_see_each_other():
  program = (
    "import os\ndef left(): return os.listdir('/tmp')\ndef leave(): open('/tmp/x', 'w').write('x')"
  )
  assert run_code(program, "leave()\nassert left() == ['x']").passed
  assert run_code(program, "assert left() == []").passed


@pytest.mark.sandbox
def test_descriptors_stay_few():
  before = len(os.listdir("/proc/self/fd"))
  for _ in range(5):
    run_code("1 / 0", "")
  assert len(os.listdir("/proc/self/fd")) == before


def refusing(monkeypatch, path):
  monkeypatch.setattr(sandbox.shutil, "which", path)
  for cached in (sandbox.sandbox_problem, sandbox._sandbox):
    cached.cache_clear()


@pytest.fixture
def forget():
  yield
  for cached in (sandbox.sandbox_problem, sandbox._sandbox):
    cached.cache_clear()


def test_without_bubblewrap_it_refuses_with_advice(monkeypatch, forget):
  refusing(monkeypatch, lambda name: None)
  with pytest.raises(
    UserError, match=r"bwrap is not installed.*apt install bubblewrap.*conda.*seccomp"
  ) as caught:
    run_code("raise SystemExit", "")
  assert "\n" not in str(caught.value)


def test_where_namespaces_are_forbidden_it_refuses_with_advice(monkeypatch, forget, tmp_path):
  broken = tmp_path / "bwrap"
  broken.write_text(
    '#!/bin/sh\n[ "$1" = --help ] && echo --size && exit\n'
    "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
  )
  broken.chmod(0o755)
  tmp_path.chmod(0o755)
  refusing(monkeypatch, lambda name: str(broken) if name == "bwrap" else None)
  monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
  assert (
    "No permissions to create new namespace" in sandbox_problem()
    and "user namespaces" in sandbox_problem()
  )


def test_only_a_waiver_runs_programs_without_a_sandbox(monkeypatch, forget):
  refusing(monkeypatch, lambda name: None)
  with pytest.raises(UserError):
    run_code("def f(): return 1", "assert f() == 1")
  assert run_code("def f(): return 1", "assert f() == 1", allow_unsandboxed=True).passed
  assert run_code("def f(): return 1", "assert f() == 2", allow_unsandboxed=True).passed is False
  began = time.monotonic()
  assert run_code("while True: pass", "", 1, allow_unsandboxed=True).reason == "timeout"
  assert time.monotonic() - began < 10
