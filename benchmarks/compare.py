"""Several algorithms from one warm start, over several seeds, and a report that lays them side by side.

    python benchmarks/compare.py --out=runs/compare [--algorithms=gtpo,grpo_s,...] [--seeds=0,1,2] [--config.a.b=VALUE ...]

First the base model: the warm start of `--config`, once, exported as a Hugging Face folder. Then `gtpo train` from that folder for every
algorithm and seed, `--jobs` at once, each on cores of its own. Last `gtpo report` over all of them. The same command again takes up what
is not finished. Fields given as `--config.a.b=VALUE` are set in every run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

GTPO = [sys.executable, "-m", "gtpo_jax"]


def run(arguments: list[str], log: Path, cores: set[int]) -> float:
  """One command of gtpo on these cores, its output in a file; the seconds that it took.

  Raises:
    SystemExit: it failed.
  """
  began = time.perf_counter()
  with log.open("a") as out:
    process = subprocess.Popen([*GTPO, *arguments], stdout=out, stderr=subprocess.STDOUT)
    os.sched_setaffinity(process.pid, cores)  # long before it asks how many there are
  if code := process.wait():
    sys.exit(f"gtpo {' '.join(arguments)} ended with {code}; see {log}")
  return time.perf_counter() - began


def last_evaluation(workdir: Path) -> dict[str, float]:
  """The newest line of a run's metrics.jsonl that was evaluated."""
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return next(row for row in reversed(rows) if any(key.startswith("eval/") for key in row))


def table(out: Path, algorithms: list[str], seeds: list[str]) -> list[str]:
  """Of every algorithm and evaluated number the mean over the seeds, and the standard deviation between them."""
  found = {
    algorithm: [last_evaluation(out / f"{algorithm}-{seed}") for seed in seeds]
    for algorithm in algorithms
  }
  keys = [
    key
    for key in next(iter(found.values()))[0]
    if key.startswith("eval/") and ("pass@" in key or "mean@" in key or "greedy" in key)
  ]
  lines = [
    "| | " + " | ".join(key.split("/", 2)[2] for key in keys) + " |",
    "|---" * (len(keys) + 1) + "|",
  ]
  for algorithm, rows in found.items():
    values = [np.asarray([row[key] for row in rows]) for key in keys]
    lines.append(
      f"| {algorithm} | "
      + " | ".join(f"{100 * x.mean():.1f} +- {100 * x.std(ddof=len(x) > 1):.1f}" for x in values)
      + " |"
    )
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--config", default="configs/compare.py")
  parser.add_argument("--algorithms", default="gtpo,grpo_s,dapo,dapo_forking,grpo")
  parser.add_argument("--seeds", default="0,1,2")
  parser.add_argument("--jobs", type=int, default=2, help="runs at once")
  args, fields = parser.parse_known_args()
  if strange := [field for field in fields if not field.startswith("--config.")]:
    parser.error(
      f"{strange[0]} is not an option; fields of the config are given as --config.a.b=VALUE"
    )
  algorithms = args.algorithms.split(",")
  seeds = args.seeds.split(",")
  cores = sorted(os.sched_getaffinity(0))
  args.out.mkdir(parents=True, exist_ok=True)

  base = args.out / "base_model"
  began = time.perf_counter()
  if not base.exists():
    run(
      [
        "train",
        f"--config={args.config}",
        f"--workdir={args.out / 'base'}",
        *fields,
        "--config.steps=1",
        "--config.eval.problems=16",
      ],
      args.out / "base.log",
      set(cores),
    )
    run(
      ["export", f"--workdir={args.out / 'base'}", "--step=0", f"--out={base}"],
      args.out / "base.log",
      set(cores),
    )
  print(f"base model: {time.perf_counter() - began:.0f} s", flush=True)

  free: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
  for job in range(args.jobs):
    free.put(set(cores[job :: args.jobs]) or set(cores))

  def train(name: str) -> str:
    algorithm, _, seed = name.rpartition("-")
    mine = free.get()
    took = run(
      [
        "train",
        f"--config={args.config}",
        f"--workdir={args.out / name}",
        *fields,
        f"--config.algorithm.name={algorithm}",
        f"--config.seed={seed}",
        f"--config.model.path={base}",
        "--config.warm_start.steps=0",
      ],
      args.out / f"{name}.log",
      mine,
    )
    free.put(mine)
    return f"{name}: {took:.0f} s"

  names = [f"{algorithm}-{seed}" for seed in seeds for algorithm in algorithms]
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    for line in pool.map(train, names):
      print(line, flush=True)
  report = args.out / "report.html"
  run(
    ["report", *(f"--workdir={args.out / name}" for name in names), f"--out={report}"],
    args.out / "report.log",
    set(cores),
  )
  print("\n".join(table(args.out, algorithms, seeds)))
  print(f"{report}; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
  main()
