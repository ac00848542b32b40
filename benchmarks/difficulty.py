"""Compares ways of drawing problems: samples per trained group, and accuracy at equal samples.

    python benchmarks/difficulty.py --out=runs/difficulty [--task=gym] [--seeds=0,1,2,3,4] \\
      [--arms=gtpo,gtpo+data.difficulty=explore,...] [--config.a.b=VALUE ...]

The task is that of configs/countdown.py, or, with `--task=gym`, a mix of three tasks of
reasoning-gym. Its base model is made once (for the mix, from right demonstrations), and every arm
and seed trains from it. An arm is an algorithm with fields of the config, as in compare.py. Dynamic
sampling samples more in a step, so accuracies are compared at the number of samples of the first
arm: the evaluations before and after it are interpolated linearly. Running the same command again
resumes unfinished runs and prints the table of all finished ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from compare import difference, make_base_model, read_metrics
from distillation import mean_and_interval

import gtpo_jax
from gtpo_jax.config import load
from gtpo_jax.data.sources import load_source
from gtpo_jax.logs.display import Display

PROMPTS, GROUP = 16, 8
STEPS = 30
COMMON = [
  f"--config.steps={STEPS}",
  f"--config.batch.prompts={PROMPTS}",
  f"--config.batch.group={GROUP}",
  "--config.eval.every=10",
  "--config.eval.problems=200",
  "--config.eval.samples=4",
  "--config.checkpoint.every=30",
  "--config.log.tensorboard=False",
]
MIX = (
  "rg:basic_arithmetic?min_terms=2&max_terms=3&min_digits=1&max_digits=1",
  "rg:number_sequence?max_complexity=1",
  "rg:spell_backward?min_word_len=3&max_word_len=6",
)
MIX_FIELDS = [
  "--config.data.train=" + ",".join(f"{name}&size=2000&part=train*1" for name in MIX),
  "--config.data.eval=" + ",".join(f"{name}&size=2000&part=held_out" for name in MIX),
  "--config.data.max_prompt_tokens=64",
  "--config.sampling.max_tokens=8",
  "--config.reward.gym_answer=line",
  "--config.warm_start.steps=2500",
]
ARMS = "gtpo,gtpo+data.difficulty=explore,gtpo+algorithm.dynamic_sampling=True"


class Result(NamedTuple):
  """What is compared of a finished run."""

  samples: np.ndarray  # i64[steps + 1], completions sampled until a step
  contrast: float  # share of the sampled groups with right and wrong completions
  accuracies: dict[int, float]  # step -> held-out pass@1

  @property
  def per_group(self) -> float:
    """Completions sampled for one group that has contrast."""
    return GROUP / self.contrast if self.contrast else float("inf")

  def accuracy_at(self, samples: int) -> float:
    """Returns the accuracy after so many samples, between two evaluations."""
    steps = sorted(self.accuracies)
    return float(np.interp(samples, self.samples[steps], [self.accuracies[step] for step in steps]))


def read(workdir: Path) -> Result | None:
  """Returns the result of a run, or None if it has not made all its steps."""
  if not (workdir / "metrics.jsonl").exists():
    return None
  rows = read_metrics(workdir)
  steps = json.loads((workdir / "config.json").read_text())["steps"]
  if rows[-1]["step"] < steps:
    return None
  accuracies = {}
  for row in rows:
    names = [name for name in row if name.startswith("eval/") and "/mean@" in name]
    if names:  # of several sources, the first is all of them
      accuracies[row["step"]] = row[names[0]]
  trained = [row for row in rows if row["step"]]
  groups = np.array([row.get("groups/sampled", PROMPTS) for row in trained])
  flat = np.array([row["groups/all_correct"] + row["groups/all_wrong"] for row in trained])
  samples = GROUP * np.cumsum([0, *groups]).astype(np.int64)
  return Result(samples, 1 - float((groups * flat).sum() / groups.sum()), accuracies)


def table(results: dict[str, dict[str, Result]], first: str) -> list[str]:
  """Returns a row per arm, in Markdown; the differences from `first` are paired by seed.

  Args:
    results: arm -> seed -> result.
    first: the arm that the others are compared with, at its number of samples.
  """
  budget = int(next(iter(results[first].values())).samples[-1])
  heads = ["arm", "seeds", "samples per group with contrast", f"pass@1 after {budget} samples"]
  heads += ["difference", f"groups with contrast in {budget} samples"]
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  for arm, found in results.items():
    accuracies = {seed: result.accuracy_at(budget) for seed, result in found.items()}
    both = [seed for seed in found if seed in results[first]]
    others = [results[first][seed].accuracy_at(budget) for seed in both]
    per_group = [result.per_group for result in found.values()]
    cells = [
      str(len(found)),
      f"{np.mean(per_group):.1f} ({min(per_group):.1f} to {max(per_group):.1f})",
      mean_and_interval(list(accuracies.values())),
      difference([accuracies[seed] for seed in both], others),
      f"{np.mean([budget / value for value in per_group]):.0f}",
    ]
    lines.append(f"| {arm} | {' | '.join(cells)} |")
  return lines


def fields_of(task: str, out: Path) -> list[str]:
  """Returns the fields of the config that a task needs; writes the demonstrations of the mix."""
  if task == "countdown":
    return COMMON
  file = out / "demonstrations.jsonl"
  if not file.exists():
    problems = [
      problem
      for name in MIX
      for problem in load_source(f"{name}&size=20000&part=train", "", 0).problems
    ]
    rows = [{"prompt": list(x.messages), "completion": x.answer} for x in problems]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return [*COMMON, *MIX_FIELDS, f"--config.warm_start.data={file}"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--config", default="configs/countdown.py")
  parser.add_argument("--task", choices=("countdown", "gym"), default="countdown")
  parser.add_argument("--arms", default=ARMS)
  parser.add_argument("--seeds", default="0,1,2,3,4")
  args, fields = parser.parse_known_args()
  if unknown := [field for field in fields if not field.startswith("--config.")]:
    parser.error(f"{unknown[0]} is not an option; set fields of the config by --config.a.b=VALUE")
  args.out.mkdir(parents=True, exist_ok=True)
  fields = [*fields_of(args.task, args.out), *fields]
  base = make_base_model(args, fields, os.sched_getaffinity(0))

  for seed in args.seeds.split(","):
    for arm in args.arms.split(","):
      workdir = args.out / f"{arm}-{seed}"
      if read(workdir):
        continue
      started = time.perf_counter()
      algorithm, *own_fields = arm.split("+")
      settings = [f"algorithm.name={algorithm}", *own_fields, f"seed={seed}", f"model.path={base}"]
      settings += ["warm_start.steps=0", "warm_start.data="]
      settings = [f"--config.{field}" for field in settings]
      config = load(args.config, [*fields, *settings])
      gtpo_jax.train(config, workdir, Display(enabled=False))
      result = read(workdir)
      numbers = f"{result.per_group:.1f} samples per group, {result.accuracies}"
      print(f"{workdir.name}: {numbers}, {time.perf_counter() - started:.0f} s", flush=True)

  found = {
    arm: {
      seed: result for seed in args.seeds.split(",") if (result := read(args.out / f"{arm}-{seed}"))
    }
    for arm in args.arms.split(",")
  }
  print("\n".join(table(found, args.arms.split(",")[0])))


if __name__ == "__main__":
  main()
