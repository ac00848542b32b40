"""Faults of workers, in real processes and with real signals."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from gtpo_jax.rewards.math.verdicts import math_correct, math_verdicts
from gtpo_jax.rewards.math.worker_pool import SCRIPT, WorkerPool, close_pools, shared_pool, wait_all

CHECKS = """
import os, signal, sys, time

def check(gold, answer):
  if answer == "sleep":
    time.sleep(60)
  if answer == "spin":  # one C call, which neither a thread nor a Python signal handler can stop
    return 9 ** 9 ** 9 == 0
  if answer == "die":
    os.kill(os.getpid(), signal.SIGKILL)
  if answer == "exit":
    os._exit(0)
  if answer == "raise":
    raise ValueError(gold)
  if answer == "eat":
    return len(bytearray(2**40)) == 0
  if answer == "print":
    print("1\\n0\\n", flush=True)
  if answer == "nothing":
    return None
  if answer == "nap":
    time.sleep(0.2)
    return True
  if answer == "modules":
    return bool({"jax", "jaxlib", "numpy", "flax", "gtpo_jax"} & set(sys.modules))
  return gold == answer
"""


@pytest.fixture
def check_name(tmp_path, monkeypatch):
  """The name of a check that misbehaves on demand. Workers can import it."""
  (tmp_path / "naughty_check.py").write_text(CHECKS)
  monkeypatch.syspath_prepend(tmp_path)
  return "naughty_check:check"


def check(pool, gold, answer, timeout_s=None):
  return pool.submit(gold, answer, timeout_s).result()


def check_all(pool, pairs):
  """Runs the checks in parallel and returns their verdicts in order."""
  return wait_all([pool.submit(gold, answer) for gold, answer in pairs])


def pids_of(pool):
  with pool._lock:
    return [worker.process.pid for worker in pool._alive]


def alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False


def wait_until(condition, seconds=10.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    time.sleep(0.02)


def test_verdicts_are_in_order(check_name):
  with WorkerPool(2, check=check_name) as pool:
    assert pids_of(pool) == []  # nothing starts before it is needed
    assert check(pool, "a", "a") is True
    assert len(pids_of(pool)) == 1
    pairs = [("a", "a"), ("a", "b"), ("a", "nothing"), ("b", "b"), ("a", "nap"), ("c", "d")]
    assert check_all(pool, pairs) == [True, False, None, True, True, False]
    pids = pids_of(pool)
    assert len(pids) == 2
  assert not any(map(alive, pids))
  assert pids_of(pool) == []


@pytest.mark.parametrize(
  ("fault", "seconds"), [("sleep", 1.0), ("spin", 1.0), ("die", 0.0), ("exit", 0.0)]
)
@pytest.mark.some(2)
def test_a_fault_costs_one_check_and_its_worker_is_replaced(check_name, fault, seconds):
  with WorkerPool(1, timeout_s=1.0, check=check_name) as pool:
    assert check(pool, "a", "a") is True
    before = pids_of(pool)
    began = time.monotonic()
    assert check(pool, "a", fault) is None
    assert seconds <= time.monotonic() - began < seconds + 20
    assert check_all(pool, [("a", "a"), ("a", "b")]) == [True, False]
    assert len(pids_of(pool)) == 1
    assert pids_of(pool) != before
    assert not alive(before[0])


def test_exceptions_and_output_do_not_end_the_worker(check_name):
  with WorkerPool(1, check=check_name) as pool:
    assert check(pool, "a", "a") is True
    before = pids_of(pool)
    odd_text = "\ud800\0\n"
    pairs = [("a", "raise"), ("a", "eat"), ("a", "print"), ("a", "a"), (odd_text, odd_text)]
    assert check_all(pool, pairs) == [None, None, False, True, True]
    assert check(pool, "a", "x" * 10**7) is None  # never written to the pipe
    assert pids_of(pool) == before


def test_each_check_has_its_own_limit(check_name):
  with WorkerPool(1, timeout_s=30, check=check_name) as pool:
    check(pool, "a", "a")
    began = time.monotonic()
    assert check(pool, "a", "sleep", timeout_s=0.3) is None
    assert time.monotonic() - began < 20
    assert check(pool, "a", "nap") is True


def test_a_worker_killed_from_outside_during_a_check(check_name):
  with WorkerPool(1, timeout_s=30, check=check_name) as pool:
    check(pool, "a", "a")
    futures = [pool.submit("a", answer) for answer in ("sleep", "a", "b")]
    wait_until(futures[0].running)
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    assert [future.result(10) for future in futures] == [None, True, False]
    os.kill(pids_of(pool)[0], signal.SIGKILL)  # between two checks, so both get verdicts
    time.sleep(0.2)
    assert check(pool, "a", "a") is True


def test_a_stopped_worker_is_killed_too(check_name):
  with WorkerPool(1, timeout_s=0.5, check=check_name) as pool:
    check(pool, "a", "a")
    os.kill(pids_of(pool)[0], signal.SIGSTOP)
    assert check(pool, "a", "a") is None
    assert check(pool, "a", "a") is True


@pytest.mark.slow
def test_eight_threads_at_once(check_name):
  with WorkerPool(2, timeout_s=5, check=check_name) as pool:
    wrong = []

    def work(i):
      for j in range(40):
        fault = j == 7 and i % 4 == 0
        verdict = check(pool, str(j), "die" if fault else str(j + j % 2))
        if verdict is not (None if fault else j % 2 == 0):
          wrong.append((i, j, verdict))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert len(pids_of(pool)) <= 2


def test_close_ends_all_checks_and_the_pool_can_be_used_again(check_name):
  pool = WorkerPool(1, timeout_s=30, check=check_name)
  check(pool, "a", "a")
  futures = [pool.submit("a", answer) for answer in ("sleep", "a", "a")]
  wait_until(futures[0].running)
  pids = pids_of(pool)
  began = time.monotonic()
  pool.close()
  assert [future.result(5) for future in futures] == [None] * 3
  assert time.monotonic() - began < 20
  assert not any(map(alive, pids))
  assert check(pool, "a", "a") is True
  pool.close()
  pool.close()
  assert pids_of(pool) == []


def test_workers_ignore_ctrl_c_and_import_no_jax(check_name):
  with WorkerPool(1, check=check_name) as pool:
    assert check(pool, "a", "modules") is False
    future = pool.submit("a", "nap")
    wait_until(future.running)
    os.kill(pids_of(pool)[0], signal.SIGINT)
    assert future.result(5) is True
    assert os.getsid(pids_of(pool)[0]) != os.getsid(0)


PARENT = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[2])
from gtpo_jax.rewards.math.worker_pool import WorkerPool, wait_all
if sys.argv[3] == "jax":
  import jax.numpy as jnp
  assert jnp.ones(3).sum() == 3
pool = WorkerPool(2, timeout_s=600, check=sys.argv[1])
wait_all([pool.submit("a", "nap") for _ in range(2)])
pool.submit("a", sys.argv[4])
verdict = pool.submit("a", "a").result()
print(json.dumps([verdict, [worker.process.pid for worker in pool._alive]]), flush=True)
if sys.argv[5] == "stay":
  time.sleep(600)
"""


