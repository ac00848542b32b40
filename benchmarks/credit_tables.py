"""Tables and figure of benchmarks/credit.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from compare import difference as difference_over_seeds
from credit_arms import ARMS, BASELINE, CONTROLS
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from gtpo_jax.evaluation.estimators import pass_at_k

CLASSES = ("decisive", "copied", "filler", "inert")
DRAWS = 10_000  # of the bootstrap
LAST_ROWS = 2  # rows of a curve that describe the end of a run
COLORS = (
  "#333333",
  "#1a6faf",
  "#cf5a08",
  "#2a8a4a",
  "#8a4a9a",
  "#999999",
  "#b09000",
  "#c03060",
  "#00a0b0",
  "#e08aa8",
)
TRAINING_HEADS = (
  "arm",
  "seeds",
  "pass@1",
  "difference, 95 % interval",
  "p, Holm",
  "95 % interval over seeds",
  "pass@8",
  "log-odds of right decisions",
  "entropy of decisive, copied, filler",
)

Probes = Mapping[str, Mapping[str, Any]]  # by base model, from `credit_probe.probe`
Runs = Sequence[Mapping[str, Any]]


def probe_tables(probes: Probes) -> list[str]:
  """Returns the tables of the probe: gradients, base models, and the credit on each of them."""
  if not probes:
    return []
  return [*gradient_table(probes), *_base_table(probes), *_credit_tables(probes)]


def gradient_table(probes: Probes, arms: Iterable[str] = ARMS) -> list[str]:
  """Returns the table of cosines: arms by base models."""
  lines = [
    "",
    "Cosine with the true gradient: of uniform credit, then differences from it (standard error; "
    "* for p < 0.05 by Holm)",
    "",
    *table_head(["arm", *probes]),
  ]
  adjusted = {base: holm(p_by_arm(result)) for base, result in probes.items()}
  for arm in arms:
    cells = []
    for base, result in probes.items():
      if arm == BASELINE:
        cells.append(f"{np.mean(result['arms'][arm]['cosine']):.3f}")
        continue
      mean, error = difference(result, arm)
      star = " *" if adjusted[base][arm] < 0.05 else ""
      cells.append(f"{mean:+.3f} ({error:.3f}){star}")
    lines.append(table_row([arm, *cells]))
  return lines


def _base_table(probes: Probes) -> list[str]:
  """Returns the table of what is known of the base models, and of the entropy as a signal."""
  rows = {
    "accuracy": "accuracy",
    "right_decisive": "right decisions",
    "unknown": "tokens in answers that do not parse",
    **{f"entropy_{name}": f"entropy of {name} tokens, nats" for name in CLASSES},
    "auroc_decisive": "AUROC of H for decisive tokens in O+",
    "auroc_decisive_or_copied": "AUROC of H for decisive and copied tokens in O+",
    "auroc_wrong": "AUROC of 1/H for wrong tokens in O-",
  }
  lines = ["", "The base models", "", *table_head(["", *probes])]
  for key, name in rows.items():
    values = [number(result["signals"][key]) for result in probes.values()]
    lines.append(table_row([name, *values]))
  noise = [number(result["arms"][BASELINE]["noise"]) for result in probes.values()]
  return [*lines, table_row(["noise / signal of the gradient, uniform credit", *noise])]


def _credit_tables(probes: Probes) -> list[str]:
  """Returns a table per base model of the arms' credit."""
  lines = []
  scores = ("lift", "auroc", "precision", "recall")
  keys = [f"{score}_{side}" for score in scores for side in ("correct", "incorrect")]
  heads = [f"{score} {side}" for score in scores for side in ("O+", "O-")]
  weights = [f"w_{name}" for name in CLASSES]
  for base, result in probes.items():
    lines += ["", f"Credit on {base}", ""]
    lines += table_head(["arm", *heads, *(f"W {name}" for name in CLASSES), "noise / signal"])
    for arm in ARMS:
      values = result["arms"][arm]
      lines.append(table_row([arm, *(number(values[key]) for key in (*keys, *weights, "noise"))]))
  return lines


def table_head(names: Sequence[str]) -> list[str]:
  return [table_row(names), "|---" * len(names) + "|"]


def table_row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
  return f"{value:.2f}" if np.isfinite(value) else "-"


def difference(result: Mapping[str, Any], arm: str) -> tuple[float, float]:
  """Returns the mean difference of an arm's cosine from uniform credit's, and its error."""
  x = _differences(result, arm)
  return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x)))


