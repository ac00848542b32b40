"""Faults of the workers: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from gtpo_jax.rewards import pool as pool_module
from gtpo_jax.rewards.math import math_correct, math_verdicts
from gtpo_jax.rewards.pool import Pool, close_pools, shared_pool

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
def check(tmp_path, monkeypatch):
  """The name of a check that misbehaves on demand, importable in a worker."""
  (tmp_path / "naughty_check.py").write_text(CHECKS)
  monkeypatch.syspath_prepend(tmp_path)
  return "naughty_check:check"


def alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False


def until(condition, seconds=10.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it did not happen"
    time.sleep(0.02)


def test_verdicts_in_order(check):
  with Pool(2, check=check) as pool:
    assert pool.pids() == []  # nothing starts before it is needed
    assert pool.check("a", "a") is True and len(pool.pids()) == 1
    pairs = [("a", "a"), ("a", "b"), ("a", "nothing"), ("b", "b"), ("a", "nap"), ("c", "d")]
    assert pool.check_all(pairs) == [True, False, None, True, True, False]
    pids = pool.pids()
    assert len(pids) == 2
  assert not any(map(alive, pids)) and pool.pids() == []


@pytest.mark.parametrize(
  ("fault", "seconds"), [("sleep", 1.0), ("spin", 1.0), ("die", 0.0), ("exit", 0.0)]
)
def test_a_fault_costs_one_check_and_its_worker_is_replaced(check, fault, seconds):
  with Pool(1, timeout_s=1.0, check=check) as pool:
    assert pool.check("a", "a") is True
    first = pool.pids()
    began = time.monotonic()
    assert pool.check("a", fault) is None
    assert seconds <= time.monotonic() - began < seconds + 2.0
    assert pool.check_all([("a", "a"), ("a", "b")]) == [True, False]
    assert len(pool.pids()) == 1 and pool.pids() != first and not alive(first[0])


def test_an_exception_memory_and_prints_cost_at_most_one_verdict_and_no_worker(check):
  with Pool(1, check=check) as pool:
    assert pool.check("a", "a") is True
    first = pool.pids()
    pairs = [("a", "raise"), ("a", "eat"), ("a", "print"), ("a", "a"), ("\ud800\0\n", "\ud800\0\n")]
    assert pool.check_all(pairs) == [None, None, False, True, True]
    assert pool.check("a", "x" * 10**6) is None  # never written to the pipe
    assert pool.pids() == first


def test_each_check_has_its_own_limit(check):
  with Pool(1, timeout_s=30, check=check) as pool:
    pool.check("a", "a")
    began = time.monotonic()
    assert pool.check("a", "sleep", timeout_s=0.3) is None and time.monotonic() - began < 3
    assert pool.check("a", "nap") is True


def test_killed_from_outside_in_the_middle(check):
  with Pool(1, timeout_s=30, check=check) as pool:
    pool.check("a", "a")
    futures = [pool.submit("a", answer) for answer in ("sleep", "a", "b")]
    until(futures[0].running)
    os.kill(pool.pids()[0], signal.SIGKILL)
    assert [future.result(10) for future in futures] == [None, True, False]
    os.kill(pool.pids()[0], signal.SIGKILL)  # between two checks: costs none
    time.sleep(0.2)
    assert pool.check("a", "a") is True


def test_a_stopped_worker_is_killed_too(check):
  with Pool(1, timeout_s=0.5, check=check) as pool:
    pool.check("a", "a")
    os.kill(pool.pids()[0], signal.SIGSTOP)
    assert pool.check("a", "a") is None and pool.check("a", "a") is True


def test_eight_threads_at_once(check):
  with Pool(2, timeout_s=5, check=check) as pool:
    wrong = []

    def work(i):
      for j in range(40):
        fault = j == 7 and i % 4 == 0
        verdict = pool.check(str(j), "die" if fault else str(j + j % 2))
        if verdict is not (None if fault else j % 2 == 0):
          wrong.append((i, j, verdict))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert len(pool.pids()) <= 2


def test_close_ends_what_runs_and_waits_and_the_pool_can_be_used_again(check):
  pool = Pool(1, timeout_s=30, check=check)
  pool.check("a", "a")
  futures = [pool.submit("a", answer) for answer in ("sleep", "a", "a")]
  until(futures[0].running)
  pids = pool.pids()
  began = time.monotonic()
  pool.close()
  assert [future.result(5) for future in futures] == [None] * 3 and time.monotonic() - began < 3
  assert not any(map(alive, pids))
  assert pool.check("a", "a") is True
  pool.close()
  pool.close()
  assert pool.pids() == []


def test_workers_do_not_hear_ctrl_c_and_know_no_jax(check):
  with Pool(1, check=check) as pool:
    assert pool.check("a", "modules") is False
    future = pool.submit("a", "nap")
    until(future.running)
    os.kill(pool.pids()[0], signal.SIGINT)
    assert future.result(5) is True
    assert os.getsid(pool.pids()[0]) != os.getsid(0)


PARENT = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[2])
from gtpo_jax.rewards.pool import Pool
if sys.argv[3] == "jax":
  import jax.numpy as jnp
  assert jnp.ones(3).sum() == 3
pool = Pool(2, timeout_s=600, check=sys.argv[1])
pool.check_all([("a", "nap")] * 2)
pool.submit("a", sys.argv[4])
print(json.dumps([pool.check("a", "a"), pool.pids()]), flush=True)
if sys.argv[5] == "stay":
  time.sleep(600)
"""


