"""Tables and figure of benchmarks/credit_real.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from credit_arms import BASELINE
from credit_real_arms import CONTROLS, PROBED, REAL_ARMS
from credit_tables import (
  COLORS,
  compare,
  gradient_table,
  holm,
  interval,
  mean_and_deviation,
  number,
  over_seeds_interval,
  pass_by_problem,
  table_head,
  table_row,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Results = Mapping[str, Mapping[str, Any]]  # by name
Seeds = dict[int, Mapping[str, Any]]  # the runs of an arm
LAST_STEPS = 4  # whose means describe the end of a run
HEADS = (
  "arm",
  "seeds",
  "pass@1",
  "difference, 95 % interval",
  "p, Holm",
  "95 % interval over seeds",
  "pass@8",
  "greedy",
  "entropy",
  "length",
  "clipped below, above",
)
PANELS = {"accuracy": "correct completions", "entropy": "entropy, nats", "length": "length, tokens"}


def real_tables(results: Results) -> list[str]:
  """Returns the tables of what is stored: machines, base model, probe and training."""
  probes = {name.split("-", 1)[1]: x for name, x in results.items() if name.startswith("probe-")}
  lines = _machine_table(results) + _base_table(results)
  if probes:
    lines += gradient_table(probes, PROBED) + _noise_table(probes)
  for task, by_arm in by_task(results).items():
    lines += _training_table(task, by_arm)
  return lines


def _machine_table(results: Results) -> list[str]:
  """Returns how many results each kind of machine has computed, and how long that took."""
  found: dict[str, list[float]] = {}
  for result in results.values():
    name = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    found.setdefault(name, []).append(result["seconds"] / 60)
  lines = ["", *table_head(("machine", "results", "minutes"))]
  rows = ((name, str(len(x)), f"{sum(x):.0f}") for name, x in found.items())
  return lines + [table_row(cells) for cells in rows]


def _base_table(results: Results) -> list[str]:
  """Returns the table of the base model's evaluations."""
  lines = ["", *table_head(("task", "pass@1", "pass@8", "greedy", "length", "finished"))]
  for name, base in results.items():
    if not name.startswith("base-"):
      continue
    values = [100 * pass_by_problem(base, k).mean() for k in (1, 8)]
    values += [100 * np.mean(base["greedy"]), base["length"], 100 * base["finished"]]
    lines.append(table_row([name.split("-", 1)[1], *(f"{value:.1f}" for value in values)]))
  return lines


def _noise_table(probes: Results) -> list[str]:
  """Returns the noise-to-signal ratio of the gradient of one batch, and the batches' signals."""
  lines = ["", "Noise / signal of the gradient of one batch", ""]
  lines += table_head(("arm", *probes))
  for arm in PROBED:
    lines.append(table_row([arm, *(number(x["arms"][arm]["noise"]) for x in probes.values())]))
  for key in ("accuracy", "mixed", "length", "entropy_correct", "entropy_incorrect"):
    lines.append(table_row([key, *(f"{x['signals'][key]:.3g}" for x in probes.values())]))
  lines.append(
    table_row(["noise of the reference", *(number(x["reference_noise"]) for x in probes.values())])
  )
  return lines


def by_task(results: Results) -> dict[str, dict[str, Seeds]]:
  """Returns the runs by task, then by arm in the order of `REAL_ARMS`, then by seed."""
  found: dict[str, dict[str, Seeds]] = {}
  runs = [result for name, result in results.items() if name.startswith("run-")]
  order = list(REAL_ARMS)
  for run in sorted(runs, key=lambda run: order.index(run["settings"]["arm"])):
    settings = run["settings"]
    by_arm = found.setdefault(settings["task"], {})
    by_arm.setdefault(settings["arm"], {})[settings["seed"]] = run
  return found


def last_evaluations(seeds: Seeds) -> dict[int, Mapping[str, Any]]:
  """Returns the evaluation after the last step of each seed."""
  return {seed: run["evaluations"][max(run["evaluations"], key=int)] for seed, run in seeds.items()}


