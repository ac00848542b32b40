"""The figures of a report: each metric of the paper as one SVG, coloured by the page's style sheet."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from gtpo_jax.reporting.runs import Kind, smoothed
from gtpo_jax.reporting.viewer import rounded

SIZE = (4.0, 2.6)  # inches; the page scales them
BOX = (0.135, 0.13, 0.975, 0.93)  # of the axes in the picture: left, bottom, right, top
DASHES = ("-", (0, (4, 2)), (0, (1, 1.6)))
POINTS = 600  # of a curve; longer runs are averaged over stretches
FEW = 12  # points that are marked
SMOOTH = 15  # the moving average spans this part of a run
# Colours that the page replaces by its own, light or dark.
INK = "#b00001"
GRID = "#b00002"
PLUS = "#b00003"
MIXED = "#b00004"
MINUS = "#b00005"


@dataclasses.dataclass(frozen=True)
class Panel:
  """What one figure shows."""

  title: str
  unit: str
  curves: dict[
    str, str
  ]  # metric: its name in the key; an @ in it stands for each number of samples that was evaluated
  percent: bool = False
  section: str = "Policy"


PANELS = (
  Panel("Policy entropy", "nats a token", {"entropy/mean": ""}),
  Panel(
    "Policy entropy in O+ and O−",
    "nats a token",
    {"entropy/correct": "O+", "entropy/incorrect": "O−"},
  ),
  Panel("Response length", "tokens", {"length/mean": ""}),
  Panel("Cut off", "share at the length limit", {"length/cut_off": ""}, percent=True),
  Panel("Mean reward", "with length penalty", {"reward/mean": ""}, section="Reward"),
  Panel(
    "Accuracy in training", "share correct", {"reward/accuracy": ""}, percent=True, section="Reward"
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
  Panel(
    "SamplingParams–trainer mismatch", "KL, nats a token", {"mismatch/kl": ""}, section="Update"
  ),
  Panel(
    "Largest mismatch", "nats, log-prob of a token", {"mismatch/max_abs_logp": ""}, section="Update"
  ),
  Panel("Gradient norm", "before clipping", {"grad_norm": ""}, section="Update"),
  Panel("Throughput", "tokens a second, from step 2", {"tokens/s": ""}, section="Groups and time"),
  Panel("Time of a step", "seconds, from step 2", {"time/step": ""}, section="Groups and time"),
)
TIMES = {key for panel in PANELS if panel.section == "Groups and time" for key in panel.curves}


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve: the mean of a kind's seeds, with a band around it."""

  kind: int  # its colour
  dash: int
  name: str
  x: np.ndarray  # f64[m]
  y: np.ndarray  # f64[m]
  raw: (
    np.ndarray
  )  # f64[seeds, m], what the smoothed ones are made from; empty where nothing is smoothed
  band: np.ndarray  # f64[2, m]; NaN where there is none