def parent_of_workers(tmp_path, check_name, jax="", busy="a", then="stay"):
  script = tmp_path / "parent.py"
  script.write_text(textwrap.dedent(PARENT))
  return subprocess.Popen(
    [sys.executable, str(script), check_name, json.dumps(sys.path), jax, busy, then],
    stdout=subprocess.PIPE,
  )


@pytest.mark.parametrize("busy", ["a", "sleep"])
def test_workers_die_with_a_killed_parent(tmp_path, check_name, busy):
  parent = parent_of_workers(tmp_path, check_name, busy=busy)
  verdict, pids = json.loads(parent.stdout.readline())
  assert verdict is True
  assert len(pids) == 2
  assert all(map(alive, pids))
  parent.kill()
  parent.wait()
  parent.stdout.close()
  wait_until(lambda: not any(map(alive, pids)), 5.0)


def test_workers_die_with_a_parent_that_does_not_close_the_pool(tmp_path, check_name):
  parent = parent_of_workers(tmp_path, check_name, jax="jax", busy="sleep", then="go")
  out, _ = parent.communicate(timeout=60)
  verdict, pids = json.loads(out)
  assert parent.returncode == 0
  assert verdict is True
  wait_until(lambda: not any(map(alive, pids)), 5.0)


def test_the_kernel_ends_code_that_never_yields(check_name):
  """This worker has no parent that kills it; only its own timer can end it."""
  arguments = [str(os.getpid()), "2048", check_name, json.dumps(sys.path)]
  command = [sys.executable, "-P", str(SCRIPT), *arguments]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
    assert worker.stdout.readline() == b"ready\n"
    worker.stdin.write(b'["a", "spin", 0.2]\n')
    worker.stdin.flush()
    assert worker.wait(10) == -signal.SIGALRM