def _training_table(task: str, by_arm: Mapping[str, Seeds]) -> list[str]:
  """Returns the table of a task's arms, and lines on the arms and their controls."""
  steps = {run["settings"]["steps"] for seeds in by_arm.values() for run in seeds.values()}
  lines = ["", f"Trained on {task}, {max(steps)} steps", "", *table_head(HEADS)]
  ends = {arm: last_evaluations(seeds) for arm, seeds in by_arm.items()}
  share = lambda arm, other: bool(set(ends.get(arm, ())) & set(ends.get(other, ())))
  compared = {
    arm: compare(ends[arm], ends[BASELINE])
    for arm in ends
    if arm != BASELINE and share(arm, BASELINE)
  }
  p_values = holm({arm: p for arm, (_, _, _, p) in compared.items()})
  for arm, seeds in by_arm.items():
    change = ["", "", ""]
    if arm in compared:
      over_seeds = ""
      if len(set(ends[arm]) & set(ends[BASELINE])) > 1:
        over_seeds = over_seeds_interval(ends[arm], ends[BASELINE])
      change = [interval(compared[arm]), f"{p_values[arm]:.2g}", over_seeds]
    lines.append(table_row([arm, str(len(seeds)), *_cells(seeds, ends[arm], change)]))
  pairs = [(arm, control) for arm, controls in CONTROLS.items() for control in controls]
  for arm, control in pairs:
    if share(arm, control):
      result = compare(ends[arm], ends[control])
      lines += ["", f"{arm} minus {control}: {interval(result)}, p = {result[3]:.2g}"]
  return lines


def _cells(seeds: Seeds, ends: Mapping[int, Mapping[str, Any]], change: list[str]) -> list[str]:
  """Returns the cells of an arm from pass@1 on; `change` is its difference from the baseline."""
  percent = lambda values: mean_and_deviation(100 * np.asarray(values), 1)
  # A step in which no group had contrast has no clipped tokens, which is NaN.
  at_end = lambda key: np.asarray(
    [np.nanmean([row.get(key, 0) for row in run["curve"][-LAST_STEPS:]]) for run in seeds.values()]
  )
  clipped = (f"{100 * at_end(f'clip/{side}').mean():.2f}" for side in ("low", "high"))
  return [
    percent([pass_by_problem(end, 1).mean() for end in ends.values()]),
    *change,
    percent([pass_by_problem(end, 8).mean() for end in ends.values()]),
    percent([np.mean(end["greedy"]) for end in ends.values()]),
    mean_and_deviation(at_end("entropy"), 2),
    mean_and_deviation(at_end("length"), 1),
    f"{', '.join(clipped)} %",
  ]


def draw_real_training(results: Results, file: Path) -> None:
  """Draws accuracy, entropy and length over the steps: the mean of the seeds, and their range."""
  tasks = by_task(results)
  drawn = [arm for arm in REAL_ARMS if any(arm in by_arm for by_arm in tasks.values())]
  colors = dict(zip(drawn, itertools.cycle(COLORS)))
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(11, 0.8 + 2.3 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), len(PANELS), squeeze=False)
    for line, (task, by_arm) in zip(grid, tasks.items(), strict=True):
      line[0].set_ylabel(task)
      for axes, (key, title) in zip(line, PANELS.items(), strict=True):
        for arm, seeds in by_arm.items():
          values = np.asarray([[point[key] for point in run["curve"]] for run in seeds.values()])
          steps = np.arange(1, values.shape[1] + 1)
          axes.plot(steps, values.mean(0), color=colors[arm], linewidth=1.2)
          axes.fill_between(steps, values.min(0), values.max(0), color=colors[arm], alpha=0.12)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
      axes.set_xlabel("step")
    handles = [Line2D([], [], color=colors[arm], label=arm) for arm in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=130)
