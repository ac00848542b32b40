"""A tiny job left alone for a while, then the same job killed at random: does anything grow, and does it end the same?

    python benchmarks/soak.py --minutes=60 --json=soak.json

For half of the time the job runs undisturbed; once a quarter of that is over, memory, open files and threads are looked at each
second. Where it has got to is the end of the second run, which is killed again and again, and must leave the same metrics, samples and
digests. Kills fall at random times, so that what they hit is chance; `tests/faults` has them at marked points.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gtpo_jax.reporting.journal import read_jsonl

CLOCK = ("time/", "tokens/s", "compiles")
FOR_EVER = 1_000_000


def start(workdir: Path, steps: int) -> subprocess.Popen:
  small = {
    "steps": steps,
    "data.terms": 2,
    "batch.prompts": 8,
    "batch.group": 8,
    "batch.minibatches": 2,
    "warm_start.steps": 50,
    "sampling.warm_up": True,
    "batch.pack": False,  # nothing is left to be compiled later
    "eval.every": 20,
    "eval.problems": 32,
    "eval.samples": 2,
    "eval.batch": 32,
    "checkpoint.every": 50,
  }
  command = [
    sys.executable,
    "-m",
    "gtpo_jax",
    "train",
    f"--config={ROOT / 'configs' / 'tiny.py'}",
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in small.items()),
  ]
  environment = {
    **os.environ,
    "MALLOC_ARENA_MAX": "1",
  }  # with one for each thread, glibc keeps more and more of what was given back
  return subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  )


def finish(process: subprocess.Popen, status: int) -> None:
  _, error = process.communicate()
  if process.returncode != status:
    sys.exit(f"exit status {process.returncode}, not {status}\n{error}")


def leave_alone(workdir: Path, seconds: float) -> list[tuple[int, int, int]]:
  """Runs the job for so many seconds, asks it to stop and lets it finish there; (memory in KiB, open files, threads) each second."""
  process = start(workdir, FOR_EVER)
  began = time.monotonic()
  seen = []
  while (passed := time.monotonic() - began) < seconds and process.poll() is None:
    time.sleep(1)
    if passed > seconds / 4:  # the warm start is over, and all is compiled
      status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if ":" in line
      )
      seen.append(
        (
          int(status["VmRSS"].split()[0]),
          len(os.listdir(f"/proc/{process.pid}/fd")),
          int(status["Threads"]),
        )
      )
  process.send_signal(signal.SIGTERM)
  finish(process, 128 + signal.SIGTERM)
  finish(start(workdir, steps_done(workdir)), 0)  # the last evaluation
  return seen


def kill_at_random(workdir: Path, steps: int, chance: random.Random) -> int:
  """Runs the job to the end, killing it each 10 to 150 seconds; the number of kills."""
  kills = 0
  while True:
    process = start(workdir, steps)
    try:
      process.wait(chance.uniform(10, 150))
    except subprocess.TimeoutExpired:
      process.kill()
      process.communicate()
      kills += 1
    else:
      finish(process, 0)
      return kills


def steps_done(workdir: Path) -> int:
  file = workdir / "metrics.jsonl"
  return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


def result(workdir: Path) -> tuple:
  rows = [
    {key: value for key, value in row.items() if not key.startswith(CLOCK)}
    for row in read_jsonl(workdir / "metrics.jsonl")
  ]
  newest = max(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  seal = (workdir / "checkpoints" / str(newest) / "seal").read_text().partition("\n")[2]
  return rows, read_jsonl(workdir / "samples.jsonl"), newest, json.loads(seal)["leaves"]


def tenths(values: list[int]) -> list[float]:
  """The means of the ten parts of a time."""
  cuts = [i * len(values) // 10 for i in range(11)]
  return [round(sum(values[a:b]) / (b - a), 1) for a, b in itertools.pairwise(cuts)]


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--minutes", type=float, default=60.0, help="about how long it takes in all")
  parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  folder = Path(tempfile.mkdtemp(prefix="gtpo_soak_"))
  began = time.monotonic()
  minutes = lambda: round((time.monotonic() - began) / 60, 1)
  seen = leave_alone(folder / "whole", 30 * args.minutes)
  steps = steps_done(folder / "whole")
  alone = minutes()
  memory, files, threads = (tenths(values) for values in zip(*seen, strict=True))
  versions = {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint")}
  found = {
    "versions": {"python": platform.python_version(), **versions},
    "steps": steps,
    "minutes_alone": alone,
    "looked": len(seen),
    "memory_mib": [round(value / 1024, 1) for value in memory],
    "memory_growth": memory[9] / memory[0] - 1,
    "of_its_second_half": memory[9] / memory[5] - 1,
    "files": files,
    "threads": threads,
  }
  print(json.dumps(found), flush=True)
  found |= {
    "kills": kill_at_random(folder / "killed", steps, random.Random(args.seed)),
    "minutes": minutes(),
  }
  if result(folder / "killed") != result(folder / "whole"):
    sys.exit(f"{folder / 'killed'} differs from {folder / 'whole'} after {found['kills']} kills")
  text = json.dumps(found | {"same": True}, indent=2)
  print(text)
  if args.json:
    args.json.write_text(text + "\n")


if __name__ == "__main__":
  main()
