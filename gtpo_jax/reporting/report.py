"""`gtpo report`: runs as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import gtpo_jax
from gtpo_jax.reporting.figures import (
  BOX,
  composition_figures,
  evaluation_figures,
  step_figures,
  time_split,
)
from gtpo_jax.reporting.runs import Kind, Run, kinds_of, number, read_run, run_label
from gtpo_jax.reporting.viewer import MOST_TOKENS, viewer_data, visible

PAGE = Path(__file__).parent / "page"
SECTIONS = ("Evaluation", "Reward", "Policy", "Update", "Groups and time")
ROWS = 8  # of the numbers below a figure


def make_report(workdirs: Sequence[Path]) -> str:
  """The page of one or several runs: the paper's figures, where the time went, and the credit viewer.

  Raises:
    UserError: a workdir without a run or without metrics, of another version, or named twice; or too many kinds of run.
  """
  runs = [read_run(workdir) for workdir in workdirs]
  kinds = kinds_of(runs)
  figures = [*evaluation_figures(kinds), *step_figures(kinds), *composition_figures(kinds)]
  for i, figure in enumerate(figures):
    figure["index"] = i
    _describe(figure, kinds)
  viewer, packed = _viewer(kinds)
  script = "\n".join(
    (PAGE / name).read_text(encoding="utf-8") for name in ("charts.js", "viewer.js")
  )
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  names = [visible(kind.label) for kind in kinds]
  page = jinja2.Environment(
    loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
  )
  return page.get_template("report.html").render(
    title=_title(kinds),
    version=gtpo_jax.__version__,
    kinds=names,
    runs=[_row(i, kind, run) for i, kind in enumerate(kinds) for run in kind.runs],
    facts=_facts(kinds),
    legend=_legend(kinds),
    sections=[
      (name, here)
      for name in SECTIONS
      if (here := [figure for figure in figures if figure["section"] == name])
    ],
    figure_data={
      "box": dict(zip(("left", "bottom", "right", "top"), BOX, strict=True)),
      "figures": [
        {key: f[key] for key in ("lines", "limits", "percent", "over", "stack")} for f in figures
      ],
    },
    viewer=viewer,
    packed=packed,
    **_settings(kinds),
    css=(PAGE / "report.css").read_text(encoding="utf-8"),
    script=script,
    script_hash=f"'sha256-{digest}'",
  )


def _title(kinds: Sequence[Kind]) -> str:
  names = [visible(kind.label) for kind in kinds]
  data = visible(kinds[0].runs[0].config["data.train"])
  return f"{' and '.join(names) if len(names) < 3 else f'{len(names)} kinds of run'} on {data}"


def _facts(kinds: Sequence[Kind]) -> str:
  config = kinds[0].runs[0].config
  size = f"{config['batch.prompts']} prompts × {config['batch.group']} completions of at most {config['sampling.max_tokens']} tokens"
  whose = " (of the first run)" if len(kinds) > 1 else ""
  return (
    f"{size} a step, model {visible(config['model.path'] or config['model.preset'])}{whose}. "
    f"Reward, entropy and length are those of the last step; times are medians of all steps but the first."
  )


def _legend(kinds: Sequence[Kind]) -> str:
  seeds = any(len(kind.runs) > 1 for kind in kinds)
  return (
    "Smoothed: an exponential moving average over about a fifteenth of the run; a step's raw value is the faint line. "
    + (
      "Runs that differ in their seed alone are one curve: the mean of the seeds, in a band from the lowest to the highest. "
      if seeds
      else ""
    )
    + "Around the evaluations of a single run the band is the 95 % bootstrap interval over the problems."
  )


def _row(i: int, kind: Kind, run: Run) -> dict[str, Any]:
  last = run.rows[run.steps]
  split = time_split(Kind(kind.label, (run,)))
  whole = sum(split.values()) or 1.0
  return {
    "kind": i,
    "label": visible(run_label(kind, run)),
    "folder": visible(str(run.workdir)),
    "steps": f"{run.steps} of {run.config['steps']}",
    "held_out": _held_out(run),
    "reward": _plain(number(last, "reward/mean")),
    "entropy": _plain(number(last, "entropy/mean")),
    "length": _plain(number(last, "length/mean")),
    "seconds": f"{sum(split.values()):.3g} s",
    "split": [
      (phase, f"{seconds / whole:.0%}", round(100 * seconds / whole, 2))
      for phase, seconds in split.items()
    ],
  }


def _held_out(run: Run) -> tuple[str, str, str] | None:
  """mean@n at the first and the last evaluation, and the interval of the last."""
  key = next((key for row in run.evaluations.values() for key in row if "/mean@" in key), None)
  steps = (
    [step for step, row in run.evaluations.items() if not math.isnan(number(row, key))]
    if key
    else []
  )
  if not steps:
    return None
  ends = (run.evaluations[steps[-1]].get("intervals") or {}).get(key) or (None, None)
  first, last = (f"{number(run.evaluations[step], key):.1%}" for step in (steps[0], steps[-1]))
  return first, last, "" if None in ends else f"[{ends[0]:.1%}, {ends[1]:.1%}]"


def _describe(figure: dict[str, Any], kinds: Sequence[Kind]) -> None:
  """Adds the names of a figure's lines, its numbers as a table and, for those who cannot see it, in a sentence."""
  for line in figure["lines"]:
    parts = [visible(kinds[line["kind"]].label)] if len(kinds) > 1 and not figure["stack"] else []
    line["name"] = (
      " ".join([*parts, *([line["name"]] if line["name"] else [])]) or figure["title"].lower()
    )
  show = lambda y: "–" if y is None else f"{y:.1%}" if figure["percent"] else _plain(y)
  xs = sorted({x for line in figure["lines"] for x in line["x"]})
  chosen = (
    [xs[round(i * (len(xs) - 1) / (ROWS - 1))] for i in range(ROWS)] if len(xs) > ROWS else xs
  )
  at = [dict(zip(line["x"], line["y"], strict=True)) for line in figure["lines"]]
  figure["table"] = {
    "heads": [line["name"] for line in figure["lines"]],
    "rows": [[_plain(x), *(show(y.get(x)) for y in at)] for x in chosen],
  }
  figure["summary"] = (
    "; ".join(
      f"{line['name']}: {show(line['y'][0])} at {figure['over']} {_plain(line['x'][0])}, {show(line['y'][-1])} at {figure['over']} "
      f"{_plain(line['x'][-1])}"
      for line in figure["lines"]
    )
    + "."
  )


