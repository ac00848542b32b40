"""Compares steps of `configs/guess.py` whose environment answers late with others at once.

    gtpo train --config=configs/guess.py --workdir=runs/guess --config.steps=1
    gtpo export --workdir=runs/guess --step=0 --out=hf/guess
    python benchmarks/episodes.py --model=hf/guess [--delay 0.2] [--rounds 7] [--json FILE]

Two runs do their steps in turns, one with an environment that answers at once, and one whose
answers take times from an exponential distribution with a mean of `delay` seconds. Each has a
thread for every completion. Prints medians over the steps; the first two, which compile, are left
out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import gtpo_jax
from gtpo_jax.config import Config, load
from gtpo_jax.environments import Step, Turn
from gtpo_jax.environments.examples.guess import Guess
from gtpo_jax.logs.display import Display

CONFIG = str(Path(__file__).parents[1] / "configs" / "guess.py")
COMPILING = 2  # steps that are left out
METRICS = ("time/step", "time/sample", "time/update", "env/idle_share", "env/turns")


class SlowGuess(Guess):
  """Answers after an exponentially distributed time."""

  delay_s = 0.2

  def step(self, turn: Turn) -> Step:
    """Answers a guess; see `Environment`."""
    time.sleep(random.expovariate(1 / self.delay_s))
    return super().step(turn)


def make_config(model: str, steps: int) -> Config:
  """Returns the config of both runs, which evaluate as little as possible."""
  fields = {
    "model.path": model,
    "warm_start.steps": 0,
    "steps": steps,
    "env.make": "",
    "env.workers": 256,
    "eval.every": 0,
    "eval.problems": 2,
    "eval.samples": 1,
  }
  return load(CONFIG, [f"--config.{key}={value}" for key, value in fields.items()])


def measure(model: str, delay_s: float, rounds: int) -> dict[str, dict[str, float]]:
  """Returns the medians of each kind of environment by metric, in seconds and shares."""
  SlowGuess.delay_s = delay_s
  quiet = Display(enabled=False)
  environments = {"at once": Guess, f"{delay_s:g} s": SlowGuess}
  with tempfile.TemporaryDirectory() as folder:
    config = make_config(model, rounds + COMPILING)
    runs = {
      name: gtpo_jax.steps(config, Path(folder) / name, display=quiet, environment=environment)
      for name, environment in environments.items()
    }
    rows: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(rounds + COMPILING):
      for name, run in runs.items():
        metrics = next(run).metrics
        rows[name].append([metrics[key] for key in METRICS])
    for run in runs.values():
      run.close()
  medians = {name: np.median(values[COMPILING:], 0).tolist() for name, values in rows.items()}
  return {name: dict(zip(METRICS, values, strict=True)) for name, values in medians.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True)
  parser.add_argument("--delay", type=float, default=0.2, help="mean seconds of an answer")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  found = measure(args.model, args.delay, args.rounds)
  print("| answers | " + " | ".join(METRICS) + " |\n" + "|---" * (len(METRICS) + 1) + "|")
  for name, values in found.items():
    print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values.values()) + " |")
  fast, slow = (values["time/step"] for values in found.values())
  print(f"a step with slow answers takes {slow / fast:.2f} times as long")
  if args.json:
    args.json.write_text(json.dumps({"results": found, "python": platform.python_version()}))


if __name__ == "__main__":
  main()
