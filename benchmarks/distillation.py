"""Trains students of one teacher with several divergences and credits, and compares them.

    python benchmarks/distillation.py --out=runs/distillation [--seeds=0,1,2,3,4] \\
      [--arms=sampled,sampled+entropy,...] [--config.a.b=VALUE ...]

The teacher is a run of `--config`. Each student starts from the base model of that run, samples
its own completions, and learns from the teacher for 15 steps. An arm is a divergence, with
`+entropy` if `distill.credit` is "entropy". Running the same command again resumes unfinished runs
and prints the table of all finished ones. Fields given as `--config.a.b=VALUE` are set in the
students' runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
from compare import difference, read_metrics, run

QUIET = ["--config.log.tensorboard=False", "--config.checkpoint.every=50"]
STUDENT = [
  "--config.algorithm.name=opd",
  "--config.steps=15",
  "--config.batch.minibatches=4",
  "--config.batch.epochs=2",
  "--config.optimizer.learning_rate=3e-4",
  "--config.optimizer.schedule=linear",
  "--config.eval.every=5",
  "--config.eval.samples=4",
]
CREDIT = "+entropy"
ARMS = "sampled,sampled+entropy,reverse_kl,reverse_kl+entropy,forward_kl,jsd"


class Result(NamedTuple):
  """The accuracies of a finished run."""

  held_out: dict[int, float]  # step -> pass@1 of the evaluation after it
  samples: float  # mean over the steps of the accuracy of the completions that were trained on


def read(workdir: Path, steps: int) -> Result | None:
  """Returns the result of a run, or None if it has not made all its steps."""
  if not (workdir / "metrics.jsonl").exists():
    return None
  rows = read_metrics(workdir)
  if rows[-1]["step"] < steps:
    return None
  held_out = {}
  for row in rows:
    names = [name for name in row if name.startswith("eval/") and "/mean@" in name]
    if names:
      held_out[row["step"]] = row[names[0]]
  return Result(held_out, float(np.mean([row["reward/accuracy"] for row in rows if row["step"]])))


def make_teacher(args: argparse.Namespace, cores: set[int]) -> Path:
  """Returns the workdir of the teacher's run; runs it if it is not finished."""
  workdir = args.out / "teacher"
  command = ["train", f"--config={args.config}", f"--workdir={workdir}", *QUIET]
  run([*command, "--config.eval.every=0"], args.out / "teacher.log", cores)
  return workdir


def train(
  name: str, args: argparse.Namespace, fields: list[str], teacher: Path, cores: set[int]
) -> None:
  """Trains the student ARM-SEED from the teacher's base model."""
  arm, _, seed = name.rpartition("-")
  divergence = arm.removesuffix(CREDIT)
  workdir = args.out / name
  if not (workdir / "base").exists():
    shutil.copytree(teacher / "base", workdir / "base")
  command = [
    "train",
    f"--config={args.config}",
    f"--workdir={workdir}",
    *QUIET,
    *STUDENT,
    *fields,
    f"--config.teacher.path={teacher}",
    f"--config.distill.divergence={divergence}",
    f"--config.distill.credit={'entropy' if arm.endswith(CREDIT) else 'uniform'}",
    f"--config.seed={seed}",
  ]
  run(command, args.out / f"{name}.log", cores)


def mean_and_interval(values: Sequence[float]) -> str:
  """Returns the mean in percent and half the width of its 95 % interval (Student's t)."""
  mean = f"{100 * np.mean(values):.1f}"
  if len(values) < 2:
    return f"{mean} %"
  half = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
  return f"{mean} ± {100 * half:.1f} %"


def table(results: dict[str, dict[str, Result]]) -> list[str]:
  """Returns a row per arm, in Markdown.

  Args:
    results: arm -> seed -> result.

  The differences of an arm with the credit "entropy" are from the same divergence with "uniform",
  in percentage points, paired by seed, with their 95 % intervals.
  """
  evaluated = [step for step in next(iter(next(iter(results.values())).values())).held_out if step]
  values = {f"after {i} steps": lambda x, i=i: x.held_out[i] for i in evaluated}
  values["samples"] = lambda x: x.samples
  heads = ["arm", "seeds", *values, *(f"{name}: entropy - uniform" for name in values)]
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  for arm, found in results.items():
    cells = [mean_and_interval([value(x) for x in found.values()]) for value in values.values()]
    other = results.get(arm.removesuffix(CREDIT), {}) if arm.endswith(CREDIT) else {}
    both = [seed for seed in found if seed in other]
    for value in values.values():
      pairs = [(value(found[seed]), value(other[seed])) for seed in both]
      cells.append(difference(*map(list, zip(*pairs, strict=True))) if pairs else "")
    lines.append(f"| {arm} | {len(found)} | {' | '.join(cells)} |")
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--config", default="configs/tiny.py")
  parser.add_argument("--arms", default=ARMS)
  parser.add_argument("--seeds", default="0,1,2,3,4")
  args, fields = parser.parse_known_args()
  if unknown := [field for field in fields if not field.startswith("--config.")]:
    parser.error(f"{unknown[0]} is not an option; set fields of the config by --config.a.b=VALUE")
  args.out.mkdir(parents=True, exist_ok=True)
  cores = os.sched_getaffinity(0)
  teacher = make_teacher(args, cores)
  accuracy = max(read(teacher, 1).held_out.items())[1]
  print(f"teacher: {accuracy:.1%}", flush=True)

  steps = next(int(x.split("=")[1]) for x in reversed([*STUDENT, *fields]) if ".steps=" in x)
  for seed in args.seeds.split(","):
    for arm in args.arms.split(","):
      name = f"{arm}-{seed}"
      if read(args.out / name, steps):
        continue
      started = time.perf_counter()
      train(name, args, fields, teacher, cores)
      result = read(args.out / name, steps)
      print(f"{name}: {result}, {time.perf_counter() - started:.0f} s", flush=True)

  results: dict[str, dict[str, Result]] = {}
  for workdir in sorted(args.out.glob("*-*/")):
    arm, _, seed = workdir.name.rpartition("-")
    if result := read(workdir, steps):
      results.setdefault(arm, {})[seed] = result
  print("\n".join(table(results)))


if __name__ == "__main__":
  main()
