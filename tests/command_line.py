"""The command line in processes of its own, and the settings of a short run."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from preloaded import python

ROOT = Path(__file__).parents[1]
SMALL = [
  "--config.data.terms=2",
  "--config.batch.prompts=8",
  "--config.batch.group=4",
  "--config.warm_start.steps=10",
  "--config.warm_start.batch=8",
  "--config.eval.problems=8",
  "--config.eval.samples=2",
  "--config.eval.batch=8",
]
# Without contrast, because there is hardly a correct completion to learn from.
TRAIN = ["train", "--config=configs/tiny.py", *SMALL, "--config.algorithm.contrast=False"]


def command_line(*args):
  """Returns the command that runs `gtpo` with this Python."""
  return [sys.executable, "-m", "gtpo_jax", *map(str, args)]


def quick_command_line(*args):
  """Returns the same for a process that need not begin as a user's does; see `preloaded.py`."""
  return [*python(), "-m", "gtpo_jax", *map(str, args)]


def environment():
  """Returns the variables of a process with one device; torch is hidden to save its import."""
  paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "without_torch")])
  return {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": paths}


def gtpo(*args):
  """Runs the command in a new process, as a user does."""
  done = subprocess.run(
    command_line(*args), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
  )
  assert "Traceback" not in done.stderr, done.stderr
  return done


JOIN = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
from gtpo_jax.runtime.startup import prepare_devices
prepare_devices()
"""


def free_port():
  """Returns a port at which nobody listens.

  It is below those that Linux gives to connections, which could take it before the run does.
  """
  for port in random.SystemRandom().sample(range(20000, 32000), 100):
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(("localhost", port))
      return port
  raise OSError("all ports are in use")


def run_connected(code, processes, devices, *args, **variables):
  """Runs Python code in processes that JAX connects, and returns what each has printed.

  The code finds `args` in `sys.argv[4:]`. Each process has `devices` CPU devices.
  """
  address = f"localhost:{free_port()}"
  command = [*python(), "-c", JOIN + code, address, str(processes)]
  started = [
    subprocess.Popen(
      [*command, str(rank), *map(str, args)],
      cwd=ROOT,
      env={**environment(), "JAX_NUM_CPU_DEVICES": str(devices), **variables},
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for rank in range(processes)
  ]
  try:
    outputs = [process.communicate(timeout=240) for process in started]
  finally:
    for process in started:
      process.kill()
  errors = "".join(error[-3000:] for _, error in outputs)
  assert [process.returncode for process in started] == [0] * processes, errors
  return [out for out, _ in outputs]
