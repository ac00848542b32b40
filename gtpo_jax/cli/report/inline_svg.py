"""Draws the figures of a report as inline SVG, with colors that the page's style sheet defines."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from gtpo_jax.cli.report.viewer import rounded

SIZE = (4.0, 2.6)  # inches; the page scales the figures
BOX = (0.135, 0.13, 0.975, 0.93)  # left, bottom, right, top of the axes, as shares of a figure
LEAST_SPAN = 0.01  # of an axis of percentages
DASHES = ("-", (0, (4, 2)), (0, (1, 1.6)))
MARKED_POINTS = 12  # curves of up to this many points get markers
# Placeholders for the page's own colors, which differ in light and dark mode. The color of run
# group i is #a000 followed by two digits.
INK = "#b00001"
GRID = "#b00002"
PLUS = "#b00003"
MIXED = "#b00004"
MINUS = "#b00005"
PAGE_COLORS = {INK: "ink-2", GRID: "grid", PLUS: "plus", MIXED: "mixed", MINUS: "minus"}


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve of m points: the mean over the seeds of a run group, with a band around it."""

  color: int  # index of the run group
  dash: int  # index into DASHES
  name: str
  x: np.ndarray  # f64[m]
  y: np.ndarray  # f64[m]
  raw: np.ndarray  # f64[seeds, m], values before smoothing; f64[0, m] if nothing is smoothed
  band: np.ndarray  # f64[2, m], lower and upper end; NaN if there is no band


def curve_figure(
  title: str,
  unit: str,
  section: str,
  lines: Sequence[Line],
  percent: bool = False,
  over_k: bool = False,
) -> dict[str, Any]:
  """Returns a figure of curves: its SVG, and the numbers that the page shows.

  Args:
    title: title of the figure.
    unit: unit of the y axis.
    section: section of the report.
    lines: the curves.
    percent: whether y is a share, shown in percent.
    over_k: whether x is a number of samples k, on a logarithmic axis; if not, x is the step.
  """
  with drawing_style(title):
    picture, axes = _canvas(over_k, percent)
    for line in lines:
      _draw(axes, line, marked=over_k or len(line.x) <= MARKED_POINTS)
    if over_k:
      ks = sorted({int(k) for line in lines for k in line.x})
      axes.xaxis.set_major_locator(FixedLocator(ks))
      axes.xaxis.set_major_formatter(lambda k, _: f"{k:.0f}")
    _limit_y(axes, lines, percent)
    keys = sorted({(line.dash, line.name) for line in lines if line.name})
    figure = _figure(title, unit, section, picture, axes, [_numbers(line) for line in lines])
  return figure | {"percent": percent, "over": "k" if over_k else "step", "keys": keys}


