"""Trains with the credit of each arm, on tiny tasks that know the truth and with SmolLM2.

    python benchmarks/credit.py --out=runs/credit [--tasks=sums,words] [--stages=base,train,tables]
      [--cells=PATTERN,...] [--budget_minutes=N]

docs/experiments.md has the plans; `credit_rows.py` compares the gradients. `base` evaluates the
base model. `train` trains arms with several seeds, with the same problems and sampling keys for all
arms of a seed. `tables` prints the results as Markdown and draws OUT/training*.png. Every base
model and run is stored in OUT when it is done, and the same command resumes with the next one.
Results of earlier sessions in `--results` count as done. The environment variable
GTPO_SMOLLM2 names the folder of the model. Each of two processes has a core of its own, and gives
the same digits whenever it runs on the same kind of CPU.
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

from credit_arms import ARMS, TRAINED, open_base, opened, shared_worker
from credit_tables import draw_training, of_kind, tables
from credit_tasks import TASKS, config_of, write_problems
from credit_training import Sizes, evaluate, train
from study import Cells, names_of, run_stages, slug, study_parser

from gtpo_jax.config import Config
from gtpo_jax.models.params import Params
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

STAGES = ("base", "train", "tables")
SEEDS = 5


def sizes_of(config: Config, steps: int = 12) -> Sizes:
  """Returns the sizes of a run: tiny models are evaluated on more problems."""
  return Sizes(steps, steps, 200 if config.warm_start.steps else 64, 8)


def base_of(cells: Cells, task: str, worker: RolloutWorker, config: Config) -> Params:
  """Returns the parameters that the runs of a task start from."""
  if config.warm_start.steps:
    return open_base(cells.out, task, worker, config)
  return initial_params(config, worker)


def run_base(cells: Cells, tasks: list[str]) -> None:
  """Evaluates the base model on each task."""
  for task in tasks:
    config = config_of(task, cells.out)

    def make(task: str = task, config: Config = config) -> dict[str, Any]:
      with opened(config) as (worker, rewards):
        params = base_of(cells, task, worker, config)
        return evaluate(config, worker, rewards, params, sizes_of(config))

    cells.compute(f"base-{task}", {"task": task, **settings_of(config)}, make)


def run_training(cells: Cells, tasks: list[str], share: str) -> None:
  """Trains a share of what has no result, all arms of a seed before the next seed.

  Args:
    cells: where results are.
    tasks: the tasks to train on.
    share: "I/N", for the runs I, I + N, I + 2 N and so on.
  """
  first, processes = map(int, share.split("/"))
  chosen = [key for key in TRAINED if key[0].partition("_lora")[0] in tasks]
  runs = [(task, steps, arm) for task, steps in chosen for arm in TRAINED[task, steps]]
  for seed, (task, steps, arm) in list(itertools.product(range(SEEDS), runs))[first::processes]:
    config = config_of(task, cells.out, seed=seed)

    def make(config: Config = config, task: str = task, arm: str = arm, steps: int = steps):
      worker = shared_worker(config_of(task, cells.out))
      with contextlib.closing(RewardManager(config)) as rewards:
        params = base_of(cells, task, worker, config_of(task, cells.out))
        return train(config, worker, rewards, params, ARMS[arm], sizes_of(config, steps))

    sizes = dataclasses.asdict(sizes_of(config, steps))
    settings = {"task": task, "arm": arm, "seed": seed, **sizes, **settings_of(config)}
    suffix = "" if steps == 12 else f"-{steps}"
    cells.compute(f"run-{task}-{slug(arm)}-{seed}{suffix}", settings, make)


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
  """Prints the tables of all results, and draws the figures."""
  found = cells.stored()
  print("\n".join(tables(found)))
  if of_kind(found, "run"):
    draw_training(found, cells.out)


def main() -> None:
  parser = study_parser(__doc__, STAGES, ROOT / "benchmarks/results/credit_real")
  parser.add_argument("--tasks", type=names_of(TASKS), default=list(TASKS))
  parser.add_argument("--share", help="I/N: train only every N-th run, from the I-th, on one core")
  args = parser.parse_args()
  cells = Cells.of(args)
  write_problems(cells.out)
  training = lambda cells: train_on_each_core()
  if args.share or not hasattr(os, "sched_setaffinity"):
    training = lambda cells: run_training(cells, args.tasks, args.share or "0/1")
  base = lambda cells: run_base(cells, args.tasks)
  run_stages(args, cells, {"base": base, "train": training, "tables": show_results})


if __name__ == "__main__":
  main()
