"""Selects and computes the curves of a report's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Panel:
  """A figure with steps on the x axis."""

  title: str
  unit: str
  curves: dict[str, str]  # metric -> name in the legend
  percent: bool = False
  section: str = "Policy"


PANELS = (
  Panel("Policy entropy", "nats per token", {"entropy/mean": ""}),
  Panel(
    "Policy entropy in O+ and O−",
    "nats per token",
    {"entropy/correct": "O+", "entropy/incorrect": "O−"},
  ),
  Panel("Response length", "tokens", {"length/mean": ""}),
  Panel("Cut off", "share at the length limit", {"length/cut_off": ""}, percent=True),
  Panel("Mean reward", "with length penalty", {"reward/mean": ""}, section="Reward"),
  Panel(
    "Accuracy in training", "share correct", {"reward/accuracy": ""}, percent=True, section="Reward"
  ),
  # Logged only with `data.difficulty`.
  Panel(
    "Problems by difficulty",
    "share of the problems tried",
    {f"difficulty/{name}": name for name in ("solved", "mixed", "hopeless")},
    percent=True,
    section="Reward",
  ),
  Panel(
    "Advantage in O+ and O−",
    "trained tokens",
    {"advantage/correct": "O+", "advantage/incorrect": "O−"},
    section="Reward",
  ),
  Panel(
    "Clip rate",
    "tokens",
    {"clip/high": "above 1 + ε", "clip/low": "below 1 − ε"},
    percent=True,
    section="Update",
  ),
  Panel("Sampler–trainer mismatch", "KL, nats per token", {"mismatch/kl": ""}, section="Update"),
  Panel(
    "Largest mismatch", "nats, log-prob of a token", {"mismatch/max_abs_logp": ""}, section="Update"
  ),
  # Logged only with experts.
  Panel(
    "Other experts in the update",
    "share of tokens",
    {"mismatch/router": "any layer", "mismatch/router_layers": "mean over layers"},
    percent=True,
    section="Update",
  ),
  Panel(
    "Largest share of an expert",
    "of a layer's tokens",
    {"router/largest_share": ""},
    percent=True,
    section="Update",
  ),
  Panel("Gradient norm", "before clipping", {"grad_norm": ""}, section="Update"),
  Panel(
    "Effective sample size",
    "share of the weights",
    {"ratio/ess": "importance ratio", "correction/ess": "correction"},
    percent=True,
    section="Update",
  ),
  # Logged only with `sampling.staleness`.
  Panel(
    "Staleness",
    "updates since a token was drawn",
    {"staleness/mean": "mean", "staleness/max": "largest"},
    section="Update",
  ),
  # Logged only with an environment.
  Panel(
    "Turns and calls",
    "per episode",
    {"env/turns": "turns", "env/calls": "calls", "env/failed_calls": "failed calls"},
    section="Episodes",
  ),
  Panel(
    "How episodes end",
    "share of the episodes",
    {"env/stop/answered": "answered", "env/stop/env_done": "by the environment"},
    percent=True,
    section="Episodes",
  ),
  Panel(
    "Episodes that end at a limit",
    "share of the episodes",
    {f"env/stop/{name}": name.replace("_", " ") for name in ("max_turns", "max_tokens", "context")},
    percent=True,
    section="Episodes",
  ),
  Panel(
    "Episodes that end by calls",
    "share of the episodes",
    {"env/stop/max_calls": "too many", "env/stop/parse_error": "cannot be read"},
    percent=True,
    section="Episodes",
  ),
  Panel(
    "Episodes whose environment failed",
    "share of the episodes",
    {"env/stop/timeout": "timeout", "env/stop/env_error": "error"},
    percent=True,
    section="Episodes",
  ),
  Panel("Time of the environment", "seconds per episode", {"env/seconds": ""}, section="Episodes"),
  # Logged only by runs that know which tokens decide.
  Panel(
    "Credit finds decisions and errors",
    "AUROC; 0.5 is uniform",
    {"credit/truth_auroc_correct": "decisions, O+", "credit/truth_auroc_incorrect": "errors, O−"},
    section="Truth",
  ),
  Panel(
    "Entropy by token class",
    "nats per token",
    {f"truth/entropy/{name}": name for name in ("decisive", "copied", "filler")},
    section="Truth",
  ),
  Panel(
    "Right tokens",
    "share of a class",
    {f"truth/right/{name}": name for name in ("decisive", "copied")},
    percent=True,
    section="Truth",
  ),
  # Logged only by runs whose environment knows the truth of turns.
  Panel(
    "Credit finds the turns that matter",
    "rank correlation; 0 is chance",
    {
      "truth/turn_rank/policy": "to the policy",
      "truth/turn_rank/best": "to the best player",
      "truth/turn_rank_episode/best": "to the best player, within episodes",
    },
    section="Truth",
  ),
  Panel(
    "Throughput", "tokens per second, from step 2", {"tokens/s": ""}, section="Groups and time"
  ),
  Panel("Step time", "seconds, from step 2", {"time/step": ""}, section="Groups and time"),
  Panel(
    "Busy slots",
    "share of the slots, while sampling",
    {"sampling/slots_busy": ""},
    percent=True,
    section="Groups and time",
  ),
)
# Metrics that are plotted without the first step, which compiles.
TIMES = {key for panel in PANELS if panel.section == "Groups and time" for key in panel.curves}
# Evaluation figures with k on the x axis: metric, title and unit.
OVER_K = (
  ("pass", "pass@k", "solved by one of k"),
  ("best", "Mean reward of best of k", "of k completions"),
  ("maj", "maj@k", "solved by majority of k"),
)


def step_figures(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
  """Returns the figures over steps, for the metrics that the runs logged."""
  figures = []
  sources = dict.fromkeys(source for group in groups for source in group.sources)
  of_source = lambda source: Panel(
    f"Accuracy in training on {source}",
    "share correct",
    {f"source/{source}/accuracy": ""},
    percent=True,
    section="Reward",
  )
  for panel in (*PANELS, *map(of_source, sources)):
    lines = [
      line
      for color, group in enumerate(groups)
      for dash, (key, name) in enumerate(panel.curves.items())
      if (line := _over_steps(group, key, color, dash, name))
    ]
    if lines:
      figures.append(
        curve_figure(panel.title, panel.unit, panel.section, lines, percent=panel.percent)
      )
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
  sampling, reward, update, step = (
    _median(group.series(key)[1])
    for key in ("time/sample", "time/reward", "time/update", "time/step")
  )
  other = max(step - (sampling + reward + update), 0.0)
  return {"sampling": sampling, "reward": reward, "update": update, "other": other}


def _median(values: np.ndarray) -> float:
  """Returns the median of f64[seeds, m] without the first step; 0 if there is no number."""
  if np.isnan(values).all():
    return 0.0
  return float(np.nanmedian(values[:, 1:] if values.shape[1] > 1 else values))


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