def stack_figure(
  title: str, section: str, color: int, steps: np.ndarray, shares: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Returns a figure of bars at steps f64[m] of the run group `color`.

  Each stacks three shares f64[m], by name from the bottom to the top, which add up to 1.
  """
  with drawing_style(title):
    picture, axes = _canvas(over_k=False, percent=True)
    bottom = np.zeros(len(steps))
    width = float(steps[1] - steps[0]) if len(steps) > 1 else 1.0
    for share, fill in zip(shares.values(), (PLUS, MIXED, MINUS), strict=True):
      axes.bar(steps, share, width, bottom, color=fill, linewidth=0, gid=f"both color{color}")
      bottom = bottom + share
    axes.set(ylim=(0, 1), xlim=(steps[0] - width / 2, steps[-1] + width / 2))
    lines = [
      {"color": color, "dash": 0, "name": name, "x": steps.tolist(), "y": [*map(rounded, share)]}
      for name, share in shares.items()
    ]
    figure = _figure(title, "", section, picture, axes, lines)
  return figure | {"percent": True, "over": "step", "keys": [], "stack": True}


def _figure(
  title: str, unit: str, section: str, picture: Figure, axes: Any, lines: list[dict[str, Any]]
) -> dict[str, Any]:
  """Returns what all figures have; within `drawing_style`."""
  return {
    "title": title,
    "unit": unit,
    "section": section,
    "svg": inline_svg(picture),
    "lines": lines,
    "limits": [float(x) for x in axes.get_xlim()],
    "stack": False,
  }


def mean_over_seeds(values: np.ndarray) -> np.ndarray:
  """Returns the mean f64[m] of f64[seeds, m] over seeds, without NaN; NaN if all are NaN."""
  counts = (~np.isnan(values)).sum(0)
  sums = np.nan_to_num(values).sum(0)
  return np.divide(sums, counts, out=np.full(values.shape[1:], np.nan), where=counts > 0)


def seed_range(values: np.ndarray) -> np.ndarray:
  """Returns the minimum and maximum over seeds, f64[2, m], of f64[seeds, m]; NaN for one seed."""
  if len(values) < 2:
    return np.full((2, values.shape[1]), np.nan)
  return np.stack([np.fmin.reduce(values), np.fmax.reduce(values)])


def _draw(axes: Any, line: Line, marked: bool) -> None:
  """Draws a curve. Each `gid` becomes the class by which the page shows or hides a part of it."""
  style = {
    "color": f"#a000{line.color:02d}",
    "linestyle": DASHES[line.dash],
    "marker": "o" if marked else None,
  }
  for raw in line.raw:
    faint = {"alpha": 0.35, "linewidth": 0.9, "markersize": 2, "gid": f"raw color{line.color}"}
    axes.plot(line.x, raw, **style, **faint)
  if not np.isnan(line.band).all():
    axes.fill_between(
      line.x,
      *line.band,
      color=style["color"],
      alpha=0.16,
      linewidth=0,
      gid=f"smooth color{line.color}",
    )
  shown = "smooth" if len(line.raw) else "both"
  axes.plot(
    line.x, line.y, **style, linewidth=1.7, markersize=3.2, gid=f"{shown} color{line.color}"
  )


def _limit_y(axes: Any, lines: Sequence[Line], percent: bool) -> None:
  """Starts the y axis at 0 if the values are nonnegative and some are small.

  An axis of percentages spans at least `LEAST_SPAN`, so its labels fit into the margin.
  """
  low, high = axes.get_ylim()
  least = LEAST_SPAN if percent else 0.0
  parts = [part.ravel() for line in lines for part in (line.y, line.raw, line.band)]
  values = np.concatenate(parts)
  if not np.nanmax(np.abs(values)):
    axes.set_ylim(0, least or 1)
  elif 0 <= np.nanmin(values) <= 0.5 * np.nanmax(values):
    axes.set_ylim(0, max(high, least))
  elif high - low < least:
    middle = (low + high) / 2
    axes.set_ylim(middle - least / 2, middle + least / 2)


def _numbers(line: Line) -> dict[str, Any]:
  """Returns a curve's data for the page; for a smoothed curve, the means of the raw values."""
  values = mean_over_seeds(line.raw) if len(line.raw) else line.y
  return {
    "color": line.color,
    "dash": line.dash,
    "name": line.name,
    "x": line.x.tolist(),
    "y": [None if np.isnan(y) else rounded(y) for y in values],
  }


def drawing_style(title: str) -> Any:
  """Returns a context with the style of the page's figures; `title` makes their ids unique."""
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


def inline_svg(picture: Figure) -> str:
  """Returns a figure as an inline SVG element.

  Element ids that would repeat within a page become classes or are removed.
  """
  out = io.StringIO()
  no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
  picture.savefig(out, format="svg", transparent=True, metadata=no_metadata)
  svg = out.getvalue()
  svg = svg[svg.index("<svg") :]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  svg = re.sub(r'<g id="((?:raw|smooth|both) color\d+)"', r'<g class="\1"', svg)
  svg = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", svg)
  svg = re.sub(r"#a000(\d\d)", lambda match: f"var(--color{int(match[1])})", svg)
  for placeholder, name in PAGE_COLORS.items():
    svg = svg.replace(placeholder, f"var(--{name})")
  opening = r'<svg \1 aria-hidden="true" focusable="false">'
  svg = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', opening, svg, count=1)
  return re.sub(r">\s+<", "><", svg)
