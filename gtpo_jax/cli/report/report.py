"""`gtpo report`: writes one self-contained HTML file about one or more runs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import gtpo_jax
from gtpo_jax.cli.report.credit_figures import (
  probe_figure,
  timeline_figure,
  truth_figure,
  turns_figure,
)
from gtpo_jax.cli.report.figures import (
  composition_figures,
  evaluation_figures,
  step_figures,
  time_split,
)
from gtpo_jax.cli.report.inline_svg import BOX
from gtpo_jax.cli.report.overview import (
  against,
  execution,
  held_out,
  judge_cost,
  samples,
  settings,
  verdict,
)
from gtpo_jax.cli.report.runs import RunGroup, RunLogs, group_runs, number, read_run, run_label
from gtpo_jax.cli.report.viewer import MAX_TOKENS, viewer_data
from gtpo_jax.logs.text import visible

PAGE = Path(__file__).parent / "page"
SECTIONS = ("Evaluation", "Reward", "Episodes", "Policy", "Update", "Truth", "Groups and time")
TABLE_ROWS = 8  # rows of the table below a figure, spread evenly over the run


def make_report(workdirs: Sequence[Path]) -> str:
  """Returns an HTML page with the paper's figures, the time per phase, and the credit viewer.

  Raises:
    UserError: a workdir has no run or no metrics, another version wrote it, or it is listed twice;
      or the runs have too many different configs.
  """
  groups = group_runs([read_run(workdir) for workdir in workdirs])
  figures = [*evaluation_figures(groups), *step_figures(groups), *composition_figures(groups)]
  for i, figure in enumerate(figures):
    figure["index"] = i
    _add_texts(figure, groups)
  viewer, packed = _viewer(groups)
  labels = [visible(group.label) for group in groups]
  config = groups[0].runs[0].config
  data = visible(config["data.train"])
  script = "\n".join(
    (PAGE / name).read_text(encoding="utf-8") for name in ("charts.js", "values.js", "viewer.js")
  )
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  page = jinja2.Environment(
    loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined
  )
  by_section = {name: [f for f in figures if f["section"] == name] for name in SECTIONS}
  plotted = ("lines", "limits", "percent", "over", "stack")
  return page.get_template("report.html").render(
    title=f"{' and '.join(labels) if len(labels) < 3 else f'{len(labels)} configs'} on {data}",
    version=gtpo_jax.__version__,
    labels=labels,
    verdicts=[
      verdict(group) + (visible(against(groups[0], group)) if group is not groups[0] else "")
      for group in groups
    ],
    runs=[_row(color, group, run) for color, group in enumerate(groups) for run in group.runs],
    samples=_samples(groups),
    config=config,
    model=visible(config["model.path"] or config["model.preset"]),
    has_seeds=any(len(group.runs) > 1 for group in groups),
    sections=[(name, members) for name, members in by_section.items() if members],
    figure_data={
      "box": dict(zip(("left", "bottom", "right", "top"), BOX, strict=True)),
      "figures": [{key: figure[key] for key in plotted} for figure in figures],
    },
    timeline=timeline_figure(groups),
    probe=probe_figure(groups),
    truth=truth_figure(groups),
    turns=turns_figure(groups),
    viewer=viewer,
    packed=packed,
    **settings(groups),
    css=(PAGE / "report.css").read_text(encoding="utf-8"),
    script=script,
    script_hash=f"'sha256-{digest}'",
  )


def _row(color: int, group: RunGroup, run: RunLogs) -> dict[str, Any]:
  """Returns a run's row in the table of runs."""
  last = run.rows[run.steps]
  split = time_split(RunGroup(group.label, (run,)))
  step_s = sum(split.values())
  shares = {phase: seconds / (step_s or 1.0) for phase, seconds in split.items()}
  return {
    "color": color,
    "label": visible(run_label(group, run)),
    "folder": visible(str(run.workdir)),
    "steps": f"{run.steps} of {run.config['steps']}",
    "held_out": held_out(run),
    "reward": _plain(number(last, "reward/mean")),
    "entropy": _plain(number(last, "entropy/mean")),
    "length": _plain(number(last, "length/mean")),
    "seconds": f"{step_s:.3g} s",
    "execution": execution(run) + judge_cost(run),
    "split": [(phase, f"{share:.0%}", round(100 * share, 2)) for phase, share in shares.items()],
  }


def _samples(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
  """Returns the completions before and after training of the first run of every group."""
  shown = [(color, group, samples(group.runs[0])) for color, group in enumerate(groups)]
  return [
    {"color": color, "label": visible(run_label(group, group.runs[0])), "steps": steps}
    for color, group, steps in shown
    if steps
  ]


def _add_texts(figure: dict[str, Any], groups: Sequence[RunGroup]) -> None:
  """Adds line names, a table of numbers and a summary for screen readers to a figure."""
  for line in figure["lines"]:
    of_group = len(groups) > 1 and not figure["stack"]
    label = visible(groups[line["color"]].label) if of_group else ""
    line["name"] = " ".join(filter(None, (label, line["name"]))) or figure["title"].lower()
  lines = figure["lines"]
  show = lambda y: "–" if y is None else f"{y:.1%}" if figure["percent"] else _plain(y)
  xs = sorted({x for line in lines for x in line["x"]})
  if len(xs) > TABLE_ROWS:
    xs = [xs[round(i * (len(xs) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]
  y_at = [dict(zip(line["x"], line["y"], strict=True)) for line in lines]
  figure["table"] = {
    "heads": [line["name"] for line in lines],
    "rows": [[_plain(x), *(show(values.get(x)) for values in y_at)] for x in xs],
  }
  point = lambda line, i: f"{show(line['y'][i])} at {figure['over']} {_plain(line['x'][i])}"
  ends = [f"{line['name']}: {point(line, 0)}, {point(line, -1)}" for line in lines]
  figure["summary"] = "; ".join(ends) + "."


def _plain(value: float) -> str:
  """Returns a number as text, without a decimal point if it is an integer."""
  if math.isnan(value):
    return "–"
  if value == round(value) and abs(value) < 1e9:
    return f"{value:.0f}"
  return f"{value:.4g}"


def _viewer(groups: Sequence[RunGroup]) -> tuple[dict[str, Any] | None, list[str]]:
  """Returns the viewer's data for every run with credit records, and the packed groups of tokens.

  `packed` in the data of a group is its index in the list of packed groups.
  """
  members = [(group, run) for group in groups for run in group.runs]
  runs = []
  packed: list[str] = []
  for group, run in members:
    data, texts = viewer_data(run.workdir, run.algorithm, MAX_TOKENS // len(members))
    if data["steps"]:
      shown = [entry for step in data["steps"] for entry in step["groups"]]
      for i, entry in enumerate(shown):
        entry["packed"] = len(packed) + i
      packed += texts
      runs.append({"label": visible(run_label(group, run)), **data})
  return ({"runs": runs} if runs else None), packed
