"""The top of a report: each run's result and execution, and samples before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from gtpo_jax.cli.report.runs import RunGroup, RunLogs, number
from gtpo_jax.logs.log_files import LogFile, is_sample
from gtpo_jax.logs.sessions import duration, read_sessions
from gtpo_jax.logs.text import visible

# Groups that differ in one of these are not compared.
COMPARABLE = ("model.preset", "model.path", "warm_start.steps")
SAMPLES = 3  # completions shown of the first and of the last step


def verdict(group: RunGroup) -> str:
  """Returns one sentence on how training changed the held-out accuracy of a run group."""
  last = min(run.steps for run in group.runs)
  planned = group.runs[0].config["steps"]
  steps = f"{planned} steps" if last >= planned else f"{last} of {planned} steps so far"
  seeds = f", mean of {len(group.runs)} seeds" if len(group.runs) > 1 else ""
  key = next((key for key in group.eval_keys if "/mean@" in key), None)
  evaluated, values, intervals = group.evaluated(key) if key else ((), None, None)
  if len(evaluated) < 2 or evaluated[0] != 0:
    return _training_verdict(group, steps)
  before, after = (float(x) for x in np.nanmean(values[:, [0, -1]], axis=0))
  if math.isnan(before) or math.isnan(after):
    return _training_verdict(group, steps)
  change = f"{'rose' if after > before else 'fell'} from {before:.1%} to {after:.1%}"
  if f"{before:.1%}" == f"{after:.1%}":
    change = f"stayed at {after:.1%}"
  at = steps if evaluated[-1] == last else f"{evaluated[-1]} of {planned} steps"
  certainty = ""
  if len(group.runs) == 1 and not np.isnan(intervals[0, [0, -1]]).any():
    (low, high), (later_low, later_high) = intervals[0, [0, -1]]
    apart = later_low > high or later_high < low
    certainty = f"; the 95 % intervals {'do not overlap' if apart else 'overlap'}"
  return f"Held-out accuracy {change} in {at}{seeds}{certainty}."


def _base(group: RunGroup) -> list[Any]:
  """Returns the settings that two groups must share to be compared."""
  config = group.runs[0].config
  evaluated = config.get("data.eval")
  # Without other problems, a part of those to train on is held out.
  return [*map(config.get, COMPARABLE), evaluated, None if evaluated else config.get("data.train")]


def against(first: RunGroup, group: RunGroup) -> str:
  """Returns one sentence on a group's held-out accuracy less the first group's.

  Runs of equal seeds are pairs, at the last step that all have evaluated; the interval is that of a
  paired t-test. "" if the groups differ in the base or in what is evaluated, or have no pair.
  """
  pairs = [(a, b) for a in first.runs for b in group.runs if a.config["seed"] == b.config["seed"]]
  a, b = (RunGroup("", runs) for runs in zip(*pairs, strict=True)) if pairs else (first, group)
  key = next((key for key in a.eval_keys if "/mean@" in key and key in b.eval_keys), None)
  if not (pairs and _base(a) == _base(b) and key):
    return ""
  (steps, values, _), (other_steps, others, _) = a.evaluated(key), b.evaluated(key)
  common = [step for step in steps.tolist() if step and step in other_steps]
  if not common:
    return ""
  at = lambda steps, values: values[:, steps.tolist().index(common[-1])]
  points = 100 * (at(other_steps, others) - at(steps, values))
  mean = points.mean()
  if np.isnan(mean):
    return ""
  certainty = "one pair of seeds, so without an interval"
  if len(points) > 1:
    half = stdtrit(len(points) - 1, 0.975) * points.std(ddof=1) / math.sqrt(len(points))
    low, high = mean - half, mean + half
    certainty = f"{len(points)} pairs of seeds, 95 % interval {low:+.1f} to {high:+.1f}"
  return f" Against {first.label}: {mean:+.1f} points at step {common[-1]} ({certainty})."


def _training_verdict(group: RunGroup, steps: str) -> str:
  """Returns the sentence for a run group without an evaluation before and after training."""
  equal = " with equal settings" if any(run.left_out for run in group.runs) else ""
  none = f"no held-out evaluation{equal} before and after"
  _, values = group.series("reward/accuracy")
  means = np.nanmean(values, axis=0) if not np.isnan(values).all() else []
  if len(means) < 2:
    return f"There is {none} training ({steps})."
  return (
    f"Accuracy in training went from {means[0]:.1%} in step 1 to {means[-1]:.1%} ({steps}); there "
    f"is {none}."
  )


def execution(run: RunLogs) -> list[tuple[str, str]]:
  """Returns when, where and how a run was executed, as pairs of name and value."""
  sessions = read_sessions(run.workdir)
  if not sessions:
    return []
  first = sessions[0]
  last = sessions[-1]
  resumed = f", in {len(sessions)} sessions" if len(sessions) > 1 else ""
  versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
  pairs = [
    ("Started", first["started"].replace("T", " ").replace("Z", " UTC")),
    ("Duration", f"{describe_seconds(duration(sessions))}{resumed}"),
    ("Devices", last["devices"]),
    ("Machine", last["machine"]),
    ("Versions", versions),
    ("Command", last["command"] or "a Python program"),
  ]
  return [(name, visible(str(value))) for name, value in pairs]


def judge_cost(run: RunLogs) -> list[tuple[str, str]]:
  """Returns the cost of a run's judge, as a pair of name and value; [] without a judge.

  A step or an evaluation that was repeated counts once.
  """
  if not run.config.get("reward.judge.base_url"):
    return []
  rows = [*run.rows.values(), *run.evaluations.values()]
  values = lambda name: np.nan_to_num([number(row, f"judge/{name}") for row in rows])
  requests = values("requests")
  total = int(requests.sum())
  mean_s = float(requests @ values("seconds")) / max(total, 1)
  cost = (
    f"{run.config['reward.judge.model']}: {total:,} requests of {mean_s:.2f} s, "
    f"{int(values('tokens').sum()):,} tokens; {int(values('cached').sum()):,} grades from the "
    f"cache, {int(values('failed').sum()):,} completions without a grade"
  )
  return [("Judge", visible(cost))]


def describe_seconds(seconds: float) -> str:
  """Returns a duration with its two largest units, such as "2 min 21 s"."""
  seconds = round(seconds)
  if seconds < 60:
    return f"{seconds} s"
  if seconds < 3600:
    return f"{seconds // 60} min {seconds % 60} s"
  return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def samples(run: RunLogs) -> list[dict[str, Any]]:
  """Returns completions of the first and of the last step, as the page shows them.

  The first step samples from the base model. A run of one step has only that one.
  """
  rows = list(LogFile(run.workdir / "samples.jsonl", is_sample).rows())
  steps = sorted({row["step"] for row in rows})
  title = lambda step: "Before training (sampled in step 1)" if step == 1 else f"Step {step}"
  return [
    {"title": title(step), "rows": [_sample(row) for row in rows if row["step"] == step][:SAMPLES]}
    for step in sorted({*steps[:1], *steps[-1:]})
  ]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
  verdicts = {True: "correct", False: "wrong"}
  return {
    "prompt": visible(row["prompt"], "\n\t"),
    "completion": visible(row["completion"], "\n\t"),
    "verdict": verdicts.get(row.get("correct"), "no verdict"),
  }


def held_out(run: RunLogs) -> tuple[str, str, str] | None:
  """Returns mean@n of the first and the last evaluation, and the interval of the last."""
  key = next((key for row in run.evaluations.values() for key in row if "/mean@" in key), None)
  if key is None:
    return None
  rows = [row for row in run.evaluations.values() if not math.isnan(number(row, key))]
  if not rows:
    return None
  low, high = (rows[-1].get("intervals") or {}).get(key) or (None, None)
  interval = "" if low is None or high is None else f"[{low:.1%}, {high:.1%}]"
  return f"{number(rows[0], key):.1%}", f"{number(rows[-1], key):.1%}", interval


def settings(groups: Sequence[RunGroup]) -> dict[str, list[tuple[str, list[str]]]]:
  """Returns the settings of all run groups, and which of them differ between groups.

  A setting that no group's algorithm reads is left out.
  """
  configs = [group.runs[0].config for group in groups]
  show = lambda value: "not read" if value is None else visible(str(value))
  read = [key for key in configs[0] if any(config[key] is not None for config in configs)]
  rows = [(key, [show(config[key]) for config in configs]) for key in read]
  differing = [(key, values) for key, values in rows if len(set(values)) > 1 and key != "seed"]
  return {"settings": rows, "differing": differing}
