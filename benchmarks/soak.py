"""Tests for leaks and exact resumption: a tiny job runs undisturbed, then with random kills.

    python benchmarks/soak.py --minutes=60 --json=soak.json

The job runs undisturbed for half of the time. After the first quarter of this half, its memory,
open files and threads are sampled every second. A second run with the same number of steps is
killed again and again at random times, and must end with the same metrics, samples and digests.
Kills at specific points are tested in `tests/faults`.
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
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gtpo_jax.logs.log_files import read_jsonl

TIMING_METRICS = ("time/", "tokens/s", "compiles")
UNLIMITED_STEPS = 1_000_000
SECONDS_TO_KILL = (10, 150)
CONFIG = {
  "data.terms": 2,
  "batch.prompts": 8,
  "batch.group": 8,
  "batch.minibatches": 2,
  "warm_start.steps": 50,
  "sampling.warm_up": True,  # with this and without packing, all programs compile at the start
  "batch.pack": False,
  "eval.every": 20,
  "eval.problems": 32,
  "eval.samples": 2,
  "eval.batch": 32,
  "checkpoint.every": 50,
}


def start(workdir: Path, steps: int) -> subprocess.Popen:
  """Starts or resumes the job."""
  values = {"steps": steps, **CONFIG}
  command = [
    sys.executable,
    "-m",
    "gtpo_jax",
    "train",
    f"--config={ROOT / 'configs' / 'tiny.py'}",
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in values.items()),
  ]
  # With one malloc arena per thread, glibc returns less and less of the freed memory.
  environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
  return subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  )


def wait_for(process: subprocess.Popen, status: int) -> None:
  """Waits for a process and checks its exit status."""
  _, error = process.communicate()
  if process.returncode != status:
    sys.exit(f"exit status {process.returncode}, expected {status}\n{error}")


def sample_process(pid: int) -> tuple[int, int, int]:
  """Returns the memory in KiB, open files and threads of a process."""
  lines = Path(f"/proc/{pid}/status").read_text().splitlines()
  status = dict(line.split(":", 1) for line in lines if ":" in line)
  memory = int(status["VmRSS"].split()[0])
  return memory, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def run_undisturbed(workdir: Path, seconds: float) -> list[tuple[int, int, int]]:
  """Runs the job and stops it after `seconds`; returns samples of the process, one per second."""
  process = start(workdir, UNLIMITED_STEPS)
  started = time.monotonic()
  samples = []
  while (passed := time.monotonic() - started) < seconds and process.poll() is None:
    time.sleep(1)
    if passed > seconds / 4:  # after the warm start and all compilation
      samples.append(sample_process(process.pid))
  process.send_signal(signal.SIGTERM)
  wait_for(process, 128 + signal.SIGTERM)
  wait_for(start(workdir, completed_steps(workdir)), 0)  # runs the last evaluation
  return samples


def run_with_kills(workdir: Path, steps: int, rng: random.Random) -> int:
  """Runs the job to the end, killing it at random times; returns the number of kills."""
  kills = 0
  while True:
    process = start(workdir, steps)
    try:
      process.wait(rng.uniform(*SECONDS_TO_KILL))
    except subprocess.TimeoutExpired:
      process.kill()
      process.communicate()
      kills += 1
    else:
      wait_for(process, 0)
      return kills


def completed_steps(workdir: Path) -> int:
  file = workdir / "metrics.jsonl"
  return file.read_bytes().count(b"\n") - 1 if file.exists() else 0


def outcome(workdir: Path) -> tuple:
  """Returns metrics without timings, samples, and the newest checkpoint's step and digests."""
  rows = [
    {key: value for key, value in row.items() if not key.startswith(TIMING_METRICS)}
    for row in read_jsonl(workdir / "metrics.jsonl")
  ]
  newest = max(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  record = (
    (workdir / "checkpoints" / str(newest) / "integrity_record").read_text().partition("\n")[2]
  )
  return rows, read_jsonl(workdir / "samples.jsonl"), newest, json.loads(record)["leaves"]


def tenths(values: list[int]) -> list[float]:
  """Returns the means over ten equal parts of a series."""
  bounds = [i * len(values) // 10 for i in range(11)]
  return [round(sum(values[a:b]) / (b - a), 1) for a, b in itertools.pairwise(bounds)]


def summarize(samples: list[tuple[int, int, int]]) -> dict[str, Any]:
  """Returns memory, files and threads per tenth of the time, and the growth of memory."""
  memory, files, threads = (tenths(values) for values in zip(*samples, strict=True))
  return {
    "looked": len(samples),
    "memory_mib": [round(value / 1024, 1) for value in memory],
    "memory_growth": memory[9] / memory[0] - 1,
    "of_its_second_half": memory[9] / memory[5] - 1,
    "files": files,
    "threads": threads,
  }


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--minutes", type=float, default=60.0, help="approximate total time")
  parser.add_argument("--seed", type=int, default=0, help="seed of the random kill times")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  folder = Path(tempfile.mkdtemp(prefix="gtpo_soak_"))
  started = time.monotonic()
  minutes = lambda: round((time.monotonic() - started) / 60, 1)

  samples = run_undisturbed(folder / "undisturbed", 30 * args.minutes)
  steps = completed_steps(folder / "undisturbed")
  versions = {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint")}
  result = {
    "versions": {"python": platform.python_version(), **versions},
    "steps": steps,
    "minutes_alone": minutes(),
    **summarize(samples),
  }
  print(json.dumps(result), flush=True)

  kills = run_with_kills(folder / "killed", steps, random.Random(args.seed))
  result |= {"kills": kills, "minutes": minutes()}
  if outcome(folder / "killed") != outcome(folder / "undisturbed"):
    sys.exit(f"{folder / 'killed'} differs from {folder / 'undisturbed'} after {kills} kills")
  text = json.dumps(result | {"same": True}, indent=2)
  print(text)
  if args.json:
    args.json.write_text(text + "\n")


if __name__ == "__main__":
  main()
