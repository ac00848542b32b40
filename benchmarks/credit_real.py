"""Measures whether entropy credit helps SmolLM2-135M-Instruct; docs/experiments.md has the plan.

    python benchmarks/credit_real.py --out=runs/credit_real [--stages=base,probe,train,tables]
      [--cells=PATTERN,...] [--budget_minutes=N]

`base` evaluates the base model. `probe` compares, at fixed parameters, the gradient of every arm
with an estimate of the true gradient. `train` trains arms with several seeds, with the same
problems and sampling keys for all arms of a seed. `tables` prints the results as Markdown and draws
OUT/probe.png and OUT/training.png. Every batch of the probe and every run is stored in OUT when it
is done; the same command continues with those that are missing. Results of earlier sessions in
`--results` count as done. The environment variable GTPO_SMOLLM2 names the folder of the model. It
uses two cores (`train` one core for each of two runs at a time), and gives the same digits whenever
a part runs on the same kind of CPU.
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

from credit_arms import (
  PROBED,
  REAL_ARMS,
  TRAINED,
  Arm,
  ArmBatch,
  collector_of,
  next_batch,
  opened,
  shared_worker,
)
from credit_probe import Gradients, leave_one_out_result, measure
from credit_tables import draw_probes, draw_real_training, of_kind, real_tables
from credit_tasks import TASKS, config_of, write_problems
from credit_training import Sizes, batch_scores, evaluate, train_real
from study import Cells, run_stages, slug, study_parser

from gtpo_jax.config import Config
from gtpo_jax.models.params import Params
from gtpo_jax.probing.gradients import make_gradients
from gtpo_jax.rollout.policies import initial_params
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

STAGES = ("base", "probe", "train", "tables")
SIZES = Sizes(steps=12, every=12, problems=64, samples=8)
SEEDS = 5
PROBE_PROMPTS = 16  # of a batch of the probe; a group has 8 completions, as in training
COMPARED = 12  # batches of the probe on which the arms are compared
REFERENCE = 24  # further batches of the true gradient


def run_base(cells: Cells) -> None:
  """Evaluates the base model on each task."""
  for task in TASKS:
    config = config_of(task, cells.out)

    def make(config: Config = config) -> dict[str, Any]:
      with opened(config) as (worker, rewards):
        return evaluate(config, worker, rewards, initial_params(config, worker), SIZES)

    cells.compute(f"base-{task}", {"task": task, **settings_of(config)}, make)


def run_probes(cells: Cells) -> None:
  """Probes the base model on each task."""
  for task in TASKS:
    sizes = {"batch__prompts": PROBE_PROMPTS, "batch__micro_batches": PROBE_PROMPTS // 4}
    config = config_of(task, cells.out, **sizes)
    probe_cell(cells, task, config, PROBED, COMPARED, REFERENCE)


def probe_cell(
  cells: Cells, task: str, config: Config, arms: dict[str, Arm], compared: int, further: int
) -> dict[str, Any] | None:
  """Returns the probe of a task, or None if batches of it may not be computed now.

  The sketches of each batch are stored in OUT, and the result once all batches are done.

  Args:
    cells: where results are.
    task: the name of the task.
    config: its config.
    arms: the arms to compare.
    compared: batches on which they are compared.
    further: further batches of the reference.
  """
  settings = {"task": task, "compared": compared, "further": further, **settings_of(config)}
  name = f"probe-{task}"
  if (found := cells.find(name, settings)) is not None:
    return found
  folder = cells.out / name
  folder.mkdir(exist_ok=True)
  files = [folder / f"{number:03}.npz" for number in range(compared + further)]
  if any(not file.exists() for file in files):
    with opened(config) as (worker, rewards):
      params = initial_params(config, worker)
      gradients = make_gradients(config, worker.model, params)
      for number, file in enumerate(files):
        part = f"batch-{task}-{number:03}"
        if file.exists():
          continue
        if not cells.may_start(part):
          cells.left.append(part)
          continue
        with cells.timed(part):
          batch = probe_batch(config, worker, rewards, params, number)
          chosen = arms if number < compared else {}
          measure(gradients, batch, chosen, batch_scores(batch)).save(file)
  if any(not file.exists() for file in files):
    return None
  make = lambda: leave_one_out_result([Gradients.read(file) for file in files], compared)
  return cells.compute(name, settings, make)


def probe_batch(
  config: Config, worker: RolloutWorker, rewards: RewardManager, params: Params, number: int
) -> ArmBatch:
  """Returns batch `number`; each has problems and sampling keys of its own."""
  collector = collector_of(config, worker, rewards, first=number)
  return next_batch(collector, params, number)


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
  """Prints the tables of all results, and draws the figures."""
  found = cells.stored()
  print("\n".join(real_tables(found)))
  if probes := of_kind(found, "probe"):
    draw_probes(probes, cells.out / "probe.png", PROBED)
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
  stages = {"base": run_base, "probe": run_probes, "train": train, "tables": show_results}
  run_stages(args, cells, stages)


if __name__ == "__main__":
  main()
