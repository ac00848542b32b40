"""Tables and figure of benchmarks/credit_turns.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from credit_real_tables import by_task, last_evaluations
from credit_tables import COLORS, holm, mean_and_deviation, pass_by_problem, table_head, table_row
from matplotlib.figure import Figure
from scipy import stats

BASELINE = "outcome"
# By arm: what it is compared with.
CONTROLS = {
  "state": BASELINE,
  "reward": BASELINE,
  "outcome, entropy": BASELINE,
  "state, entropy": "state",
}
LAST_STEPS = 4
HEADS = ("arm", "seeds", "steps 2 on", "difference, 95 % interval", "p, Holm", "last 4", "held out")

Results = Mapping[str, Mapping[str, Any]]  # by name
Seeds = Mapping[int, Mapping[str, Any]]  # the runs of an arm


def turns_tables(results: Results, order: tuple[str, ...]) -> list[str]:
  """Returns a table for each task: accuracies in %, with differences paired by seed."""
  tasks = by_task(results, order)
  tests = {
    (task, arm): differences(by_arm[arm], by_arm[control])
    for task, by_arm in tasks.items()
    for arm, control in CONTROLS.items()
    if arm in by_arm and control in by_arm
  }
  tests = {key: x for key, x in tests.items() if len(x) > 1}
  p_values = holm({key: float(stats.ttest_1samp(x, 0.0).pvalue) for key, x in tests.items()})
  lines = []
  for task, by_arm in tasks.items():
    lines += ["", task, "", *table_head(HEADS)]
    for arm, seeds in by_arm.items():
      found = tests.get((task, arm))
      change = "" if found is None else f"{interval(found)} over {CONTROLS[arm]}"
      p = "" if found is None else f"{p_values[task, arm]:.2g}"
      values = (speeds(seeds), ends(seeds))
      held_out = [pass_by_problem(end, 1).mean() for end in last_evaluations(seeds).values()]
      first, last, held_out = (
        mean_and_deviation(100 * np.asarray(x), 1) for x in (*values, held_out)
      )
      lines.append(table_row([arm, str(len(seeds)), first, change, p, last, held_out]))
  return lines


def speeds(seeds: Seeds) -> list[float]:
  """Returns the mean accuracy of each seed's batches after the first, whose policy is the base."""
  return [float(np.mean([row["accuracy"] for row in run["curve"][1:]])) for run in seeds.values()]


def ends(seeds: Seeds) -> list[float]:
  """Returns the mean accuracy of each seed's last batches."""
  return [
    float(np.mean([row["accuracy"] for row in run["curve"][-LAST_STEPS:]]))
    for run in seeds.values()
  ]


def differences(seeds: Seeds, others: Seeds) -> np.ndarray:
  """Returns an arm's `speeds` minus its control's, for the seeds that both have."""
  shared = sorted(set(seeds) & set(others))
  of = lambda runs: np.asarray(speeds({seed: runs[seed] for seed in shared}))
  return of(seeds) - of(others)


def interval(x: np.ndarray) -> str:
  """Returns the mean and the 95 % interval of a t-test of differences, in percentage points."""
  low, high = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
  return f"{100 * x.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def draw_turns(results: Results, order: tuple[str, ...], file: Path) -> None:
  """Draws the accuracy of the batches over the steps: means over seeds, a panel per task."""
  tasks = by_task(results, order)
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(3.6 * len(tasks), 3.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(tasks)))
    for axes, (task, by_arm) in zip(panels, tasks.items(), strict=True):
      for arm, seeds in by_arm.items():
        values = np.asarray([[row["accuracy"] for row in run["curve"]] for run in seeds.values()])
        steps = np.arange(1, values.shape[1] + 1)
        color = COLORS[order.index(arm)]
        axes.plot(steps, 100 * values.mean(0), color=color, linewidth=1.4, label=arm)
      axes.set_title(task, fontsize=10)
      axes.set_xlabel("step")
      axes.spines[["top", "right"]].set_visible(False)
      axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("right episodes, %")
    figure.savefig(file, dpi=130)
