"""Measures whether entropy credit helps SmolLM2-135M-Instruct; docs/experiments.md has the plan.

    python benchmarks/credit_real.py --out=runs/credit_real [--stages=base,train,tables]
      [--cells=PATTERN,...] [--budget_minutes=N]

`base` evaluates the base model. `train` trains arms with several seeds, with the same problems and
sampling keys for all arms of a seed. `tables` prints the results as Markdown and draws
OUT/training.png. Every run is stored in OUT when it is done; the same command continues with those
that are missing. Results of earlier sessions in `--results` count as done. The environment variable
GTPO_SMOLLM2 names the folder of the model. It uses two cores (`train` one core for each of two runs
at a time), and gives the same digits whenever a part runs on the same kind of CPU. `credit_rows.py`
compares the gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gtpo_jax.runtime.startup import prepare_jax

CORES = 2  # XLA divides sums among its threads, so the digits depend on their number
if __name__ == "__main__" and hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
prepare_jax()  # before JAX is imported

from credit_arms import REAL_ARMS, TRAINED, opened, shared_worker
from credit_tables import draw_real_training, of_kind, real_tables
from credit_tasks import TASKS, config_of, write_problems
from credit_training import Sizes, evaluate, train_real
from study import Cells, run_stages, slug, study_parser

from gtpo_jax.config import Config
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.runtime.errors import UserError

STAGES = ("base", "train", "tables")
SIZES = Sizes(steps=12, every=12, problems=64, samples=8)
SEEDS = 5


def run_base(cells: Cells) -> None:
  """Evaluates the base model on each task."""
  for task in TASKS:
    config = config_of(task, cells.out)

    def make(config: Config = config) -> dict[str, Any]:
      with opened(config) as (worker, rewards):
        return evaluate(config, worker, rewards, initial_params(config, worker), SIZES)

    cells.compute(f"base-{task}", {"task": task, **settings_of(config)}, make)


def run_training(cells: Cells, share: str) -> None:
  """Trains a share of what has no result, all arms of a seed before the next seed.

  Args:
    cells: where results are.
    share: "I/N", for the runs I, I + N, I + 2 N and so on.
  """
  first, processes = map(int, share.split("/"))
  arms = [(task, arm) for task in TRAINED for arm in TRAINED[task]]
  for seed, (task, arm) in list(itertools.product(range(SEEDS), arms))[first::processes]:
    config = config_of(task, cells.out, seed=seed)
    train_cell(cells, f"run-{task}-{slug(arm)}-{seed}", task, config, arm)


def train_on_each_core() -> None:
  """Trains with one process per core: a second core makes a run hardly faster."""
  available = sorted(os.sched_getaffinity(0))
  children = []
  for number, core in enumerate(available):
    share = f"--share={number}/{len(available)}"
    os.sched_setaffinity(0, [core])  # the child inherits it
    children.append(subprocess.Popen([sys.executable, *sys.argv, "--stages=train", share]))
  os.sched_setaffinity(0, available)
  statuses = [child.wait() for child in children]
  if any(statuses):
    raise UserError("a training process failed; its error is above")


def train_cell(
  cells: Cells, name: str, task: str, config: Config, arm: str, sizes: Sizes = SIZES
) -> dict[str, Any] | None:
  """Returns the result of one run, or None if it may not be computed now."""

  def make() -> dict[str, Any]:
    worker = shared_worker(config_of(task, cells.out))
    with contextlib.closing(RewardManager(config)) as rewards:
      params = initial_params(config, worker)
      return train_real(config, worker, rewards, params, REAL_ARMS[arm], sizes)

  settings = {"task": task, "arm": arm, "seed": config.seed, **dataclasses.asdict(sizes)}
  return cells.compute(name, {**settings, **settings_of(config)}, make)


def settings_of(config: Config) -> dict[str, Any]:
  """Returns the fields of a config that decide its numbers, without paths of this machine."""
  return {
    "prompts": config.batch.prompts,
    "group": config.batch.group,
    "max_tokens": config.sampling.max_tokens,
    "temperature": config.sampling.temperature,
    "compute_dtype": config.model.compute_dtype,
    "learning_rate": config.optimizer.learning_rate,
    "lora_rank": config.model.lora_rank,
    "data": Path(config.data.train).name,
  }


def show_results(cells: Cells) -> None:
  """Prints the tables of all results, and draws the figure."""
  found = cells.stored()
  print("\n".join(real_tables(found)))
  if of_kind(found, "run"):
    draw_real_training(found, cells.out / "training.png")


def main() -> None:
  parser = study_parser(__doc__, STAGES, ROOT / "benchmarks/results/credit_real")
  parser.add_argument("--share", help="I/N: train only every N-th run, from the I-th, on one core")
  args = parser.parse_args()
  cells = Cells.of(args)
  write_problems(cells.out)
  train = lambda cells: train_on_each_core()
  if args.share or not hasattr(os, "sched_setaffinity"):
    train = lambda cells: run_training(cells, args.share or "0/1")
  stages = {"base": run_base, "train": train, "tables": show_results}
  run_stages(args, cells, stages)


if __name__ == "__main__":
  main()