def p_by_arm(result: Mapping[str, Any]) -> dict[str, float]:
  """Returns the p-value of each arm's difference from uniform credit, by a paired t-test."""
  return {
    arm: float(stats.ttest_1samp(_differences(result, arm), 0.0).pvalue)
    for arm in result["arms"]
    if arm != BASELINE
  }


def _differences(result: Mapping[str, Any], arm: str) -> np.ndarray:
  cosines = lambda name: np.asarray(result["arms"][name]["cosine"])
  return cosines(arm) - cosines(BASELINE)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
  """Returns p-values adjusted for their number by Holm's step-down procedure."""
  adjusted = {}
  largest = 0.0
  for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
    largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
    adjusted[name] = largest
  return adjusted


def training_tables(runs: Runs) -> list[str]:
  """Returns, for every number of steps and base model, the table of the trained arms.

  Differences are between the means over seeds, with a bootstrap over the held-out problems, and
  with a t-test that is paired by seed. Only seeds that both arms have count.
  """
  lines = []
  for (steps, base), by_arm in _by_training(runs).items():
    lines += ["", f"Trained from {base}, {steps} steps", "", *table_head(TRAINING_HEADS)]
    compared = {
      arm: compare(seeds, by_arm[BASELINE])
      for arm, seeds in by_arm.items()
      if arm != BASELINE and _share_seeds(by_arm, arm, BASELINE)
    }
    p_values = holm({arm: p for arm, (_, _, _, p) in compared.items()})
    for arm, seeds in by_arm.items():
      pass_1, pass_8 = (
        np.asarray([pass_by_problem(run, k).mean() for run in seeds.values()]) for k in (1, 8)
      )
      change = p_value = over_seeds = ""
      if arm in compared:
        change = interval(compared[arm])
        p_value = f"{p_values[arm]:.2g}"
        over_seeds = over_seeds_interval(seeds, by_arm[BASELINE])
      right = _at_end(seeds, "right_decisive")
      entropies = ", ".join(
        number(_at_end(seeds, f"entropy_{name}").mean()) for name in CLASSES[:3]
      )
      log_odds = np.log(right / (1 - right))
      cells = [
        arm,
        str(len(seeds)),
        mean_and_deviation(100 * pass_1, 1),
        change,
        p_value,
        over_seeds,
        mean_and_deviation(100 * pass_8, 1),
        mean_and_deviation(log_odds, 2),
        entropies,
      ]
      lines.append(table_row(cells))
    pairs = [(arm, control) for arm, controls in CONTROLS.items() for control in controls]
    for arm, control in pairs:
      if _share_seeds(by_arm, arm, control):
        result = compare(by_arm[arm], by_arm[control])
        lines += [
          "",
          f"{arm} minus {control}: {interval(result)}, p = {result[3]:.2g}; over seeds "
          f"{over_seeds_interval(by_arm[arm], by_arm[control])}",
        ]
  return lines


def _share_seeds(by_arm: Mapping[str, Mapping[int, Any]], arm: str, other: str) -> bool:
  return bool(set(by_arm.get(arm, ())) & set(by_arm.get(other, ())))


def interval(compared: tuple[float, float, float, float]) -> str:
  """Returns the difference and the interval of `compare` in percentage points."""
  mean, low, high, _ = compared
  return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def over_seeds_interval(
  runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]
) -> str:
  """Returns the difference in pass@1 with the interval of a t-test that is paired by seed."""
  shared = sorted(set(runs) & set(baseline))
  return difference_over_seeds(
    *([pass_by_problem(of[seed], 1).mean() for seed in shared] for of in (runs, baseline))
  )


def _by_training(runs: Runs) -> dict[tuple[int, str], dict[str, dict[int, Mapping[str, Any]]]]:
  """Returns the runs by (steps, base model), then by arm, then by seed."""
  found: dict[tuple[int, str], dict[str, dict[int, Mapping[str, Any]]]] = {}
  for run in sorted(runs, key=lambda run: (run["steps"], list(ARMS).index(run["arm"]))):
    by_arm = found.setdefault((run["steps"], run["base"]), {})
    by_arm.setdefault(run["arm"], {})[run["seed"]] = run
  return found


