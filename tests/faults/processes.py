"""Runs of `gtpo train` as processes of their own, one or several together, and what they leave behind."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from etils import epath

from gtpo_jax.checkpoint.integrity import check_seal
from gtpo_jax.reporting.journal import read_jsonl

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
STEPS = 6
SETTINGS = {  # several minibatches, and groups left over from step to step
  "steps": STEPS,
  "data.terms": 2,
  "data.max_prompt_tokens": 20,
  "sampling.max_tokens": 14,
  "batch.prompts": 4,
  "batch.group": 4,
  "batch.minibatches": 2,
  "batch.max_gen_batches": 20,
  "algorithm.name": "dapo",
  "reward.verifier": "run:judge",
  "warm_start.steps": 0,
  "optimizer.learning_rate": 1e-3,
  "eval.every": 3,
  "eval.problems": 8,
  "eval.samples": 2,
  "eval.batch": 8,
  "checkpoint.every": 2,
}
CLOCK = ("time/", "tokens/s", "compiles")


def command(workdir, event, settings):
  return list(
    map(
      str,
      [
        sys.executable,
        HERE / "run.py",
        event,
        "train",
        "--config=configs/base.py",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
      ],
    )
  )


def environment(**more):
  return {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
    **more,
  }


def start(workdir, event, settings):
  return subprocess.run(
    command(workdir, event, settings),
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def start_two(workdir, event, victim, settings):
  """Two processes, to one of which something happens: their statuses and what they printed."""
  return together([command(workdir, event if i == victim else "-", settings) for i in range(2)])


def together(commands, devices=1):
  """One process for each command, joined; their statuses and what they printed."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  processes = []
  for i, line in enumerate(commands):
    env = environment(
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES=str(len(commands)),
      JAX_PROCESS_ID=str(i),
      JAX_NUM_CPU_DEVICES=str(devices),
    )
    processes.append(
      subprocess.Popen(
        line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
      )
    )
  try:
    printed = [process.communicate(timeout=600)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [process.returncode for process in processes], printed


def left_behind(workdir):
  """All that must not depend on what happened on the way: metrics, samples, and the digests of the last checkpoint."""
  rows = [
    {key: value for key, value in row.items() if not key.startswith(CLOCK)}
    for row in read_jsonl(workdir / "metrics.jsonl")
  ]
  assert [row["step"] for row in rows] == list(range(len(rows)))
  steps = sorted(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  seal = check_seal(
    epath.Path(workdir / "checkpoints" / str(steps[-1])), ["params", "rest", "leftovers"]
  )
  return rows, read_jsonl(workdir / "samples.jsonl"), steps[-1], seal["leaves"]
