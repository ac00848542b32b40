"""A tiny job killed at random for some minutes: does it end as one that nothing happened to, and does anything grow?

    python benchmarks/soak.py --minutes=60 --json=soak.json

Kills fall at random times, so that what they hit is chance; `tests/faults` has them at marked points. Memory, open files and threads are
those of the longest life, sampled each second once it is past its first steps.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLOCK = ("time/", "tokens/s", "compiles")


def command(workdir: Path, steps: int) -> list[str]:
  small = {"steps": steps, "data.terms": 2, "batch.prompts": 8, "batch.group": 8, "warm_start.steps": 50, "eval.every": 20,
           "eval.problems": 32, "eval.samples": 2, "eval.batch": 32, "checkpoint.every": 5}
  return [sys.executable, "-m", "gtpo_jax", "train", f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={workdir}",
          *(f"--config.{key}={value}" for key, value in small.items())]


def live(workdir: Path, steps: int, seconds: float) -> tuple[int | None, list[tuple[int, int, int]]]:
  """One life of the job, killed after so many seconds; its status (None: killed) and (memory in KiB, open files, threads) over time."""
  process = subprocess.Popen(command(workdir, steps), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  began, first, seen = time.monotonic(), last_step(workdir), []
  while process.poll() is None:
    if time.monotonic() - began > seconds:
      process.kill()
      process.wait()
      return None, seen
    time.sleep(1)
    if last_step(workdir) > first + 25:  # past compilation and the first evaluation
      try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":" in line)
        seen.append((int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{process.pid}/fd")), int(status["Threads"])))
      except (OSError, KeyError):  # it has just ended
        break
  process.wait()
  if process.returncode:
    sys.exit(process.stderr.read())
  return process.returncode, seen


def last_step(workdir: Path) -> int:
  file = workdir / "metrics.jsonl"
  return file.read_bytes().count(b"\n") if file.exists() else 0


def result(workdir: Path) -> tuple:
  from gtpo_jax.reporting.journal import read_jsonl
  rows = [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in read_jsonl(workdir / "metrics.jsonl")]
  newest = max(int(entry.name) for entry in (workdir / "checkpoints").iterdir())
  seal = (workdir / "checkpoints" / str(newest) / "seal").read_text().partition("\n")[2]
  return rows, newest, json.loads(seal)["leaves"]


def growth(values: list[int]) -> float:
  """The last quarter's mean over the first quarter's, less 1."""
  quarter = max(len(values) // 4, 1)
  return sum(values[-quarter:]) / sum(values[:quarter]) - 1


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  chance, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="gtpo_soak_"))
  until = time.monotonic() + 60 * args.minutes
  began = time.monotonic()
  _, seen = live(folder / "whole", args.steps, float("inf"))  # the uninterrupted run, whose growth is looked at
  whole, alone = result(folder / "whole"), time.monotonic() - began
  lives = runs = kills = 0
  while time.monotonic() < until or not runs:
    workdir = folder / f"killed_{runs}"
    while True:
      lives += 1
      status, _ = live(workdir, args.steps, chance.uniform(0.1, 0.5) * alone + 15)
      kills += status is None
      if status == 0:
        break
    if result(workdir) != whole:
      sys.exit(f"{workdir} differs from {folder / 'whole'} after {kills} kills")
    runs += 1
  found = {"minutes": (time.monotonic() - began) / 60, "runs": runs, "kills": kills, "steps": args.steps, "seconds_alone": alone,
           "samples": len(seen)}
  if seen:
    found |= {"memory_mib": seen[-1][0] / 1024, "memory_growth": growth([memory for memory, *_ in seen]),
              "files": [seen[0][1], seen[-1][1]], "threads": [seen[0][2], seen[-1][2]]}
  text = json.dumps(found, indent=2)
  print(text)
  if args.json:
    args.json.write_text(text + "\n")


if __name__ == "__main__":
  main()
