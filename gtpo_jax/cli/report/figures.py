"""Selects and computes the curves of a report's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gtpo_jax.cli.report.inline_svg import (
  Line,
  curve_figure,
  mean_over_seeds,
  seed_range,
  stack_figure,
)
from gtpo_jax.cli.report.runs import RunGroup, smoothed

MAX_POINTS = 600  # per curve, to bound the size of the page; see `_thinned`
SMOOTHING = 15  # the moving average spans 1/15 of a run


class Panel(NamedTuple):
  """A figure with steps on the x axis."""

  title: str
  unit: str  # a share is shown in percent
  curves: Mapping[str, str]  # metric -> name in the legend


_names = lambda prefix, *names: {f"{prefix}/{name}": name.replace("_", " ") for name in names}
_correct = lambda metric: {f"{metric}/correct": "O+", f"{metric}/incorrect": "O−"}
# By section of the report. A panel whose metrics no run has logged is left out.
PANELS = {
  "Policy": (
    Panel("Policy entropy", "nats per token", {"entropy/mean": ""}),
    Panel("Policy entropy in O+ and O−", "nats per token", _correct("entropy")),
    Panel("Response length", "tokens", {"length/mean": ""}),
    Panel("Cut off", "share at the length limit", {"length/cut_off": ""}),
  ),
  "Reward": (
    Panel("Mean reward", "with length penalty", {"reward/mean": ""}),
    Panel("Accuracy in training", "share correct", {"reward/accuracy": ""}),
    Panel(
      "Problems by difficulty",
      "share of the problems tried",
      _names("difficulty", "solved", "mixed", "hopeless"),
    ),
    Panel("Advantage in O+ and O−", "trained tokens", _correct("advantage")),
  ),
  "Update": (
    Panel("Clip rate", "share of tokens", {"clip/high": "above 1 + ε", "clip/low": "below 1 − ε"}),
    Panel("Sampler–trainer mismatch", "KL, nats per token", {"mismatch/kl": ""}),
    Panel("Largest mismatch", "nats, log-prob of a token", {"mismatch/max_abs_logp": ""}),
    Panel(
      "Other experts in the update",
      "share of tokens",
      {"mismatch/router": "any layer", "mismatch/router_layers": "mean over layers"},
    ),
    Panel("Largest share of an expert", "share of a layer's tokens", {"router/largest_share": ""}),
    Panel("Gradient norm", "before clipping", {"grad_norm": ""}),
    Panel(
      "Effective sample size",
      "share of the weights",
      {"ratio/ess": "importance ratio", "correction/ess": "correction"},
    ),
    Panel(
      "Staleness",
      "updates since a token was drawn",
      {"staleness/mean": "mean", "staleness/max": "largest"},
    ),
  ),
  "Episodes": (
    Panel("Turns and calls", "per episode", _names("env", "turns", "calls", "failed_calls")),
    Panel(
      "How episodes end",
      "share of the episodes",
      {"env/stop/answered": "answered", "env/stop/env_done": "by the environment"},
    ),
    Panel(
      "Episodes that end at a limit",
      "share of the episodes",
      _names("env/stop", "max_turns", "max_tokens", "context"),
    ),
    Panel(
      "Episodes that end by calls",
      "share of the episodes",
      {"env/stop/max_calls": "too many", "env/stop/parse_error": "cannot be read"},
    ),
    Panel(
      "Episodes whose environment failed",
      "share of the episodes",
      {"env/stop/timeout": "timeout", "env/stop/env_error": "error"},
    ),
    Panel("Time of the environment", "seconds per episode", {"env/seconds": ""}),
  ),
  "Truth": (
    Panel(
      "Credit finds decisions and errors",
      "AUROC; 0.5 is uniform",
      {"credit/truth_auroc_correct": "decisions, O+", "credit/truth_auroc_incorrect": "errors, O−"},
    ),
    Panel(
      "Entropy by token class",
      "nats per token",
      _names("truth/entropy", "decisive", "copied", "filler"),
    ),
    Panel("Right tokens", "share of a class", _names("truth/right", "decisive", "copied")),
    Panel(
      "Credit finds the turns that matter",
      "rank correlation; 0 is chance",
      {
        "truth/turn_rank/policy": "to the policy",
        "truth/turn_rank/best": "to the best player",
        "truth/turn_rank_episode/best": "to the best player, within episodes",
      },
    ),
  ),
  "Groups and time": (
    Panel("Throughput", "tokens per second, from step 2", {"tokens/s": ""}),
    Panel("Step time", "seconds, from step 2", {"time/step": ""}),
    Panel("Busy slots", "share of the slots, while sampling", {"sampling/slots_busy": ""}),
  ),
}
# Metrics that are plotted without the first step, which compiles.
TIMES = {key for panel in PANELS["Groups and time"] for key in panel.curves}
# Evaluation figures with k on the x axis: metric, title and unit.
OVER_K = (
  ("pass", "pass@k", "solved by one of k"),
  ("best", "Mean reward of best of k", "of k completions"),
  ("maj", "maj@k", "solved by majority of k"),
)


def step_figures(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
  """Returns the figures over steps, for the metrics that the runs logged."""
  panels = [(section, panel) for section, row in PANELS.items() for panel in row]
  for source in dict.fromkeys(source for group in groups for source in group.sources):
    metric = {f"source/{source}/accuracy": ""}
    panels.append(("Reward", Panel(f"Accuracy in training on {source}", "share correct", metric)))
  figures = []
  for section, panel in panels:
    lines = [
      line
      for color, group in enumerate(groups)
      for dash, (key, name) in enumerate(panel.curves.items())
      if (line := _over_steps(group, key, color, dash, name))
    ]
    if lines:
      percent = panel.unit.startswith("share ")
      figures.append(curve_figure(panel.title, panel.unit, section, lines, percent=percent))
  return figures


def evaluation_figures(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
  """Returns the figures of the evaluations.

  They show held-out accuracy over the steps, and pass@k, best@k and maj@k over k at the first and
  the last evaluation.
  """
  tasks = list(dict.fromkeys(key.split("/")[1] for group in groups for key in group.eval_keys))
  figures = []
  for task in tasks:
    on_task = f" on {task}" if len(tasks) > 1 else ""
    if lines := _accuracy_lines(groups, task):
      figures.append(
        curve_figure(
          f"Held-out accuracy{on_task}", "problems solved", "Evaluation", lines, percent=True
        )
      )
    for name, title, unit in OVER_K:
      lines = [
        line
        for color, group in enumerate(groups)
        for line in _over_k(group, f"eval/{task}/{name}@", color, only_group=len(groups) == 1)
      ]
      if lines:
        percent = name != "best"
        figures.append(
          curve_figure(f"{title}{on_task}", unit, "Evaluation", lines, percent, over_k=True)
        )
  return figures


def composition_figures(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
  """Returns a figure per run group: the shares of all-correct, mixed and all-wrong groups.

  These groups are the completions of one prompt.
  """
  figures = []
  for color, group in enumerate(groups):
    steps, all_correct = group.series("groups/all_correct")
    _, all_wrong = group.series("groups/all_wrong")
    if np.isnan(all_correct).all():
      continue
    correct = np.nan_to_num(all_correct).mean(0)
    wrong = np.nan_to_num(all_wrong).mean(0)
    names = ("all correct", "mixed", "all wrong")
    steps, shares = _thinned(steps, np.stack([correct, 1 - correct - wrong, wrong]))
    title = f"Group composition: {group.label}" if len(groups) > 1 else "Group composition"
    by_name = dict(zip(names, shares, strict=True))
    figures.append(stack_figure(title, "Groups and time", color, steps, by_name))
  return figures


def time_split(group: RunGroup) -> dict[str, float]:
  """Returns the seconds of a step by phase, each the median over seeds and steps.

  The first step compiles and is left out unless it is the only one.
  """

  def median(metric: str) -> float:
    values = group.series(metric)[1]  # f64[seeds, m]
    values = values[:, 1:] if values.shape[1] > 1 else values
    return 0.0 if np.isnan(values).all() else float(np.nanmedian(values))

  phases = ("time/sample", "time/reward", "time/update", "time/step")
  sampling, reward, update, step = map(median, phases)
  other = max(step - (sampling + reward + update), 0.0)
  return {"sampling": sampling, "reward": reward, "update": update, "other": other}


def _over_steps(group: RunGroup, key: str, color: int, dash: int, name: str) -> Line | None:
  steps, values = group.series(key)
  if key in TIMES and len(steps) > 1:
    steps = steps[1:]
    values = values[:, 1:]
  if np.isnan(values).all():
    return None
  steps, values = _thinned(steps, values)
  curves = smoothed(values, len(steps) / SMOOTHING)
  return Line(color, dash, name, steps, mean_over_seeds(curves), values, seed_range(curves))


def _accuracy_lines(groups: Sequence[RunGroup], task: str) -> list[Line]:
  lines = []
  for color, group in enumerate(groups):
    sampled = [key for key in group.eval_keys if key.startswith(f"eval/{task}/mean@")]
    greedy = f"eval/{task}/greedy"
    for dash, key in enumerate([*sampled[:1], greedy]):
      if key in group.eval_keys:
        name = ("sampled (mean@n)", "greedy")[dash]
        steps, values, intervals = group.evaluated(key)
        lines.append(_with_band(color, dash, name, steps, values, intervals[0].T))
  return lines


def _over_k(group: RunGroup, prefix: str, color: int, only_group: bool) -> list[Line]:
  """Returns the curves of a metric over k: the last evaluation and, if different, the first."""
  ks = sorted(int(key.removeprefix(prefix)) for key in group.eval_keys if key.startswith(prefix))
  columns = [group.evaluated(f"{prefix}{k}") for k in ks]
  if len(ks) < 2 or not len(columns[0][0]):
    return []
  steps = columns[0][0]
  lines = []
  for dash, at in enumerate([-1, 0] if len(steps) > 1 else [-1]):
    values = np.stack([values[:, at] for _, values, _ in columns], axis=1)
    interval = np.stack([intervals[0, at] for *_, intervals in columns], axis=1)
    name = f"step {steps[at]}" if only_group else ("last evaluation", "first evaluation")[dash]
    lines.append(_with_band(color, dash, name, np.asarray(ks), values, interval))
  return lines


def _with_band(
  color: int, dash: int, name: str, x: np.ndarray, values: np.ndarray, interval: np.ndarray
) -> Line:
  """Returns a curve with the range over seeds as its band, or the interval of a single run."""
  band = seed_range(values) if len(values) > 1 else interval
  return Line(color, dash, name, x, mean_over_seeds(values), np.empty((0, len(x))), band)


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Averages over stretches of consecutive steps, so that at most `MAX_POINTS` points remain.

  The stretches have equal length, except that the last one may be shorter.
  """
  stretch = -(-len(steps) // MAX_POINTS)
  starts = np.arange(0, len(steps), stretch)
  counts = np.add.reduceat(~np.isnan(values), starts, axis=1, dtype=float)
  sums = np.add.reduceat(np.nan_to_num(values), starts, axis=1)
  means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
  return np.add.reduceat(steps, starts) / np.diff([*starts, len(steps)]), means
