"""Tables and figures of benchmarks/credit.py and benchmarks/credit_real.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from credit_arms import ARMS, BASELINE, CONTROLS, REAL_ARMS, REAL_CONTROLS
from study import (
  Seeds,
  draw_curves,
  mean_and_deviation,
  number,
  pass_by_problem,
  table,
  training_table,
)

CLASSES = ("decisive", "copied", "filler", "inert")
LAST_ROWS = 2  # rows of a curve that describe the end of a run
REAL_LAST_ROWS = 4  # the same of benchmarks/credit_real.py, which records every step
REAL_PANELS = {
  "accuracy": "correct completions",
  "entropy": "entropy, nats",
  "length": "length, tokens",
}

Results = Mapping[str, Mapping[str, Any]]  # by name


def by_training(
  results: Results, keys: Iterable[str], arms: Iterable[str]
) -> dict[tuple[Any, ...], dict[str, Seeds]]:
  """Returns the runs by the settings `keys`, then by arm in the order of `arms`, then by seed."""
  order = list(arms)
  found: dict[tuple[Any, ...], dict[str, Any]] = {}
  place = lambda settings: (settings["steps"], order.index(settings["arm"]))
  for run in sorted(of_kind(results, "run").values(), key=lambda run: place(run["settings"])):
    settings = run["settings"]
    by_arm = found.setdefault(tuple(settings[key] for key in keys), {})
    by_arm.setdefault(settings["arm"], {})[settings["seed"]] = run
  return found


def _at_end(seeds: Seeds, key: str, rows: int) -> np.ndarray:
  """Returns the mean over the last rows of each seed's curve, without missing values."""
  # A step in which no group had contrast has no clipped tokens, which is NaN.
  return np.asarray(
    [np.nanmean([row.get(key, 0) for row in run["curve"][-rows:]]) for run in seeds.values()]
  )


def training_tables(runs: Results) -> list[str]:
  """Returns, for every number of steps and base model, the table of the trained arms."""
  lines = []
  for (steps, base), by_arm in by_training(runs, ("steps", "base"), ARMS).items():

    def log_odds(arm: str, by_arm: Mapping[str, Seeds] = by_arm) -> str:
      right = _at_end(by_arm[arm], "right_decisive", LAST_ROWS)
      return mean_and_deviation(np.log(right / (1 - right)), 2)

    def entropies(arm: str, by_arm: Mapping[str, Seeds] = by_arm) -> str:
      at_end = (_at_end(by_arm[arm], f"entropy_{name}", LAST_ROWS) for name in CLASSES[:3])
      return ", ".join(number(values.mean()) for values in at_end)

    more = {
      "log-odds of right decisions": log_odds,
      "entropy of decisive, copied, filler": entropies,
    }
    lines += ["", f"Trained from {base}, {steps} steps"]
    lines += training_table(by_arm, BASELINE, CONTROLS, more)
  return lines


def draw_training(runs: Results, file: Path) -> None:
  """Draws accuracy and entropy by token class over the longest runs, a row per base model."""
  found = by_training(runs, ("steps", "base"), ARMS)
  longest = max(steps for steps, _ in found)
  rows = {f"from {base}": by_arm for (steps, base), by_arm in found.items() if steps == longest}
  panels = {
    "accuracy": "correct completions",
    **{f"entropy_{name}": f"entropy of {name} tokens, nats" for name in CLASSES[:3]},
  }
  draw_curves(rows, panels, ARMS, file)


def real_tables(results: Results) -> list[str]:
  """Returns the tables of what is stored: machines, base model and training."""
  lines = _machine_table(results) + _real_base_table(of_kind(results, "base"))
  for (task,), by_arm in by_training(results, ("task",), REAL_ARMS).items():
    lines += _real_training_table(task, by_arm)
  return lines


def of_kind(results: Results, kind: str) -> dict[str, Mapping[str, Any]]:
  """Returns the results whose names begin with a kind, by the rest of the name."""
  named = {name.partition("-")[::2]: result for name, result in results.items()}
  return {rest: result for (first, rest), result in named.items() if first == kind}


def _machine_table(results: Results) -> list[str]:
  """Returns how many results each kind of machine has computed, and how long that took."""
  found: dict[str, list[float]] = {}
  for result in results.values():
    name = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    found.setdefault(name, []).append(result["seconds"] / 60)
  rows = ((name, str(len(x)), f"{sum(x):.0f}") for name, x in found.items())
  return table(("machine", "results", "minutes"), rows)


def _real_base_table(evaluations: Results) -> list[str]:
  """Returns the table of the base model's evaluations."""
  rows = []
  for task, base in evaluations.items():
    values = [100 * pass_by_problem(base, k).mean() for k in (1, 8)]
    values += [100 * np.mean(base["greedy"]), base["length"], 100 * base["finished"]]
    rows.append([task, *(f"{value:.1f}" for value in values)])
  return table(("task", "pass@1", "pass@8", "greedy", "length", "finished"), rows)


def _real_training_table(task: str, by_arm: Mapping[str, Seeds]) -> list[str]:
  """Returns the table of a task's arms, and lines on the arms and their controls."""
  steps = max(run["settings"]["steps"] for seeds in by_arm.values() for run in seeds.values())
  last = lambda run: run["evaluations"][max(run["evaluations"], key=int)]
  ends = {arm: {seed: last(run) for seed, run in seeds.items()} for arm, seeds in by_arm.items()}
  at_end = lambda arm, key: _at_end(by_arm[arm], key, REAL_LAST_ROWS)
  clipped = lambda arm: (f"{100 * at_end(arm, f'clip/{x}').mean():.2f}" for x in ("low", "high"))
  greedy = lambda arm: [100 * np.mean(end["greedy"]) for end in ends[arm].values()]
  more = {
    "greedy": lambda arm: mean_and_deviation(greedy(arm), 1),
    "entropy": lambda arm: mean_and_deviation(at_end(arm, "entropy"), 2),
    "length": lambda arm: mean_and_deviation(at_end(arm, "length"), 1),
    "clipped below, above": lambda arm: f"{', '.join(clipped(arm))} %",
  }
  title = ["", f"Trained on {task}, {steps} steps"]
  return title + training_table(ends, BASELINE, REAL_CONTROLS, more)


def draw_real_training(results: Results, file: Path) -> None:
  """Draws accuracy, entropy and length over the steps, a row per task."""
  rows = {task: x for (task,), x in by_training(results, ("task",), REAL_ARMS).items()}
  draw_curves(rows, REAL_PANELS, REAL_ARMS, file)
