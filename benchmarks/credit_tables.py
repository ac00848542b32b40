"""Tables and figure of benchmarks/credit.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from credit_arms import ARMS, BASELINE
from matplotlib.figure import Figure
from scipy import stats

from gtpo_jax.evaluation.estimators import pass_at_k

CLASSES = ("decisive", "copied", "filler", "inert")
DRAWS = 10_000  # of the bootstrap
LAST_ROWS = 2  # rows of a curve that describe the end of a run
TRAINING_HEADS = (
  "arm",
  "seeds",
  "pass@1",
  "difference, 95 % interval",
  "p, Holm",
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
  return [*_gradient_table(probes), *_base_table(probes), *_credit_tables(probes)]


def _gradient_table(probes: Probes) -> list[str]:
  """Returns the table of cosines: arms by base models."""
  lines = [
    "",
    "Cosine with the true gradient: of uniform credit, then differences from it (standard error; "
    "* for p < 0.05 by Holm)",
    "",
    *_head(["arm", *probes]),
  ]
  adjusted = {base: holm(p_by_arm(result)) for base, result in probes.items()}
  for arm in ARMS:
    cells = []
    for base, result in probes.items():
      if arm == BASELINE:
        cells.append(f"{np.mean(result['arms'][arm]['cosine']):.3f}")
        continue
      mean, error = difference(result, arm)
      star = " *" if adjusted[base][arm] < 0.05 else ""
      cells.append(f"{mean:+.3f} ({error:.3f}){star}")
    lines.append(_row([arm, *cells]))
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
  lines = ["", "The base models", "", *_head(["", *probes])]
  for key, name in rows.items():
    values = [_number(result["signals"][key]) for result in probes.values()]
    lines.append(_row([name, *values]))
  noise = [_number(result["arms"][BASELINE]["noise"]) for result in probes.values()]
  return [*lines, _row(["noise / signal of the gradient, uniform credit", *noise])]


def _credit_tables(probes: Probes) -> list[str]:
  """Returns a table per base model of the arms' credit."""
  lines = []
  scores = ("lift", "auroc", "precision", "recall")
  keys = [f"{score}_{side}" for score in scores for side in ("correct", "incorrect")]
  heads = [f"{score} {side}" for score in scores for side in ("O+", "O-")]
  weights = [f"w_{name}" for name in CLASSES]
  for base, result in probes.items():
    lines += ["", f"Credit on {base}", ""]
    lines += _head(["arm", *heads, *(f"W {name}" for name in CLASSES), "noise / signal"])
    for arm in ARMS:
      values = result["arms"][arm]
      lines.append(_row([arm, *(_number(values[key]) for key in (*keys, *weights, "noise"))]))
  return lines


def _head(names: Sequence[str]) -> list[str]:
  return [_row(names), "|---" * len(names) + "|"]


def _row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
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
  """Returns, for every base model, the table of the trained arms.

  Differences are between the means over seeds, with a bootstrap over the held-out problems. Only
  seeds that both arms have count.
  """
  lines = []
  for base in dict.fromkeys(run["base"] for run in runs):
    by_arm = {
      arm: {run["seed"]: run for run in runs if (run["base"], run["arm"]) == (base, arm)}
      for arm in ARMS
    }
    by_arm = {arm: seeds for arm, seeds in by_arm.items() if seeds}
    lines += ["", f"Trained from {base}", "", *_head(TRAINING_HEADS)]
    compared = {
      arm: compare(seeds, by_arm[BASELINE])
      for arm, seeds in by_arm.items()
      if arm != BASELINE and BASELINE in by_arm and set(seeds) & set(by_arm[BASELINE])
    }
    p_values = holm({arm: p for arm, (_, _, _, p) in compared.items()})
    for arm, seeds in by_arm.items():
      pass_1, pass_8 = (
        np.asarray([_pass(run, k).mean() for run in seeds.values()]) for k in (1, 8)
      )
      change = p_value = ""
      if arm in compared:
        mean, low, high, _ = compared[arm]
        change = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        p_value = f"{p_values[arm]:.2g}"
      right = _at_end(seeds, "right_decisive")
      entropies = ", ".join(
        f"{_at_end(seeds, f'entropy_{name}').mean():.2f}" for name in CLASSES[:3]
      )
      log_odds = np.log(right / (1 - right))
      cells = [
        arm,
        str(len(seeds)),
        _mean_and_deviation(100 * pass_1, 1),
        change,
        p_value,
        _mean_and_deviation(100 * pass_8, 1),
        _mean_and_deviation(log_odds, 2),
        entropies,
      ]
      lines.append(_row(cells))
  return lines


def compare(
  runs: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]]
) -> tuple[float, float, float, float]:
  """Returns the difference in pass@1, the ends of its 95 % interval, and its p-value.

  Args:
    runs: the runs of an arm, by seed.
    baseline: those of uniform credit.
  """
  seeds = sorted(set(runs) & set(baseline))
  mean = lambda of: np.mean([_pass(of[seed], 1) for seed in seeds], axis=0)
  differences = mean(runs) - mean(baseline)  # f64[problems]
  rng = np.random.default_rng(0)
  p = len(differences)
  draws = rng.multinomial(p, np.full(p, 1 / p), size=DRAWS) @ differences / p
  low, high = np.percentile(draws, (2.5, 97.5))
  one_sided = min((draws <= 0).mean(), (draws >= 0).mean())
  return float(differences.mean()), float(low), float(high), max(2 * one_sided, 1 / DRAWS)


def _pass(run: Mapping[str, Any], k: int) -> np.ndarray:
  """Returns pass@k of each held-out problem."""
  return np.asarray([pass_at_k(run["samples"], count, k) for count in run["correct"]])


def _at_end(seeds: Mapping[int, Mapping[str, Any]], key: str) -> np.ndarray:
  """Returns the mean over the last rows of each seed's curve."""
  rows = [[row[key] for row in run["curve"][-LAST_ROWS:]] for run in seeds.values()]
  return np.asarray(rows).mean(1)


def _mean_and_deviation(values: np.ndarray, digits: int) -> str:
  deviation = values.std(ddof=1) if len(values) > 1 else 0.0
  return f"{values.mean():.{digits}f} +- {deviation:.{digits}f}"


def draw(probes: Probes, file: Path) -> None:
  """Draws the cosine differences of all arms, one panel per base model."""
  arms = [arm for arm in ARMS if arm != BASELINE]
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
