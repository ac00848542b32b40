"""Prints the table of docs/real_model.md and draws its picture, from finished runs.

    python benchmarks/real_model.py WORKDIR ... [--png docs/images/real_model.png]

The runs are of configs/smollm2_sentences.py. The picture needs runs that differ only in their seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gtpo_jax.checkpoint.workdir import load_config
from gtpo_jax.logs.log_files import read_jsonl
from gtpo_jax.report.curves import ACCENT, CORRECT, MEAN

SAMPLED, GREEDY = "mean@", "greedy"  # how the names of the two accuracies begin, after the task's


class Run(NamedTuple):
  """The numbers of a run. Step 0 is the base model."""

  name: str
  evaluated: np.ndarray  # i64[e], the steps with an evaluation
  sampled: np.ndarray  # f64[e], held-out pass@1
  greedy: np.ndarray  # f64[e], held-out accuracy of greedy completions
  trained: np.ndarray  # f64[steps], share of correct completions in training
  kl: float  # nats, median over the steps, between sampler and trainer
  largest: float  # nats, median over the steps of the largest difference of log-probs
  step_time: float  # s, median from the second step on


def read(workdir: Path) -> Run:
  """Reads the metrics of a finished run."""
  config = load_config(workdir)
  rows = read_jsonl(workdir / "metrics.jsonl")
  steps = [row for row in rows if row["step"]]
  evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]

  def accuracy(beginning: str) -> np.ndarray:
    names = [key for key in evaluations[0] if key.rsplit("/", 1)[-1].startswith(beginning)]
    return np.array([row[names[0]] for row in evaluations])

  values = lambda name: np.array([row[name] for row in steps])
  adapters = f", LoRA of rank {config.model.lora_rank}" if config.model.lora_rank else ""
  return Run(
    name=f"{config.model.compute_dtype}{adapters}, seed {config.seed}",
    evaluated=np.array([row["step"] for row in evaluations]),
    sampled=accuracy(SAMPLED),
    greedy=accuracy(GREEDY),
    trained=values("reward/accuracy"),
    kl=float(np.median(values("mismatch/kl"))),
    largest=float(np.median(values("mismatch/max_abs_logp"))),
    step_time=float(np.median(values("time/step")[1:])),
  )


def table(runs: Sequence[Run]) -> list[str]:
  """Returns a row per run, in Markdown."""
  percent = lambda values: " -> ".join(f"{100 * value:.1f}" for value in values)
  steps = " -> ".join(str(step) for step in runs[0].evaluated)
  lines = [
    f"| run | pass@1 after {steps} steps, % | greedy, % | KL | largest difference | step |",
    "|---|---|---|---|---|---|",
  ]
  for run in runs:
    cells = (percent(run.sampled), percent(run.greedy[[0, -1]]), f"{run.kl:.1e}")
    lines.append(
      f"| {run.name} | {' | '.join(cells)} | {run.largest:.2g} | {run.step_time:.1f} s |"
    )
  return lines


def draw(runs: Sequence[Run], out: Path) -> None:
  """Draws the held-out accuracy over the steps: a thin line per seed, a thick one for the mean."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7.2, 3.2), layout="constrained")
  axes = figure.subplots()
  evaluated = runs[0].evaluated
  for label, color, marker, accuracies in (
    ("greedy", MEAN, "s", [run.greedy for run in runs]),
    ("sampled (pass@1)", ACCENT, "o", [run.sampled for run in runs]),
  ):
    for accuracy in accuracies:
      axes.plot(evaluated, accuracy, color=color, linewidth=0.8, alpha=0.4)
    mean = np.mean(accuracies, axis=0)
    axes.plot(evaluated, mean, color=color, marker=marker, linewidth=2, label=label)
  trained = np.mean([run.trained for run in runs], axis=0)
  steps = np.arange(1, len(trained) + 1)
  axes.plot(steps, trained, ".", color=CORRECT, markersize=5, label="in training, each step")
  axes.set_ylim(0, 1.02)
  axes.set_xticks(evaluated)
  axes.set_xlabel("step")
  axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
  title = "share of sentences that obey the instruction"
  axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
  axes.grid(alpha=0.25)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(loc="lower right", frameon=False, fontsize=9)
  figure.savefig(out, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("workdirs", nargs="+", type=Path)
  parser.add_argument("--png", type=Path, help="where to draw the picture")
  args = parser.parse_args()
  runs = [read(workdir) for workdir in args.workdirs]
  print("\n".join(table(runs)))
  if args.png:
    draw(runs, args.png)


if __name__ == "__main__":
  main()
