"""Trains several algorithms with several seeds from one base model, and compares the results.

    python benchmarks/compare.py --out=runs/compare [--algorithms=gtpo,grpo_s,...] \\
      [--seeds=0,1,2] [--config.a.b=VALUE ...]

The base model is made by the warm start of `--config`, and exported once as a Hugging Face folder.
`gtpo train` then runs from that folder for every algorithm and seed, `--jobs` runs at a time, each
on its own cores. Finally `gtpo report` writes a report of all runs. Running the same command again
resumes unfinished runs. Fields given as `--config.a.b=VALUE` are set in every run, and those that
follow an algorithm, as in `gtpo+algorithm.alpha2=0+sampling.staleness=1`, only in its runs.
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
import study

GTPO = [sys.executable, "-m", "gtpo_jax"]
LAST_STEPS = 20  # steps whose means describe the end of a run
BEHAVIOUR = {
  "entropy/mean": "entropy, nats",
  "entropy/correct": "in O+",
  "entropy/incorrect": "in O-",
  "kept/entropy/mean": "entropy of kept groups",
  "length/mean": "length, tokens",
  "groups/all_correct": "groups all correct",
  "clip/high": "clipped above",
  "clip/low": "clipped below",
  "staleness/tokens": "stale tokens",
  "staleness/mean": "mean age, updates",
}


def run(arguments: list[str], log: Path, cores: set[int]) -> float:
  """Runs one gtpo command on these cores, appends its output to `log`, and returns its seconds.

  Raises:
    SystemExit: the command failed.
  """
  started = time.perf_counter()
  with log.open("a") as out:
    process = subprocess.Popen([*GTPO, *arguments], stdout=out, stderr=subprocess.STDOUT)
    os.sched_setaffinity(process.pid, cores)  # the process counts its cores much later
  if code := process.wait():
    sys.exit(f"gtpo {' '.join(arguments)} exited with {code}; see {log}")
  return time.perf_counter() - started


def read_metrics(workdir: Path) -> list[dict[str, float]]:
  """Returns the rows of a run's metrics.jsonl."""
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def last_evaluation(workdir: Path) -> dict[str, float]:
  """Returns the last row of a run's metrics.jsonl that contains an evaluation."""
  rows = read_metrics(workdir)
  return next(row for row in reversed(rows) if any(key.startswith("eval/") for key in row))


def table(out: Path, algorithms: list[str], seeds: list[str]) -> list[str]:
  """Returns a table of each evaluation metric's mean and standard deviation over the seeds.

  Its last column is the difference of pass@1 from the first algorithm: mean and 95 % interval of
  a t-test that is paired by seed.
  """
  evaluations = {
    algorithm: [last_evaluation(out / f"{algorithm}-{seed}") for seed in seeds]
    for algorithm in algorithms
  }
  first = next(iter(evaluations.values()))
  shown = ("pass@", "mean@", "greedy")
  keys = [key for key in first[0] if key.startswith("eval/") and any(part in key for part in shown)]
  pass_at_1 = next(key for key in keys if key.endswith("pass@1"))
  head = [*(key.split("/", 2)[2] for key in keys), f"pass@1 minus that of {algorithms[0]}"]
  lines = []
  for algorithm, rows in evaluations.items():
    cells = [study.mean_and_deviation([100 * row[key] for row in rows], 1) for key in keys]
    pairs = ([row[pass_at_1] for row in of] for of in (rows, first))
    lines.append([algorithm, *cells, study.paired_difference(*pairs)])
  return study.table(["", *head], lines)


