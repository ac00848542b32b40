"""Signals and the watchdog, in processes whose main thread is deep in C."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUSY = (
  "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"  # minutes in C; others may run
)
HOLDING = "import re\nre.match('(a+)+b', 'a' * 60)\n"  # and here they may not
SIGNALS = "from gtpo_jax.runtime.signals import StopSignals\nstop = StopSignals()\nstop.__enter__()\nprint('ready', flush=True)\n"
WATCHED = "from gtpo_jax.runtime.signals import Watchdog\nwith Watchdog({limit}, lambda: False) as stopping:\n  {body}\nprint('done')\n"


def child(code):
  return subprocess.Popen(
    [sys.executable, "-c", code],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ("first", "second", "code"),
  [
    (signal.SIGINT, signal.SIGINT, 130),
    (signal.SIGTERM, signal.SIGTERM, 143),
    (signal.SIGINT, signal.SIGTERM, 143),
  ],
)
def test_the_first_signal_is_heard_and_the_second_leaves_at_once(first, second, code):
  with child(SIGNALS + BUSY) as process:
    try:
      assert process.stdout.readline() == "ready\n"
      process.send_signal(first)
      assert process.stderr.readline() == "\n"
      assert process.stderr.readline().startswith(
        "gtpo: stopping at the next step boundary and saving; once more to leave at once"
      )
      assert process.poll() is None
      process.send_signal(second)
      assert process.wait(timeout=30) == code
    finally:
      process.kill()


def test_other_signals_and_the_time_after_are_as_before():
  code = (
    "import signal, os\nfrom gtpo_jax.runtime.signals import StopSignals\nbefore = signal.getsignal(signal.SIGINT)\n"
    "signal.signal(signal.SIGUSR1, lambda *_: print('mine'))\n"
    "with StopSignals() as stop:\n  os.kill(os.getpid(), signal.SIGUSR1)\n  assert not stop.asked()\n"
    "assert signal.getsignal(signal.SIGINT) is before\nos.kill(os.getpid(), signal.SIGINT)\n"
  )
  with child(code) as process:
    out, error = process.communicate(timeout=60)
  assert out == "mine\n" and "KeyboardInterrupt" in error


@pytest.mark.parametrize("body", [BUSY, HOLDING], ids=["in C", "keeping Python from running"])
def test_a_stall_prints_the_stacks_and_exits(body):
  with child(
    WATCHED.format(limit=1, body="stopping()\n  " + body.replace("\n", "\n  "))
  ) as process:
    out, error = process.communicate(timeout=100)
  assert process.returncode == 1 and out == ""
  assert 'File "<string>", line 5 in <module>' in error  # where the main thread was
  assert ("nothing has ended for 1 s (guards.stall_s)" in error) == (body == BUSY)


@pytest.mark.parametrize("limit", [1, 0])
def test_signs_of_life_keep_a_process_alive(limit):
  body = (
    "import time\n  for _ in range(6):\n    stopping()\n    time.sleep(0.5 if {limit} else 0.1)"
  )
  with child(WATCHED.format(limit=limit, body=body.format(limit=limit))) as process:
    out, error = process.communicate(timeout=100)
  assert (process.returncode, out, error) == (0, "done\n", "")


def test_it_asks_on_behalf_of_the_caller():
  from gtpo_jax.runtime.signals import Watchdog

  answers = [False, True]
  with Watchdog(0, lambda: answers.pop(0)) as stopping:
    assert (stopping(), stopping()) == (False, True)


def test_the_callers_own_time_is_no_stall():
  body = (
    "import time\n  stopping()\n  with stopping.paused():\n    time.sleep(2.5)\n  stopping()\n  "
    + BUSY.replace("\n", "\n  ")
  )
  with child(WATCHED.format(limit=1, body=body)) as process:
    out, error = process.communicate(timeout=100)
  assert process.returncode == 1 and out == ""  # when it goes on it is watched again
  assert 'File "<string>", line 9 in <module>' in error


def test_interrupts_of_a_notebook():
  """The first is a wish, the second an exception; outside it is as before; on another thread it is not touched."""
  code = (
    "import os, signal, threading\nfrom gtpo_jax.runtime.signals import Interrupts\n"
    "def press(): os.kill(os.getpid(), signal.SIGINT)\n"
    "held = Interrupts()\n"
    "with held: assert not held.asked()\n"
    "try: press()\nexcept KeyboardInterrupt: print('as before')\n"
    "with held:\n  press()\n  assert held.asked()\n"
    "  try: press()\n  except KeyboardInterrupt: print('second')\n"
    "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    "thread = threading.Thread(target=lambda: Interrupts().__enter__().__exit__())\nthread.start()\nthread.join()\n"
    "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
  )
  with child(code) as process:
    out, error = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "as before\nsecond\n"), error
  assert error == "\ngtpo: stopping at the next step boundary; once more to leave at once\n"
