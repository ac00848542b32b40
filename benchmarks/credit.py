"""Measures on tasks that know the truth where algorithms put their credit, and what it does.

    python benchmarks/credit.py --out=runs/credit [--stages=train,tables] [--steps=12,100]

`train` trains some arms with several seeds, with the same problems and sampling keys for all arms
of a seed. `tables` prints the results as Markdown and draws OUT/training.png. Every base model and
run is stored in OUT when it is done; the same command continues with those that are missing. It
uses one core, and gives the same numbers whenever it runs on the same kind of CPU.
`credit_rows.py` compares the gradients.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from typing import Any

from gtpo_jax.runtime.startup import prepare_jax

# XLA divides sums among its threads, so with more cores the numbers would depend on how many.
if hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
prepare_jax()  # before JAX is imported

from credit_arms import ARMS, BASELINE, open_base, opened
from credit_tables import draw_training, training_tables
from credit_training import train_arm
from study import Cells, names_of, run_stages, slug, study_parser

from gtpo_jax.config import Config, load

FILLER = ["--config.data.filler=2", "--config.sampling.max_tokens=26"]
# By name: the config file and the overrides of a base model.
BASES = {
  "filler2": ("configs/forks.py", FILLER),
  "confident": ("configs/forks.py", ["--config.data.train=forks_confident", *FILLER]),
  "countdown": ("configs/compare.py", []),
}
MAIN_ARMS = (
  BASELINE,
  "gtpo, alpha2 = 0.1",
  "gtpo, alpha2 = 1",
  "alpha2 = 1, entropies shuffled",
  "oracle mask",
)
LONG_ARMS = (BASELINE, "gtpo, alpha2 = 0.1", "gtpo, alpha2 = 1", "oracle mask")
BY_COMPLETION = (
  "gtpo_v1, alpha = 1",
  "grpo_s, beta2 = 0",
  "grpo_s, beta2 = 0.1",
  "grpo_s, beta2 = 1",
  "grpo_s, entropies shuffled",
  "ours: rewards of grpo_s, token ratios",
)
# By number of steps and base model: the arms that are trained, unless --arms says otherwise.
TRAINED = {
  12: {
    "filler2": (*MAIN_ARMS, "gtpo_v1, alpha = 1", "dapo_forking", "dapo"),
    "confident": MAIN_ARMS,
    "countdown": (*MAIN_ARMS, *BY_COMPLETION),
  },
  100: {"filler2": LONG_ARMS, "confident": LONG_ARMS, "countdown": (*LONG_ARMS, *BY_COMPLETION)},
}
STAGES = ("train", "tables")


def parse_args() -> argparse.Namespace:
  """Returns the options, and exits if one names something that does not exist."""
  parser = study_parser(__doc__, STAGES)
  parser.add_argument("--bases", type=names_of(BASES), default=list(BASES))
  parser.add_argument("--arms", type=names_of(ARMS, ";"), help="arms to train, separated by ;")
  parser.add_argument("--seeds", default="0,1,2,3,4")
  parser.add_argument("--steps", default="12,100", help="steps of the training runs")
  return parser.parse_args()


def config_of(base: str) -> Config:
  """Returns the config of a base model, and of everything that starts from it."""
  file, overrides = BASES[base]
  return load(
    file, [*overrides, "--config.log.tensorboard=False", "--config.batch.micro_batches=1"]
  )


def run_training(args: argparse.Namespace, cells: Cells) -> None:
  """Trains all arms of a seed before the next seed."""
  seeds = [int(seed) for seed in args.seeds.split(",")]
  lengths = [int(steps) for steps in args.steps.split(",")]
  for steps, base in itertools.product(lengths, args.bases):
    arms = args.arms or TRAINED.get(steps, {}).get(base, MAIN_ARMS)
    config = config_of(base)
    with opened(config) as (worker, rewards):
      for seed, arm in itertools.product(seeds, arms):

        def make(seed: int = seed, arm: str = arm) -> dict[str, Any]:
          params = open_base(args.out, base, worker, config)  # noqa: B023
          return train_arm(config, worker, rewards, params, ARMS[arm], seed, steps)  # noqa: B023

        settings = {"base": base, "arm": arm, "seed": seed, "steps": steps}
        cells.compute(f"run-{base}-{slug(arm)}-{seed}-{steps}", settings, make)


def show_results(cells: Cells) -> None:
  """Prints the tables of all results, and draws the figure."""
  runs = cells.stored("run")
  if runs:
    print("\n".join(training_tables(runs)))
    draw_training(runs, cells.out / "training.png")


def main() -> None:
  args = parse_args()
  stages = {"train": functools.partial(run_training, args), "tables": show_results}
  run_stages(args, Cells(args.out), stages)


if __name__ == "__main__":
  main()
