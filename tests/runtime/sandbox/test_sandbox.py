"""Attacks on the sandbox. Each must fail in it, and some must succeed without it."""

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
from attacks import ATTACKS

from gtpo_jax.rewards.code import OUTPUT_KEPT, run_code
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.sandbox import bubblewrap
from gtpo_jax.runtime.sandbox.bubblewrap import interpreter, root_filesystem, sandbox_problem

SECRET = "canary-5d1f90c2"
TIMEOUT_S = 3  # for attacks that never end
LONG_S = 60  # for the others, also on a busy machine


def in_home():
  """Returns paths in the home, except the folder that contains the interpreter."""
  paths = [*Path.home().glob("*"), *Path.home().glob(".*")]
  return [str(path) for path in paths if not Path(interpreter()).is_relative_to(path)]


HOME = in_home()


@dataclass
class Host:
  """Things on this machine that an attack must not reach.

  Attributes:
    names: Python assignments with the locations of these things, for the attacks.
    canary: a file that anybody may change.
    listeners: sockets that anybody may connect to.
  """

  names: str
  canary: Path
  listeners: list

  def assert_unharmed(self):
    assert self.canary.read_text() == SECRET
    assert list(self.canary.parent.iterdir()) == [self.canary]
    for listener in self.listeners:
      with pytest.raises(BlockingIOError):
        listener.accept()
    deadline = time.monotonic() + 10
    while survivors := sandboxed_pids():
      assert time.monotonic() < deadline, f"still alive: {survivors}"
      time.sleep(0.01)


def sandboxed_pids():
  """Returns the processes in the sandbox's root file system that this user can see."""
  root = root_filesystem().stat()
  pids = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      is_ours = bubblewrap.BOOT.encode() in Path("/proc", pid, "cmdline").read_bytes()
      if is_ours and os.path.samestat(Path("/proc", pid, "root").stat(), root):
        pids.append(int(pid))
    except OSError:
      pass
  return pids


@pytest.fixture
def host(monkeypatch):
  """A file and two sockets open to everybody on this machine, and a secret in the environment."""
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
    names = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    yield Host(names, canary, [tcp, unix])


def run_attack(name, host):
  program = host.names + textwrap.dedent(ATTACKS[name].program)
  tests = textwrap.dedent(ATTACKS[name].tests)
  limit = TIMEOUT_S if ATTACKS[name].reason in ("timeout", "") else LONG_S
  return run_code(program, tests, timeout_s=limit, memory_mb=256)


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_succeeds(name, host):
  began = time.monotonic()
  verdict = run_attack(name, host)
  seconds = time.monotonic() - began
  assert verdict.passed is False, verdict
  assert verdict.reason.startswith(ATTACKS[name].reason), verdict
  assert seconds < TIMEOUT_S + 20
  assert len(verdict.output) <= OUTPUT_KEPT
  assert SECRET not in verdict.output
  host.assert_unharmed()


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].works_outside])
def test_the_attack_succeeds_outside(name, host):
  """The attack runs without a sandbox, in the interpreter of its tests, and exits with status 0."""
  if name == "read the home" and not HOME:
    pytest.skip("the home is empty")
  parts = (textwrap.dedent(text) for text in (ATTACKS[name].program, ATTACKS[name].tests))
  program = host.names + "\n".join(parts)
  done = subprocess.run(
    [sys.executable, "-c", program], timeout=60, capture_output=True, check=False
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.sandbox
@pytest.mark.slow
def test_sixteen_attacks_at_once(host):
  """A correct program that runs at the same time passes, and no attack does."""
  names = [name for name in ATTACKS if name != "memory of many processes"]
  half = len(names) // 2
  good = "def f(x):\n  return x + 1"
  with ThreadPoolExecutor(16) as pool:
    verdicts = list(pool.map(lambda name: run_attack(name, host), names[:half]))
    jobs = [pool.submit(run_attack, name, host) for name in names[half:]]
    right = pool.submit(run_code, good, "assert f(1) == 2", 60)
    verdicts += [job.result() for job in jobs]
  assert not any(verdict.passed for verdict in verdicts)
  assert right.result().passed
  host.assert_unharmed()


@pytest.mark.sandbox
def test_a_flood_costs_the_trainer_no_memory():
  import psutil

  before = psutil.Process().memory_info().rss
  run_code("import os\nwhile True: os.write(1, b'x' * 65536)", "", timeout_s=2)
  assert psutil.Process().memory_info().rss - before < 64 * 2**20


@pytest.mark.sandbox
def test_runs_do_not_see_each_other():
  program = textwrap.dedent("""
    import os
    def files(): return os.listdir('/tmp')
    def leave(): open('/tmp/x', 'w').write('x')""")
  assert run_code(program, "leave()\nassert files() == ['x']").passed
  assert run_code(program, "assert files() == []").passed


@pytest.mark.sandbox
def test_no_descriptor_leaks():
  before = len(os.listdir("/proc/self/fd"))
  for _ in range(5):
    run_code("1 / 0", "")
  assert len(os.listdir("/proc/self/fd")) == before


def clear_caches():
  for cached in (bubblewrap.sandbox_problem, bubblewrap._sandbox_command):
    cached.cache_clear()


@pytest.fixture
def which(monkeypatch):
  """Replaces shutil.which and makes this test search for the sandbox again."""

  def replace(function):
    monkeypatch.setattr(bubblewrap.shutil, "which", function)
    clear_caches()

  yield replace
  clear_caches()


def test_without_bubblewrap_it_fails_with_advice(which):
  which(lambda name: None)
  advice = r"bwrap is not installed.*apt install bubblewrap.*conda.*seccomp"
  with pytest.raises(UserError, match=advice) as caught:
    run_code("raise SystemExit", "")
  assert "\n" not in str(caught.value)


FORBIDDEN = """#!/bin/sh
[ "$1" = --help ] && echo --size && exit
echo 'bwrap: No permissions to create new namespace' >&2
exit 1
"""


def test_if_namespaces_are_forbidden_it_fails_with_advice(monkeypatch, which, tmp_path):
  broken = tmp_path / "bwrap"
  broken.write_text(FORBIDDEN)
  broken.chmod(0o755)
  tmp_path.chmod(0o755)
  which(lambda name: str(broken) if name == "bwrap" else None)
  monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 1000)
  assert "No permissions to create new namespace" in sandbox_problem()
  assert "user namespaces" in sandbox_problem()


def test_programs_run_without_a_sandbox_only_if_allowed(which):
  which(lambda name: None)
  program = "def f(): return 1"
  with pytest.raises(UserError):
    run_code(program, "assert f() == 1")
  assert run_code(program, "assert f() == 1", allow_unsandboxed=True).passed
  assert run_code(program, "assert f() == 2", allow_unsandboxed=True).passed is False
  began = time.monotonic()
  assert run_code("while True: pass", "", 1, allow_unsandboxed=True).reason == "timeout"
  assert time.monotonic() - began < 10