def step_figures(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
  """The figures over the steps, those that the runs have numbers for."""
  figures = []
  for panel in PANELS:
    lines = [
      line
      for i, kind in enumerate(kinds)
      for dash, (key, name) in enumerate(panel.curves.items())
      if (line := _over_steps(kind, i, key, dash, name))
    ]
    if lines:
      figures.append(figure(panel.title, panel.unit, panel.section, lines, percent=panel.percent))
  return figures


def evaluation_figures(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
  """Held-out accuracy over the steps; pass@k, best@k and maj@k over k, of the first and the last evaluation."""
  tasks = list(dict.fromkeys(key.split("/")[1] for kind in kinds for key in kind.eval_keys))
  figures = []
  for task in tasks:
    on = f" on {task}" if len(tasks) > 1 else ""
    lines: list[Line] = []
    for i, kind in enumerate(kinds):
      sampled = [key for key in kind.eval_keys if key.startswith(f"eval/{task}/mean@")]
      for dash, key in enumerate([*sampled[:1], f"eval/{task}/greedy"]):
        if key in kind.eval_keys:
          lines.append(_evaluated(kind, i, key, dash, ("sampled (mean@n)", "greedy")[dash]))
    if lines:
      figures.append(
        figure(f"Held-out accuracy{on}", "problems solved", "Evaluation", lines, percent=True)
      )
    for name, title, unit in (
      ("pass", "pass@k", "solved by one of k"),
      ("best", "Mean reward of best of k", "of k completions"),
      ("maj", "maj@k", "solved by majority of k"),
    ):
      lines = [
        line
        for i, kind in enumerate(kinds)
        for line in _over_k(kind, i, f"eval/{task}/{name}@", alone=len(kinds) == 1)
      ]
      if lines:
        figures.append(
          figure(f"{title}{on}", unit, "Evaluation", lines, percent=name != "best", over_k=True)
        )
  return figures


def composition_figures(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
  """For each kind, the share of groups all correct, mixed and all wrong, one upon the other."""
  figures = []
  for i, kind in enumerate(kinds):
    steps, right = kind.series("groups/all_correct")
    _, wrong = kind.series("groups/all_wrong")
    if not np.isnan(right).all():
      right = np.nan_to_num(right).mean(0)
      wrong = np.nan_to_num(wrong).mean(0)
      shares = {"all correct": right, "mixed": 1 - right - wrong, "all wrong": wrong}
      figures.append(
        _stack(f"Group composition{f': {kind.label}' if len(kinds) > 1 else ''}", i, steps, shares)
      )
  return figures


def time_split(kind: Kind) -> dict[str, float]:
  """Seconds of a step by phase, the median over steps (but for the first, which compiles, where there are others) and seeds."""
  keys = ("time/sample", "time/reward", "time/update", "time/step")
  seconds = [
    float(np.nanmedian(values[:, 1:] if values.shape[1] > 1 else values))
    if not np.isnan(values := kind.series(key)[1]).all()
    else 0.0
    for key in keys
  ]
  *phases, whole = seconds
  return {
    "sampling": phases[0],
    "reward": phases[1],
    "update": phases[2],
    "other": max(whole - sum(phases), 0.0),
  }


def _over_steps(kind: Kind, i: int, key: str, dash: int, name: str) -> Line | None:
  steps, values = kind.series(key)
  if key in TIMES and len(steps) > 1:  # the first step compiles
    steps = steps[1:]
    values = values[:, 1:]
  if np.isnan(values).all():
    return None
  steps, values = _thinned(steps, values)
  curves = smoothed(values, len(steps) / SMOOTH)
  return Line(i, dash, name, steps, _mean(curves), values, _range(curves))


def _evaluated(kind: Kind, i: int, key: str, dash: int, name: str) -> Line:
  steps, values, ends = kind.evaluated(key)
  return Line(
    i,
    dash,
    name,
    steps,
    _mean(values),
    np.empty((0, len(steps))),
    _range(values) if len(values) > 1 else ends[0].T,
  )


def _over_k(kind: Kind, i: int, prefix: str, alone: bool) -> list[Line]:
  ks = sorted(int(key.removeprefix(prefix)) for key in kind.eval_keys if key.startswith(prefix))
  columns = [kind.evaluated(f"{prefix}{k}") for k in ks]
  if len(ks) < 2 or not len(columns[0][0]):
    return []
  steps = columns[0][0]
  lines = []
  for dash, at in enumerate([-1, 0] if len(steps) > 1 else [-1]):
    values = np.stack([values[:, at] for _, values, _ in columns], axis=1)
    ends = np.stack([ends[0, at] for *_, ends in columns], axis=1)
    name = f"step {steps[at]}" if alone else ("last evaluation", "first evaluation")[dash]
    lines.append(
      Line(
        i,
        dash,
        name,
        np.asarray(ks),
        _mean(values),
        np.empty((0, len(ks))),
        _range(values) if len(values) > 1 else ends,
      )
    )
  return lines


def figure(
  title: str,
  unit: str,
  section: str,
  lines: Sequence[Line],
  percent: bool = False,
  over_k: bool = False,
) -> dict[str, Any]:
  """A figure of curves: its picture, and its numbers for the page to read off."""
  with _style(title):
    picture, axes = _canvas(over_k, percent)
    for line in lines:
      color = f"#a000{line.kind:02d}"
      marker = "o" if over_k or len(line.x) <= FEW else None
      for raw in line.raw:
        axes.plot(
          line.x,
          raw,
          color=color,
          alpha=0.35,
          linewidth=0.9,
          linestyle=DASHES[line.dash],
          marker=marker,
          markersize=2,
          gid=f"raw kind{line.kind}",
        )
      if not np.isnan(line.band).all():
        axes.fill_between(
          line.x, *line.band, color=color, alpha=0.16, linewidth=0, gid=f"smooth kind{line.kind}"
        )
      axes.plot(
        line.x,
        line.y,
        color=color,
        linewidth=1.7,
        linestyle=DASHES[line.dash],
        marker=marker,
        markersize=3.2,
        gid=f"{'smooth' if len(line.raw) else 'both'} kind{line.kind}",
      )
    if over_k:
      ks = sorted({int(k) for line in lines for k in line.x})
      axes.xaxis.set_major_locator(FixedLocator(ks))
      axes.xaxis.set_major_formatter(lambda k, _: f"{k:.0f}")
    high = axes.get_ylim()[1]
    values = np.concatenate(
      [part.ravel() for line in lines for part in (line.y, line.raw, line.band)]
    )
    if 0 <= np.nanmin(values) <= 0.5 * np.nanmax(values) or not np.nanmax(np.abs(values)):
      axes.set_ylim(0, high if np.nanmax(values) else 0.01 if percent else 1)
    svg, limits = _svg(picture, axes)
  data = [
    {
      "kind": line.kind,
      "dash": line.dash,
      "name": line.name,
      "x": line.x.tolist(),
      "y": [
        None if np.isnan(y) else rounded(y) for y in (_mean(line.raw) if len(line.raw) else line.y)
      ],
    }
    for line in lines
  ]
  return {
    "title": title,
    "unit": unit,
    "section": section,
    "svg": svg,
    "lines": data,
    "limits": limits,
    "percent": percent,
    "over": "k" if over_k else "step",
    "keys": sorted({(line.dash, line.name) for line in lines if line.name}),
    "stack": False,
  }


def _stack(
  title: str, kind: int, steps: np.ndarray, shares: dict[str, np.ndarray]
) -> dict[str, Any]:
  steps, values = _thinned(steps, np.stack(list(shares.values())))
  with _style(title):
    picture, axes = _canvas(False, True)
    bottom = np.zeros(len(steps))
    width = float(steps[1] - steps[0]) if len(steps) > 1 else 1.0
    for values_of, color in zip(values, (PLUS, MIXED, MINUS), strict=True):
      axes.bar(steps, values_of, width, bottom, color=color, linewidth=0, gid=f"both kind{kind}")
      bottom = bottom + values_of
    axes.set(ylim=(0, 1), xlim=(steps[0] - width / 2, steps[-1] + width / 2))
    svg, limits = _svg(picture, axes)
  data = [
    {"kind": kind, "dash": 0, "name": name, "x": steps.tolist(), "y": [rounded(y) for y in row]}
    for name, row in zip(shares, values, strict=True)
  ]
  return {
    "title": title,
    "unit": "",
    "section": "Groups and time",
    "svg": svg,
    "lines": data,
    "limits": limits,
    "percent": True,
    "over": "step",
    "keys": [],
    "stack": True,
  }


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """At most `POINTS` points: each the mean of as many steps, the last stretch may be shorter."""
  stretch = -(-len(steps) // POINTS)
  starts = np.arange(0, len(steps), stretch)
  counts = np.add.reduceat(~np.isnan(values), starts, axis=1, dtype=float)
  sums = np.add.reduceat(np.nan_to_num(values), starts, axis=1)
  means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
  return np.add.reduceat(steps, starts) / np.diff([*starts, len(steps)]), means


def _mean(values: np.ndarray) -> np.ndarray:
  """Over the seeds that have a number; NaN where none has."""
  counts = (~np.isnan(values)).sum(0)
  return np.divide(
    np.nan_to_num(values).sum(0), counts, out=np.full(values.shape[1:], np.nan), where=counts > 0
  )


def _range(values: np.ndarray) -> np.ndarray:
  """The lowest and the highest seed, f64[2, m]; NaN where there is one seed alone."""
  if len(values) < 2:
    return np.full((2, values.shape[1]), np.nan)
  return np.stack([np.fmin.reduce(values), np.fmax.reduce(values)])


def _style(title: str) -> Any:
  return matplotlib.rc_context(
    {
      "svg.fonttype": "none",
      "svg.hashsalt": title,
      "font.size": 9.5,
      "text.color": INK,
      "axes.labelcolor": INK,
      "axes.edgecolor": GRID,
      "xtick.color": GRID,
      "ytick.color": GRID,
      "xtick.labelcolor": INK,
      "ytick.labelcolor": INK,
      "axes.linewidth": 0.7,
      "axes.formatter.useoffset": False,
      "axes.formatter.limits": (-3, 5),
      "path.simplify": True,
      "lines.solid_capstyle": "round",
    }
  )


def _canvas(over_k: bool, percent: bool) -> tuple[Figure, Any]:
  picture = Figure(figsize=SIZE)
  FigureCanvasSVG(picture)
  left, bottom, right, top = BOX
  axes = picture.add_axes((left, bottom, right - left, top - bottom))
  axes.spines[["top", "right", "left"]].set_visible(False)
  axes.grid(axis="y", color=GRID, linewidth=0.5)
  axes.set_axisbelow(True)
  axes.tick_params(axis="y", length=0)
  axes.tick_params(axis="x", length=2.5, width=0.7)
  axes.yaxis.set_major_locator(MaxNLocator(5))
  if over_k:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
  else:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  if percent:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
  return picture, axes


def _svg(picture: Figure, axes: Any) -> tuple[str, list[float]]:
  """The picture as an inline element, without identifiers that would stand twice in a page; and the limits of x."""
  out = io.StringIO()
  picture.savefig(
    out,
    format="svg",
    transparent=True,
    metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
  )
  svg = out.getvalue()
  svg = svg[svg.index("<svg") :]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  svg = re.sub(r'<g id="((?:raw|smooth|both) kind\d+)"', r'<g class="\1"', svg)
  svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)
  svg = re.sub(r"#a000(\d\d)", lambda found: f"var(--kind{int(found[1])})", svg)
  for color, name in (
    (INK, "ink-2"),
    (GRID, "grid"),
    (PLUS, "plus"),
    (MIXED, "mixed"),
    (MINUS, "minus"),
  ):
    svg = svg.replace(color, f"var(--{name})")
  svg = re.sub(
    r'<svg [^>]*?(viewBox="[^"]+")[^>]*>',
    r'<svg \1 aria-hidden="true" focusable="false">',
    svg,
    count=1,
  )
  return re.sub(r">\s+<", "><", svg), [float(x) for x in axes.get_xlim()]
