"""Tables and figures of benchmarks/credit.py and benchmarks/credit_real.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from credit_arms import ARMS, BASELINE, CONTROLS, PROBED, REAL_ARMS, REAL_CONTROLS
from matplotlib.figure import Figure
from scipy import stats
from study import (
  Seeds,
  draw_curves,
  mean_and_deviation,
  number,
  pass_by_problem,
  table,
  training_table,
)

from gtpo_jax.probing.statistics import holm, p_value

CLASSES = ("decisive", "copied", "filler", "inert")
LAST_ROWS = 2  # rows of a curve that describe the end of a run
REAL_LAST_ROWS = 4  # the same of benchmarks/credit_real.py, which records every step
REAL_PANELS = {
  "accuracy": "correct completions",
  "entropy": "entropy, nats",
  "length": "length, tokens",
}

Results = Mapping[str, Mapping[str, Any]]  # by name; probes by base model


def probe_tables(probes: Results) -> list[str]:
  """Returns the tables of the probe: gradients, base models, and the credit on each of them."""
  return [*gradient_table(probes), *_base_table(probes), *_credit_tables(probes)]


def gradient_table(probes: Results, arms: Iterable[str] = ARMS) -> list[str]:
  """Returns the table of cosines: arms by base models."""
  adjusted = {base: holm(p_by_arm(result)) for base, result in probes.items()}

  def cell(arm: str, base: str) -> str:
    if arm == BASELINE:
      return f"{np.mean(probes[base]['arms'][arm]['cosine']):.3f}"
    mean, error = difference(probes[base], arm)
    return f"{mean:+.3f} ({error:.3f}){' *' if adjusted[base][arm] < 0.05 else ''}"

  title = "Cosine with the true gradient: of uniform credit, then differences from it (standard "
  title += "error; * for p < 0.05 by Holm)"
  rows = ([arm, *(cell(arm, base) for base in probes)] for arm in arms)
  return ["", title, *table(["arm", *probes], rows)]


def _base_table(probes: Results) -> list[str]:
  """Returns the table of what is known of the base models, and of the entropy as a signal."""
  names = {
    "accuracy": "accuracy",
    "right_decisive": "right decisions",
    "unknown": "tokens in answers that do not parse",
    **{f"entropy_{name}": f"entropy of {name} tokens, nats" for name in CLASSES},
    "auroc_decisive": "AUROC of H for decisive tokens in O+",
    "auroc_decisive_or_copied": "AUROC of H for decisive and copied tokens in O+",
    "auroc_wrong": "AUROC of 1/H for wrong tokens in O-",
  }
  rows = [
    [name, *(number(result["signals"][key]) for result in probes.values())]
    for key, name in names.items()
  ]
  noise = [number(result["arms"][BASELINE]["noise"]) for result in probes.values()]
  rows.append(["noise / signal of the gradient, uniform credit", *noise])
  return ["", "The base models", *table(["", *probes], rows)]


def _credit_tables(probes: Results) -> list[str]:
  """Returns a table per base model of the arms' credit."""
  scores = ("lift", "auroc", "precision", "recall")
  keys = [f"{score}_{side}" for score in scores for side in ("correct", "incorrect")]
  keys += [*(f"w_{name}" for name in CLASSES), "noise"]
  heads = ["arm", *(f"{score} {side}" for score in scores for side in ("O+", "O-"))]
  heads += [*(f"W {name}" for name in CLASSES), "noise / signal"]
  lines = []
  for base, result in probes.items():
    rows = ([arm, *(number(result["arms"][arm][key]) for key in keys)] for arm in ARMS)
    lines += ["", f"Credit on {base}", *table(heads, rows)]
  return lines


def difference(result: Mapping[str, Any], arm: str) -> tuple[float, float]:
  """Returns the mean difference of an arm's cosine from uniform credit's, and its error."""
  x = _differences(result, arm)
  return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x)))


def p_by_arm(result: Mapping[str, Any]) -> dict[str, float]:
  """Returns the p-value of each arm's difference from uniform credit, by a paired t-test."""
  return {arm: p_value(_differences(result, arm)) for arm in result["arms"] if arm != BASELINE}


def _differences(result: Mapping[str, Any], arm: str) -> np.ndarray:
  cosines = lambda name: np.asarray(result["arms"][name]["cosine"])
  return cosines(arm) - cosines(BASELINE)


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
  """Returns the tables of what is stored: machines, base model, probe and training."""
  lines = _machine_table(results) + _real_base_table(of_kind(results, "base"))
  if probes := of_kind(results, "probe"):
    lines += gradient_table(probes, PROBED) + _noise_table(probes)
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


def _noise_table(probes: Results) -> list[str]:
  """Returns the noise-to-signal ratio of the gradient of one batch, and the batches' signals."""
  rows = [[arm, *(number(x["arms"][arm]["noise"]) for x in probes.values())] for arm in PROBED]
  for key in ("accuracy", "mixed", "length", "entropy_correct", "entropy_incorrect"):
    rows.append([key, *(f"{x['signals'][key]:.3g}" for x in probes.values())])
  rows.append(["noise of the reference", *(number(x["reference_noise"]) for x in probes.values())])
  return ["", "Noise / signal of the gradient of one batch", *table(("arm", *probes), rows)]


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


def draw_probes(probes: Results, file: Path, arms: Iterable[str] = ARMS) -> None:
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