def behaviour_table(out: Path, algorithms: list[str], seeds: list[str]) -> list[str]:
  """Returns a table of what the runs do in their last steps, means over steps and seeds.

  The metrics of `BEHAVIOUR` that no run has are left out.
  """
  means = {}
  for algorithm in algorithms:
    rows = [
      row for seed in seeds for row in read_metrics(out / f"{algorithm}-{seed}")[-LAST_STEPS:]
    ]
    # A step may have no value, such as an entropy of O+ without correct completions.
    measured = {key: [row[key] for row in rows if row.get(key) is not None] for key in BEHAVIOUR}
    means[algorithm] = {key: np.mean(values) for key, values in measured.items() if values}
  keys = [key for key in BEHAVIOUR if any(key in found for found in means.values())]
  lines = (
    [algorithm, *(f"{found[key]:.3g}" if key in found else "" for key in keys)]
    for algorithm, found in means.items()
  )
  return study.table([f"last {LAST_STEPS} steps", *(BEHAVIOUR[key] for key in keys)], lines)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
  """Returns the options, and the `--config.a.b=VALUE` arguments."""
  parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0],
    epilog="--config.FIELD=VALUE sets a field of the config in every run.",
  )
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--config", default="configs/compare.py")
  parser.add_argument(
    "--algorithms",
    default="gtpo,grpo_s,dapo,dapo_forking,grpo",
    help="may set fields of the config: gtpo+algorithm.alpha2=0+sampling.staleness=1",
  )
  parser.add_argument("--seeds", default="0,1,2")
  parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time")
  args, fields = parser.parse_known_args()
  if unknown := [field for field in fields if not field.startswith("--config.")]:
    parser.error(f"{unknown[0]} is not an option; set fields of the config by --config.a.b=VALUE")
  return args, fields


def make_base_model(args: argparse.Namespace, fields: list[str], cores: set[int]) -> Path:
  """Returns the Hugging Face folder of the base model; makes it if it does not exist."""
  folder = args.out / "base_model"
  if folder.exists():
    return folder
  workdir = args.out / "base"
  log = args.out / "base.log"
  train = ["train", f"--config={args.config}", f"--workdir={workdir}", *fields]
  run([*train, "--config.steps=1", "--config.eval.problems=16"], log, cores)
  run(["export", f"--workdir={workdir}", "--step=0", f"--out={folder}"], log, cores)
  return folder


def train_all(
  names: list[str], args: argparse.Namespace, fields: list[str], base: Path, cores: list[int]
) -> None:
  """Trains the runs named ALGORITHM-SEED, `--jobs` at a time on separate cores."""
  free_cores: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
  for job in range(args.jobs):
    free_cores.put(set(cores[job :: args.jobs]) or set(cores))

  def train(name: str) -> str:
    algorithm, _, seed = name.rpartition("-")
    algorithm, *own_fields = algorithm.split("+")
    own_cores = free_cores.get()
    command = [
      "train",
      f"--config={args.config}",
      f"--workdir={args.out / name}",
      *fields,
      f"--config.algorithm.name={algorithm}",
      *(f"--config.{field}" for field in own_fields),
      f"--config.seed={seed}",
      f"--config.model.path={base}",
      "--config.warm_start.steps=0",
    ]
    seconds = run(command, args.out / f"{name}.log", own_cores)
    free_cores.put(own_cores)
    return f"{name}: {seconds:.0f} s"

  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    for line in pool.map(train, names):
      print(line, flush=True)


def main() -> None:
  args, fields = parse_args()
  algorithms = args.algorithms.split(",")
  seeds = args.seeds.split(",")
  cores = sorted(os.sched_getaffinity(0))
  args.out.mkdir(parents=True, exist_ok=True)
  started = time.perf_counter()
  base = make_base_model(args, fields, set(cores))
  print(f"base model: {time.perf_counter() - started:.0f} s", flush=True)

  names = [f"{algorithm}-{seed}" for seed in seeds for algorithm in algorithms]
  train_all(names, args, fields, base, cores)
  report = args.out / "report.html"
  workdirs = [f"--workdir={args.out / name}" for name in names]
  run(["report", *workdirs, f"--out={report}"], args.out / "report.log", set(cores))
  print(
    "\n".join(table(args.out, algorithms, seeds) + behaviour_table(args.out, algorithms, seeds))
  )
  print(f"{report}; {time.perf_counter() - started:.0f} s in total")


if __name__ == "__main__":
  main()
