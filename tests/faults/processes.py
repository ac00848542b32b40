"""Starts `gtpo train` in one or several processes, and reads what a run wrote."""

import os
import subprocess
from pathlib import Path

from command_line import free_port
from etils import epath
from preloaded import python
from toys import TIMING

from gtpo_jax.checkpoint.integrity import check_integrity
from gtpo_jax.logs.log_files import read_jsonl

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
STEPS = 6
SETTINGS = {  # several minibatches, and groups left over between steps
  "steps": STEPS,
  "data.terms": 2,
  "data.max_prompt_tokens": 20,
  "sampling.max_tokens": 14,
  "batch.prompts": 4,
  "batch.group": 4,
  "batch.minibatches": 2,
  "batch.max_gen_batches": 20,
  "algorithm.name": "dapo",
  "reward.verifier": "run:verify",
  "warm_start.steps": 0,
  "optimizer.learning_rate": 1e-3,
  "eval.every": 3,
  "eval.problems": 8,
  "eval.samples": 2,
  "eval.batch": 8,
  "checkpoint.every": 2,
}
# Of runs without dynamic sampling.
PLAIN = {key: x for key, x in SETTINGS.items() if key != "batch.max_gen_batches"}
# Prefixes of metrics that may differ.
CHANGING = (*TIMING, "judge/", "env/seconds", "env/idle_share")


def run_py(event, *args):
  """Returns the command of `gtpo ARGS` in which `event` happens; see run.py."""
  return [*python(), str(HERE / "run.py"), event, *args]


def command(workdir, event, settings):
  """Returns the command of a training run in which `event` happens."""
  overrides = [f"--config.{key}={value}" for key, value in settings.items()]
  return run_py(event, "train", "--config=configs/base.py", f"--workdir={workdir}", *overrides)


def environment(**more):
  return {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE, HERE.parent / "without_torch"])),
    **more,
  }


def start(workdir, event, settings, **more):
  """Runs one process to its end, with `more` environment variables."""
  return subprocess.run(
    command(workdir, event, settings),
    cwd=ROOT,
    env=environment(**more),
    capture_output=True,
    text=True,
    timeout=600,
  )


def start_two(workdir, event, victim, settings):
  """Runs two processes with an event in one; returns their exit statuses and their output."""
  events = [event if i == victim else "-" for i in range(2)]
  return start_together([command(workdir, event, settings) for event in events])


def start_together(commands, devices=1):
  """Runs commands as the processes of one run; returns their exit statuses and their output."""
  address = f"localhost:{free_port()}"
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


def read_result(workdir):
  """Returns the results that interruptions must not change.

  These are the metrics, the samples, the last step and the digests of its checkpoint.
  """
  rows = [
    {key: value for key, value in row.items() if not key.startswith(CHANGING)}
    for row in read_jsonl(workdir / "metrics.jsonl")
  ]
  assert [row["step"] for row in rows] == list(range(len(rows)))
  steps = sorted(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  checkpoint = epath.Path(workdir / "checkpoints" / str(steps[-1]))
  record = check_integrity(checkpoint, ["params", "rest", "leftovers"])
  return rows, read_jsonl(workdir / "samples.jsonl"), steps[-1], record.leaves