def parent_of_workers(tmp_path, check, jax="", busy="a", then="stay"):
  script = tmp_path / "parent.py"
  script.write_text(textwrap.dedent(PARENT))
  return subprocess.Popen(
    [sys.executable, str(script), check, json.dumps(sys.path), jax, busy, then],
    stdout=subprocess.PIPE,
  )


@pytest.mark.parametrize("busy", ["a", "sleep"])
def test_workers_die_with_a_killed_parent(tmp_path, check, busy):
  parent = parent_of_workers(tmp_path, check, busy=busy)
  verdict, pids = json.loads(parent.stdout.readline())
  assert verdict is True and len(pids) == 2 and all(map(alive, pids))
  parent.kill()
  parent.wait()
  parent.stdout.close()
  until(lambda: not any(map(alive, pids)), 5.0)


def test_a_parent_with_jax_that_ends_without_closing(tmp_path, check):
  parent = parent_of_workers(tmp_path, check, jax="jax", busy="sleep", then="go")
  out, _ = parent.communicate(timeout=60)
  verdict, pids = json.loads(out)
  assert parent.returncode == 0 and verdict is True
  until(lambda: not any(map(alive, pids)), 5.0)


def test_code_that_never_yields_ends_by_the_kernel_alone(check):
  """No parent kills this worker: its own timer must."""
  command = [
    sys.executable,
    "-P",
    pool_module.__file__,
    str(os.getpid()),
    "2048",
    check,
    json.dumps(sys.path),
  ]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
    assert worker.stdout.readline() == b"ready\n"
    worker.stdin.write(b'["a", "spin", 0.2]\n')
    worker.stdin.flush()
    assert worker.wait(10) == -signal.SIGALRM


def test_a_forked_child_has_a_pool_of_its_own(check):
  with Pool(1, check=check) as pool:
    pool.check("a", "a")
    pids = pool.pids()
    code = (
      "import os, sys, json, warnings\nsys.path[:] = json.loads(sys.argv[1])\nfrom gtpo_jax.rewards.pool import Pool\n"
      "pool = Pool(1, check=sys.argv[2])\nassert pool.check('a', 'a')\nfirst = pool.pids()\nchild = os.fork()\n"
      "if not child:\n  assert pool.pids() == [] and pool.check('a', 'b') is False and pool.pids() != first\n"
      "  pool.close()\n  os._exit(7)\n"
      "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\nassert pool.check('a', 'a') and pool.pids() == first\n"
    )
    subprocess.run(
      [sys.executable, "-W", "ignore", "-c", code, json.dumps(sys.path), check],
      check=True,
      timeout=60,
    )
    assert pool.pids() == pids


def test_a_check_that_cannot_be_imported_is_said_once(caplog):
  with Pool(1, check="no_such_module:check") as pool:
    assert pool.check_all([("a", "a")] * 5) == [None] * 5
  assert len(caplog.records) == 1 and "No module named 'no_such_module'" in caplog.text


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
def test_bad_settings_are_refused(bad):
  with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
    Pool(**bad)


def test_math_verdicts_with_a_pool_that_fails(check):
  """None, never False, where no verdict was reached; the cheap ones do not notice."""
  completions = ["\\boxed{5}", "\\boxed{2\\sqrt{2}}", "\\boxed{6}", "nothing", "\\boxed{\\sqrt{8}}"]
  with Pool(1, check="no_such_module:check") as pool:
    assert math_verdicts(completions, ["5", "\\sqrt{8}", "5", "5", "\\sqrt{8}"], pool=pool) == [
      True,
      None,
      False,
      False,
      True,
    ]
  with Pool(1, check=check) as pool:
    assert math_verdicts(["\\boxed{x}"], ["y"], pool=pool) == [False]


def test_the_shared_pool():
  close_pools()
  assert (
    math_correct("\\boxed{5}", "5") is True and shared_pool().pids() == []
  )  # a number needs no worker
  assert math_verdicts(
    ["\\boxed{2\\sqrt{2}}", "\\boxed{\\sqrt{9}}"], ["\\sqrt{8}", "4"], timeout_s=30, workers=1
  ) == [True, False]
  assert len(shared_pool(1).pids()) == 1 and shared_pool(1) is shared_pool(1)
  close_pools()
  assert shared_pool(1).pids() == []


def test_a_check_that_math_verify_cannot_end():
  with Pool(1, timeout_s=1.0) as pool:
    assert pool.check("4", "9^{9^{9^9}}") is None
    assert pool.check("2", "\\sqrt{4}", timeout_s=30) is True
    assert pool.check("\\sqrt{", "2") is None  # a gold that cannot be read judges nothing