def compare(
  runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]
) -> tuple[float, float, float, float]:
  """Returns the difference in pass@1, the ends of its 95 % interval, and its p-value.

  Args:
    runs: the runs of an arm, by seed.
    baseline: those of uniform credit, or of the arm's control.
  """
  seeds = sorted(set(runs) & set(baseline))
  mean = lambda of: np.mean([pass_by_problem(of[seed], 1) for seed in seeds], axis=0)
  differences = mean(runs) - mean(baseline)  # f64[problems]
  rng = np.random.default_rng(0)
  p = len(differences)
  draws = rng.multinomial(p, np.full(p, 1 / p), size=DRAWS) @ differences / p
  low, high = np.percentile(draws, (2.5, 97.5))
  one_sided = min((draws <= 0).mean(), (draws >= 0).mean())
  return float(differences.mean()), float(low), float(high), max(2 * one_sided, 1 / DRAWS)


def pass_by_problem(run: Mapping[str, Any], k: int) -> np.ndarray:
  """Returns pass@k of each held-out problem."""
  return np.asarray([pass_at_k(run["samples"], count, k) for count in run["correct"]])


def _at_end(seeds: Mapping[int, Mapping[str, Any]], key: str) -> np.ndarray:
  """Returns the mean over the last rows of each seed's curve."""
  rows = [[row[key] for row in run["curve"][-LAST_ROWS:]] for run in seeds.values()]
  return np.asarray(rows).mean(1)


def mean_and_deviation(values: np.ndarray, digits: int) -> str:
  deviation = values.std(ddof=1) if len(values) > 1 else 0.0
  return f"{values.mean():.{digits}f} +- {deviation:.{digits}f}"


def draw_probes(probes: Probes, file: Path, arms: Iterable[str] = ARMS) -> None:
  """Draws the cosine differences of the arms, one panel per base model."""
  arms = [arm for arm in arms if arm != BASELINE]
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(2.6 + 2.3 * len(probes), 0.9 + 0.27 * len(arms)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(probes), sharex=True, sharey=True))
    y = np.arange(len(arms))
    for axes, (base, result) in zip(panels, probes.items(), strict=True):
      values = np.asarray([difference(result, arm) for arm in arms])
      critical = stats.t.ppf(0.975, result["batches"] - 1)
      for i, arm in enumerate(arms):
        color = "#1a6faf" if values[i, 0] > 0 else "#cf5a08"
        color = "#777777" if abs(values[i, 0]) < critical * values[i, 1] else color
        marker = "D" if arm == "oracle mask" else "o"
        axes.errorbar(
          values[i, 0],
          y[i],
          xerr=critical * values[i, 1],
          color=color,
          marker=marker,
          markersize=5,
          capsize=2,
        )
      axes.axvline(0, color="#333333", linewidth=0.8)
      axes.set_title(base, fontsize=10)
      axes.set_xlabel("cosine, minus that of\nuniform credit")
      axes.grid(axis="y", color="#dddddd", linewidth=0.5)
      axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(y, arms)
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.savefig(file, dpi=130)


def draw_training(runs: Runs, file: Path) -> None:
  """Draws accuracy and entropy by token class over the longest runs, a row per base model."""
  longest = max(run["steps"] for run in runs)
  rows = {base: arms for (steps, base), arms in _by_training(runs).items() if steps == longest}
  panels = {
    "accuracy": "correct completions",
    **{f"entropy_{name}": f"entropy of {name} tokens, nats" for name in CLASSES[:3]},
  }
  drawn = [arm for arm in ARMS if any(arm in by_arm for by_arm in rows.values())]
  colors = dict(zip(drawn, itertools.cycle(COLORS)))
  with matplotlib.rc_context({"font.size": 9}):
    figure = Figure(figsize=(11, 0.6 + 2.2 * len(rows)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(rows), len(panels), sharex=True))
    for row, (base, by_arm) in zip(grid, rows.items(), strict=True):
      row[0].set_ylabel(f"from {base}")
      for axes, (key, title) in zip(row, panels.items(), strict=True):
        first_run = next(iter(next(iter(by_arm.values())).values()))
        axes.set_visible(np.isfinite(first_run["curve"][0][key]))  # a task may have no such tokens
        for arm, seeds in by_arm.items():
          steps = [point["step"] for point in next(iter(seeds.values()))["curve"]]
          values = np.asarray([[point[key] for point in run["curve"]] for run in seeds.values()])
          axes.plot(steps, values.mean(0), color=colors[arm], label=arm, linewidth=1.2)
          axes.fill_between(steps, values.min(0), values.max(0), color=colors[arm], alpha=0.12)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
      axes.set_xlabel("step")
    handles = [Line2D([], [], color=colors[arm], label=arm) for arm in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=130)
