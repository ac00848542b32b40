"""Tables and figures of benchmarks/credit.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from credit_arms import ARMS, BASELINE, CONTROLS
from study import Seeds, draw_curves, mean_and_deviation, pass_by_problem, table, training_table

LAST_ROWS = 4  # steps that describe the end of a run
# By key of a curve's points: the title of its panel, of tasks that know the truth and of others.
TRUTH_PANELS = {
  "accuracy": "correct completions",
  **{f"entropy_{x}": f"entropy of {x} tokens, nats" for x in ("decisive", "copied", "filler")},
}
PANELS = {"accuracy": "correct completions", "entropy": "entropy, nats", "length": "length, tokens"}

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


def tables(results: Results) -> list[str]:
  """Returns the tables of what is stored: machines, base models and training."""
  lines = _machine_table(results) + _base_table(of_kind(results, "base"))
  for (task, steps), by_arm in by_training(results, ("task", "steps"), ARMS).items():
    lines += _training_table(task, steps, by_arm)
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


def _base_table(evaluations: Results) -> list[str]:
  """Returns the table of the base model's evaluations."""
  rows = []
  for task, base in evaluations.items():
    values = [100 * pass_by_problem(base, k).mean() for k in (1, 8)]
    values += [100 * np.mean(base["greedy"]), base["length"], 100 * base["finished"]]
    rows.append([task, *(f"{value:.1f}" for value in values)])
  return table(("task", "pass@1", "pass@8", "greedy", "length", "finished"), rows)


def _training_table(task: str, steps: int, by_arm: Mapping[str, Seeds]) -> list[str]:
  """Returns the table of a task's arms, and lines on the arms and their controls."""
  last = lambda run: run["evaluations"][str(steps)]
  ends = {arm: {seed: last(run) for seed, run in seeds.items()} for arm, seeds in by_arm.items()}

  def at_end(arm: str, key: str) -> np.ndarray:
    """Returns the mean over the last steps of each seed, without missing values."""
    # A step in which no group had contrast has no clipped tokens, which is NaN.
    curves = [run["curve"][-LAST_ROWS:] for run in by_arm[arm].values()]
    return np.asarray([np.nanmean([row.get(key, 0) for row in rows]) for rows in curves])

  clipped = lambda arm: (f"{100 * at_end(arm, f'clip/{x}').mean():.2f}" for x in ("low", "high"))
  greedy = lambda arm: [100 * np.mean(end["greedy"]) for end in ends[arm].values()]
  more = {
    "greedy": lambda arm: mean_and_deviation(greedy(arm), 1),
    "entropy": lambda arm: mean_and_deviation(at_end(arm, "entropy"), 2),
    "length": lambda arm: mean_and_deviation(at_end(arm, "length"), 1),
    "clipped below, above": lambda arm: f"{', '.join(clipped(arm))} %",
  }
  if _knows_truth(by_arm):
    right = lambda arm: at_end(arm, "right_decisive")
    more["log-odds of right decisions"] = lambda arm: mean_and_deviation(
      np.log(right(arm) / (1 - right(arm))), 2
    )
    more["entropy of decisive, copied, filler"] = lambda arm: ", ".join(
      f"{at_end(arm, key).mean():.2f}" for key in list(TRUTH_PANELS)[1:]
    )
  title = ["", f"Trained on {task}, {steps} steps"]
  return title + training_table(ends, BASELINE, CONTROLS, more)


def _knows_truth(by_arm: Mapping[str, Seeds]) -> bool:
  return "right_decisive" in next(iter(next(iter(by_arm.values())).values()))["curve"][0]


def draw_training(results: Results, out: Path) -> None:
  """Draws OUT/training.png and OUT/training_truth.png: a row per task, of its longest runs."""
  found = {task: x for (task, _), x in by_training(results, ("task", "steps"), ARMS).items()}
  for truth, panels, name in ((False, PANELS, "training"), (True, TRUTH_PANELS, "training_truth")):
    if rows := {task: x for task, x in found.items() if _knows_truth(x) == truth}:
      draw_curves(rows, panels, ARMS, out / f"{name}.png")