def _plain(value: float) -> str:
  return (
    "–"
    if math.isnan(value)
    else f"{value:.0f}"
    if value == round(value) and abs(value) < 1e9
    else f"{value:.4g}"
  )


def _viewer(kinds: Sequence[Kind]) -> tuple[dict[str, Any] | None, list[str]]:
  """The viewer's data of every run that kept some, and the packed groups, each named by its number in the page."""
  members = [(kind, run) for kind in kinds for run in kind.runs]
  runs = []
  packed = []
  for kind, run in members:
    data, texts = viewer_data(run.workdir, run.algorithm, MOST_TOKENS // len(members))
    if data["steps"]:
      for i, group in enumerate(group for step in data["steps"] for group in step["groups"]):
        group["packed"] = len(packed) + i
      packed += texts
      runs.append({"label": visible(run_label(kind, run)), **data})
  return ({"runs": runs} if runs else None), packed


def _settings(kinds: Sequence[Kind]) -> dict[str, list[tuple[str, list[str]]]]:
  """Every setting of every kind, and those in which they differ."""
  configs = [kind.runs[0].config for kind in kinds]
  rows = [
    (key, [visible(str(config[key])) if config[key] is not None else "–" for config in configs])
    for key in configs[0]
  ]
  return {
    "settings": rows,
    "apart": [(key, values) for key, values in rows if len(set(values)) > 1 and key != "seed"],
  }
