"""Measures whether the credit of turns makes small models learn faster; see docs/turns.md.

    python benchmarks/credit_turns.py --out=runs/credit_turns [--stages=train,truth,tables]
      [--cells=PATTERN,...] [--budget_minutes=N]

The base model of each task imitates an imperfect player. `train` trains every arm with five seeds,
with the same problems and sampling keys for all arms of a seed. `truth` compares the credit that
each arm gives to the base model's turns with their true advantages. `tables` prints the results as
Markdown and draws OUT/turns.png. Every run is stored in OUT when it is done; the same command
continues with those that are missing. Results of earlier sessions in `--results` count as done. It
uses one core, and gives the same digits whenever it runs on the same kind of CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # env.make names a module beside this one

from gtpo_jax.runtime.startup import prepare_jax

# XLA divides sums among its threads, so with more cores the digits would depend on how many.
if __name__ == "__main__" and hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
prepare_jax()  # before JAX is imported

import numpy as np
from credit_arms import Arm, collector_of, open_base, shared_worker
from credit_tables import by_training, of_kind
from credit_training import Sizes, train
from scipy import stats
from study import (
  Cells,
  Seeds,
  draw_curves,
  mean_and_deviation,
  paired_difference,
  pass_by_problem,
  run_stages,
  slug,
  study_parser,
  table,
)
from turn_tasks import TURN_TASKS, config_of

from gtpo_jax.cli.probing.statistics import holm
from gtpo_jax.logs.credit_scores import step_metrics
from gtpo_jax.logs.truth import batch_truth
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

SEEDS = 5
SIZES = Sizes(steps=12, every=12, problems=32, samples=4)
LAST_STEPS = 4
LAST_TASK = "guess127"
TRUTH_BATCHES = 4
TRUTH_PROMPTS = 32  # of each
# All arms are one algorithm, which trains on every group and averages over tokens.
GTPO = {"name": "gtpo", "norm_scope": "group", "loss_aggregation": "token", "contrast": False}
UNIFORM = {**GTPO, "alpha2": 0.0}
STATE = {"turn_credit": "state", "turn_discount": 0.95}  # as in gigpo
# By name: the settings of the section `algorithm`.
TURN_ARMS: dict[str, dict[str, Any]] = {
  "outcome": UNIFORM,
  "state": {**UNIFORM, **STATE},
  "reward": {**UNIFORM, "turn_credit": "reward"},  # as in mt_grpo
  "return": {**UNIFORM, "turn_credit": "return", "outcome_weight": 0.0},  # as in turn_return
  "outcome, entropy": GTPO,
  "state, entropy": {**GTPO, **STATE},
}
# By arm: what it is compared with.
CONTROLS = {
  "state": "outcome",
  "reward": "outcome",
  "return": "outcome",
  "outcome, entropy": "outcome",
  "state, entropy": "state",
}
# By task: its arms. Only the calls of a chain have rewards of their own.
TRAINED = {
  "guess31": ("outcome", "state", "outcome, entropy", "state, entropy"),
  "chain": ("outcome", "state", "reward", "return", "state, entropy"),
  "guess127": ("outcome", "state"),
}
HEADS = ("arm", "seeds", "steps 2 on", "difference, 95 % interval", "p, Holm", "last 4", "held out")


def run_training(cells: Cells) -> None:
  """Trains what has no result: all arms of a seed before the next seed, the longest task last."""
  pairs = [(task, arm) for task in TRAINED for arm in TRAINED[task] if task != LAST_TASK]
  last = [(LAST_TASK, arm) for arm in TRAINED[LAST_TASK]]
  for seed, (task, arm) in (
    *itertools.product(range(SEEDS), pairs),
    *itertools.product(range(SEEDS), last),
  ):
    settings = {"task": task, "arm": arm, "seed": seed, **dataclasses.asdict(SIZES)}
    settings["prompts"] = config_of(task, {}).batch.prompts
    make = functools.partial(train_cell, cells.out, task, arm, seed)
    cells.compute(f"run-{task}-{slug(arm)}-{seed}", settings, make)


def train_cell(out: Path, task: str, arm: str, seed: int) -> dict[str, Any]:
  """Returns the result of one run."""
  config = config_of(task, TURN_ARMS[arm], seed)
  worker = shared_worker(config_of(task, {}))
  with contextlib.closing(RewardManager(config)) as rewards:
    params = open_base(out, task, worker, config_of(task, {}))
    arm = Arm(config.resolved_algorithm)
    return train(config, worker, rewards, params, arm, SIZES, minibatches=1)


def run_truth(cells: Cells) -> None:
  """Scores the credit of every arm on batches of each base model."""
  for task in TRAINED:
    settings = {"task": task, "batches": TRUTH_BATCHES, "prompts": TRUTH_PROMPTS}
    make = functools.partial(truth_cell, cells.out, task)
    cells.compute(f"truth-{task}", settings, make)


def truth_cell(out: Path, task: str) -> dict[str, Any]:
  """Returns the metrics `truth/turn_*` of each arm that the task trains, by batch."""
  config = config_of(task, TURN_ARMS["state"], batch__prompts=TRUTH_PROMPTS)
  worker = RolloutWorker(config)
  algorithms = {arm: config_of(task, TURN_ARMS[arm]).resolved_algorithm for arm in TRAINED[task]}
  found: dict[str, Any] = {arm: [] for arm in algorithms}
  with contextlib.closing(RewardManager(config)) as rewards:
    params = open_base(out, task, worker, config_of(task, {}))
    collector = collector_of(config, worker, rewards)
    for _ in range(TRUTH_BATCHES):
      batch = collector.collect(params, 0, print)
      truth = batch_truth(batch, worker)
      for arm, algorithm in algorithms.items():
        metrics = step_metrics(algorithm, batch, truth)
        found[arm].append({key: x for key, x in metrics.items() if "/turn_" in key})
  return {"arms": found}


def tables(tasks: dict[str, dict[str, Seeds]]) -> list[str]:
  """Returns a table for each task: accuracies in %, with differences paired by seed."""
  pairs = {
    (task, arm): (speeds(by_arm[arm], by_arm[control]), speeds(by_arm[control], by_arm[arm]))
    for task, by_arm in tasks.items()
    for arm, control in CONTROLS.items()
    if arm in by_arm and control in by_arm
  }
  tested = {key: pair for key, pair in pairs.items() if len(pair[0]) > 1}
  p_values = holm({key: float(stats.ttest_rel(*pair).pvalue) for key, pair in tested.items()})
  lines = []
  for task, by_arm in tasks.items():
    rows = []
    for arm, seeds in by_arm.items():
      change = p_value = ""
      if (task, arm) in tested:
        change = f"{paired_difference(*tested[task, arm])} over {CONTROLS[arm]}"
        p_value = f"{p_values[task, arm]:.2g}"
      evaluations = [run["evaluations"][str(SIZES.steps)] for run in seeds.values()]
      held_out = [pass_by_problem(found, 1).mean() for found in evaluations]
      means = (speeds(seeds, seeds), accuracies(seeds, -LAST_STEPS), held_out)
      first, last, held_out = (mean_and_deviation(100 * np.asarray(x), 1) for x in means)
      rows.append([arm, str(len(seeds)), first, change, p_value, last, held_out])
    lines += ["", task, *table(HEADS, rows)]
  return lines


def truth_tables(found: dict[str, Any]) -> list[str]:
  """Returns a table for each task: how the credit of arms agrees with the truth of turns."""
  lines = []
  for task, result in found.items():
    keys = [
      f"truth/turn_{score}/{player}"
      for player in ("policy", "best")
      for score in ("sign", "rank", "rank_episode")
      if f"truth/turn_{score}/{player}" in next(iter(result["arms"].values()))[0]
    ]
    rows = [
      [arm, *(mean_and_deviation([batch[key] for batch in batches], 2) for key in keys)]
      for arm, batches in result["arms"].items()
    ]
    heads = [key.removeprefix("truth/turn_") for key in keys]
    lines += ["", f"The base model of {task}", *table(("arm", *heads), rows)]
  return lines


def speeds(seeds: Seeds, others: Seeds) -> list[float]:
  """Returns the mean accuracy of batches after the first, of the seeds that others have too.

  The first batch is the base model's.
  """
  return accuracies({seed: seeds[seed] for seed in sorted(set(seeds) & set(others))}, 1)


def accuracies(seeds: Seeds, first: int) -> list[float]:
  """Returns the mean accuracy of each seed's batches, from the index `first` on."""
  return [
    float(np.mean([row["accuracy"] for row in run["curve"][first:]])) for run in seeds.values()
  ]


def show_results(cells: Cells) -> None:
  """Prints the tables of all results, and draws the figure."""
  found = by_training(cells.stored(), ("task",), TURN_ARMS)
  tasks = {task: found[task,] for task in TURN_TASKS if (task,) in found}
  print("\n".join([*tables(tasks), *truth_tables(of_kind(cells.stored(), "truth"))]))
  draw_curves(tasks, {"accuracy": "right episodes"}, TURN_ARMS, cells.out / "turns.png")


STAGES = {"train": run_training, "truth": run_truth, "tables": show_results}


def main() -> None:
  args = study_parser(__doc__, STAGES, ROOT / "benchmarks/results/credit_turns").parse_args()
  run_stages(args, Cells.of(args), STAGES)


if __name__ == "__main__":
  main()