FORK = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from gtpo_jax.rewards.math.worker_pool import WorkerPool

def check(gold, answer):
  return pool.submit(gold, answer).result()

def pids():
  return [worker.process.pid for worker in pool._alive]

pool = WorkerPool(1, check=sys.argv[2])
assert check("a", "a")
before = pids()
child = os.fork()
if not child:
  assert pids() == [] and check("a", "b") is False and pids() != before
  pool.close()
  os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert check("a", "a") and pids() == before
"""


def test_a_forked_child_has_its_own_pool(check_name):
  command = [sys.executable, "-W", "ignore", "-c", FORK, json.dumps(sys.path), check_name]
  subprocess.run(command, check=True, timeout=60)


def test_a_check_that_cannot_be_imported_is_reported_once(caplog):
  with WorkerPool(1, check="no_such_module:check") as pool:
    assert check_all(pool, [("a", "a")] * 5) == [None] * 5
  assert len(caplog.records) == 1
  assert "No module named 'no_such_module'" in caplog.text


@pytest.mark.parametrize(
  "bad",
  [
    {"workers": 0},
    {"workers": -1},
    {"timeout_s": 0},
    {"timeout_s": float("nan")},
    {"timeout_s": 1e9},
  ],
)
def test_bad_settings_are_rejected(bad):
  with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
    WorkerPool(**bad)


def test_math_verdicts_with_a_pool_that_fails(check_name):
  """A check without a verdict gives None, never False; cheap comparisons are not affected."""
  pairs = {
    "\\boxed{5}": "5",
    "\\boxed{2\\sqrt{2}}": "\\sqrt{8}",
    "\\boxed{6}": "5",
    "nothing": "5",
    "\\boxed{\\sqrt{8}}": "\\sqrt{8}",
  }
  with WorkerPool(1, check="no_such_module:check") as pool:
    verdicts = math_verdicts(list(pairs), list(pairs.values()), pool=pool)
    assert verdicts == [True, None, False, False, True]
  with WorkerPool(1, check=check_name) as pool:
    assert math_verdicts(["\\boxed{x}"], ["y"], pool=pool) == [False]


def test_the_shared_pool():
  close_pools()
  assert math_correct("\\boxed{5}", "5") is True
  assert pids_of(shared_pool()) == []  # a number needs no worker
  completions = ["\\boxed{2\\sqrt{2}}", "\\boxed{\\sqrt{9}}"]
  verdicts = math_verdicts(completions, ["\\sqrt{8}", "4"], timeout_s=30, workers=1)
  assert verdicts == [True, False]
  assert len(pids_of(shared_pool(1))) == 1
  assert shared_pool(1) is shared_pool(1)
  close_pools()
  assert pids_of(shared_pool(1)) == []


@pytest.mark.slow
def test_a_check_that_math_verify_cannot_finish():
  with WorkerPool(1, timeout_s=1.0) as pool:
    assert check(pool, "4", "9^{9^{9^9}}") is None
    assert check(pool, "2", "\\sqrt{4}", timeout_s=30) is True
    assert check(pool, "\\sqrt{", "2") is None  # a gold answer that cannot be parsed
