"""Stop signals and the watchdog, in child processes, some of which are stuck in C code."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUSY = (
  # Runs C code for minutes and releases the GIL, so other threads can run.
  "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
)
# Runs C code for minutes and holds the GIL, so no other thread can run.
HOLDING_GIL = "import re\nre.match('(a+)+b', 'a' * 60)\n"
SIGNALS = (
  "from gtpo_jax.runtime.signals import StopSignals\n"
  "stop = StopSignals()\nstop.__enter__()\nprint('ready', flush=True)\n"
)
WATCHED = (
  "from gtpo_jax.runtime.signals import Watchdog\n"
  "with Watchdog({limit}, lambda: False) as stopping:\n  {body}\nprint('done')\n"
)


def child(code):
  return subprocess.Popen(
    [sys.executable, "-c", code],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ("first", "second"),
  [
    (signal.SIGINT, signal.SIGINT),
    (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGINT, signal.SIGTERM),
  ],
)
@pytest.mark.some(1, slow=0)
def test_the_first_signal_requests_a_stop_and_the_second_quits(first, second):
  with child(SIGNALS + BUSY) as process:
    try:
      assert process.stdout.readline() == "ready\n"
      process.send_signal(first)
      assert process.stderr.readline() == "\n"
      assert process.stderr.readline().startswith(
        "gtpo: stopping as soon as possible, then saving; repeat to quit at once, unsaved"
      )
      assert process.poll() is None
      process.send_signal(second)
      assert process.wait(timeout=30) == -second
    finally:
      process.kill()


SERVER = (
  "import asyncio, types\nfrom gtpo_jax.cli.serve import run_server\n"
  "async def serve(sockets):\n  print('ready', flush=True)\n  "
  + HOLDING_GIL.replace("\n", "\n  ")
  + "\nasyncio.run(run_server(types.SimpleNamespace(serve=serve), None))\n"
)


@pytest.mark.parametrize(
  "code",
  [SIGNALS + HOLDING_GIL, pytest.param(SERVER, marks=pytest.mark.slow)],
  ids=["a run", "a server"],
)
def test_the_second_signal_quits_even_if_c_code_holds_the_gil(code):
  with child(code) as process:
    try:
      assert process.stdout.readline() == "ready\n"
      time.sleep(0.5)  # until it holds the GIL; before, it would quit all the same
      process.send_signal(signal.SIGTERM)
      time.sleep(0.5)
      assert process.poll() is None
      process.send_signal(signal.SIGTERM)
      assert process.wait(timeout=30) == -signal.SIGTERM
    finally:
      process.kill()


def test_other_signals_are_unaffected_and_handlers_are_restored():
  code = (
    "import signal, os\nfrom gtpo_jax.runtime.signals import StopSignals\n"
    "before = signal.getsignal(signal.SIGINT)\n"
    "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
    "with StopSignals() as stop:\n  os.kill(os.getpid(), signal.SIGUSR1)\n"
    "  assert not stop.requested()\n"
    "assert signal.getsignal(signal.SIGINT) is before\nos.kill(os.getpid(), signal.SIGINT)\n"
  )
  with child(code) as process:
    out, error = process.communicate(timeout=60)
  assert out == "mine\n" and "KeyboardInterrupt" in error


@pytest.mark.parametrize("body", [BUSY, HOLDING_GIL], ids=["in C", "in C, holding the GIL"])
@pytest.mark.some(1)
def test_a_stall_prints_the_stacks_and_exits(body):
  with child(
    WATCHED.format(limit=1, body="stopping()\n  " + body.replace("\n", "\n  "))
  ) as process:
    out, error = process.communicate(timeout=100)
  assert process.returncode == 1 and out == ""
  assert 'File "<string>", line 5 in <module>' in error  # where the main thread was
  assert ("no progress for 1 s (guards.stall_s)" in error) == (body == BUSY)


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.some(1, slow=0)
def test_progress_keeps_a_process_alive(limit):
  body = "import time\n  for _ in range(6):\n    stopping()\n    time.sleep(1 if {limit} else 0.1)"
  with child(WATCHED.format(limit=limit, body=body.format(limit=limit))) as process:
    out, error = process.communicate(timeout=100)
  assert (process.returncode, out, error) == (0, "done\n", "")


def test_the_watchdog_returns_what_stopping_returns():
  from gtpo_jax.runtime.signals import Watchdog

  answers = [False, True]
  with Watchdog(0, lambda: answers.pop(0)) as stopping:
    assert (stopping(), stopping()) == (False, True)


def test_time_spent_in_the_callers_code_is_not_a_stall():
  body = (
    "import time\n  stopping()\n  with stopping.paused():\n    time.sleep(1.5)\n  stopping()\n  "
    + BUSY.replace("\n", "\n  ")
  )
  with child(WATCHED.format(limit=1, body=body)) as process:
    out, error = process.communicate(timeout=100)
  assert process.returncode == 1 and out == ""  # the watchdog is active again afterwards
  assert 'File "<string>", line 9 in <module>' in error


def test_interrupts_in_a_notebook():
  """Inside `with`, the first Ctrl-C requests a stop and the second raises.

  Outside it, and on other threads, Ctrl-C does what it did before.
  """
  code = (
    "import os, signal, threading\nfrom gtpo_jax.runtime.signals import Interrupts\n"
    "def press(): os.kill(os.getpid(), signal.SIGINT)\n"
    "interrupts = Interrupts()\n"
    "with interrupts: assert not interrupts.requested()\n"
    "try: press()\nexcept KeyboardInterrupt: print('as before')\n"
    "with interrupts:\n  press()\n  assert interrupts.requested()\n"
    "  try: press()\n  except KeyboardInterrupt: print('second')\n"
    "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    "thread = threading.Thread(target=lambda: Interrupts().__enter__().__exit__())\n"
    "thread.start()\nthread.join()\n"
    "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
  )
  with child(code) as process:
    out, error = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "as before\nsecond\n"), error
  assert error == "\ngtpo: stopping as soon as possible; repeat to quit at once\n"


@pytest.mark.slow
def test_a_compilation_is_not_a_stall():
  """The time limit is longer while XLA compiles, and back to normal afterwards."""
  event = "jax.monitoring.record_event_duration_secs('/jax/core/compile/{}_duration', 0.1)\n"
  code = (
    "import jax, time\nfrom gtpo_jax.runtime.signals import Watchdog\n"
    "with Watchdog(1, lambda: False) as stopping:\n  stopping()\n"
    f"  {event.format('jaxpr_to_mlir_module')}  time.sleep(3)\n"
    f"  {event.format('backend_compile')}  print('compiled', flush=True)\n  time.sleep(60)\n"
  )
  with child(code) as process:
    out, error = process.communicate(timeout=100)
  assert (process.returncode, out) == (1, "compiled\n")
  assert "no progress for 1 s (guards.stall_s)" in error


@pytest.mark.slow
def test_jax_reports_when_a_compilation_begins_and_ends():
  code = (
    "import jax\nfrom gtpo_jax.runtime.signals import COMPILE_BEGINS, COMPILE_EVENTS\n"
    "events = []\n"
    "jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__:"
    " events.append(name))\n"
    "jax.jit(lambda x: x + 1)(1.0)\n"
    "last = [name for name in events if name.startswith(COMPILE_EVENTS)][-2:]\n"
    "assert last == [COMPILE_BEGINS, '/jax/core/compile/backend_compile_duration'], events\n"
  )
  with child(code) as process:
    _, error = process.communicate(timeout=100)
  assert process.returncode == 0, error
