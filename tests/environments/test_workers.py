"""Calls on threads: limits, hangs, exceptions, and the number of workers."""

import asyncio
import math
import threading
import time

import pytest

from gtpo_jax.environments import workers as module
from gtpo_jax.environments.workers import Workers
from gtpo_jax.runtime import event_loop
from gtpo_jax.runtime.errors import FunctionError, RunError

LONG_S = 30.0


def collect(workers, count, timeout_s=10.0):
  """Returns `count` outcomes by key."""
  outcomes = {}
  until = time.monotonic() + timeout_s
  while len(outcomes) < count and time.monotonic() < until:
    workers.wait(0.1)
    outcomes |= {outcome.key: outcome for outcome in workers.poll()}
  assert len(outcomes) == count
  return outcomes


def test_calls_return_values_and_name_their_exceptions():
  workers = Workers(3)
  workers.submit("value", lambda: 3, LONG_S)
  workers.submit("error", lambda: [][1], LONG_S)
  workers.submit("exit", lambda: (_ for _ in ()).throw(SystemExit(2)), LONG_S)

  async def sleep(value):
    await asyncio.sleep(0.01)
    return value / 0 if value == 0 else value

  workers.submit("async", lambda: sleep(4), LONG_S)
  workers.submit("async error", lambda: sleep(0), LONG_S)
  outcomes = collect(workers, 5)
  assert outcomes["value"].value == 3 and outcomes["async"].value == 4
  assert outcomes["async"].seconds >= 0.01
  assert outcomes["error"].error == "IndexError: list index out of range"
  assert "test_workers.py" in outcomes["error"].details
  assert outcomes["exit"].error == "SystemExit: 2"
  assert outcomes["async error"].error == "ZeroDivisionError: division by zero"
  assert all(outcome.value is None for outcome in outcomes.values() if outcome.error)
  assert not any(outcome.timed_out for outcome in outcomes.values())
  assert workers.abandoned == 0


def test_the_number_of_workers_is_bounded():
  workers = Workers(3)
  lock = threading.Lock()
  running = []
  most = []

  def work():
    with lock:
      running.append(1)
      most.append(len(running))
    time.sleep(0.005)
    with lock:
      running.pop()

  for i in range(30):
    workers.submit(i, work, LONG_S)
  collect(workers, 30)
  assert max(most) == 3


def test_calls_that_hang_cost_only_themselves():
  workers = Workers(2)
  release = threading.Event()
  cleaned = threading.Event()
  for i in range(5):
    workers.submit(f"hang {i}", release.wait, 0.05, cleaned.set)
  for i in range(5):
    workers.submit(i, lambda i=i: i, 0.05)
  outcomes = collect(workers, 10)
  assert [outcomes[i].value for i in range(5)] == list(range(5))
  for i in range(5):
    assert outcomes[f"hang {i}"].timed_out and outcomes[f"hang {i}"].value is None
    assert 0.05 < outcomes[f"hang {i}"].seconds < 5
  assert workers.abandoned == 5
  assert not cleaned.is_set()
  release.set()
  assert cleaned.wait(5)
  time.sleep(0.02)
  assert workers.poll() == []  # what they return late is dropped


def test_the_limit_starts_with_the_call():
  workers = Workers(1)
  for i in range(8):
    workers.submit(i, lambda: time.sleep(0.02), 0.1)
  assert not any(outcome.timed_out for outcome in collect(workers, 8).values())


def test_a_call_that_returns_after_its_limit_is_late_whoever_looks_when():
  workers = Workers(1)
  workers.submit("late", lambda: time.sleep(0.05), 0.01)
  time.sleep(0.1)
  (outcome,) = workers.poll()
  assert outcome.timed_out and workers.abandoned == 0


def test_async_calls_are_cancelled():
  workers = Workers(2)
  cancelled = threading.Event()

  async def hang():
    try:
      await asyncio.sleep(1000)
    except asyncio.CancelledError:
      cancelled.set()
      raise

  workers.submit("hang", hang, 0.05)
  assert collect(workers, 1)["hang"].timed_out
  assert cancelled.wait(5)


def test_a_blocked_event_loop_is_replaced(monkeypatch):
  monkeypatch.setattr(event_loop, "LOOP_CHECK_S", 0.05)
  workers = Workers(2)
  release = threading.Event()

  async def block():
    release.wait()

  async def answer():
    return 3

  workers.submit("block", block, 0.05)
  assert collect(workers, 1)["block"].timed_out
  workers.submit("answer", answer, LONG_S)
  assert collect(workers, 1)["answer"].value == 3
  release.set()


def test_too_many_hanging_calls_end_the_run(monkeypatch):
  monkeypatch.setattr(module, "MAX_HANGING", 2)
  workers = Workers(3)
  release = threading.Event()
  for i in range(3):
    workers.submit(i, release.wait, 0.02)
  with pytest.raises(RunError, match="3 calls of the environment hang beyond"):
    collect(workers, 4)
  release.set()


def test_an_interrupt_ends_the_run():
  def interrupt():
    raise KeyboardInterrupt

  workers = Workers(1)
  workers.submit("x", interrupt, LONG_S)
  with pytest.raises(FunctionError, match="an environment raised KeyboardInterrupt"):
    collect(workers, 1)


def test_waiting_ends_when_nothing_runs():
  began = time.monotonic()
  Workers(1).wait(100)
  assert time.monotonic() - began < 1


def test_a_limit_can_be_lifted_and_set_again():
  workers = Workers(2)
  release = threading.Event()
  workers.submit("a", release.wait, 0.2)
  workers.limit("a", math.inf)
  time.sleep(0.3)
  assert workers.poll() == []
  workers.limit("a", 0.05)
  until = time.monotonic() + 10
  while not (outcomes := workers.poll()) and time.monotonic() < until:
    workers.wait(1.0)
  assert [(outcome.key, outcome.timed_out) for outcome in outcomes] == [("a", True)]
  release.set()


def test_a_wait_ends_when_it_is_woken():
  workers = Workers(1)
  release = threading.Event()
  workers.submit("a", release.wait, 100)
  workers.wake()
  workers.wait(1000)
  threading.Timer(0.1, workers.wake).start()
  workers.wait(1000)
  assert workers.poll() == []
  release.set()
