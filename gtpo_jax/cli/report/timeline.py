"""The figure of a report that shows one step over time: its phases, and how many slots are busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gtpo_jax.cli.report.inline_svg import GRID, INK, MINUS, MIXED, PLUS, drawing_style, inline_svg
from gtpo_jax.cli.report.runs import RunGroup, run_label
from gtpo_jax.logs.credit import PHASES, CreditRecord, credit_files, read_credit
from gtpo_jax.logs.text import visible

COLORS = (INK, PLUS, MIXED, MINUS)  # of the phases
MAX_RUNS = 4
ROW_IN = 0.9  # inches per run


def timeline_figure(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
  """Returns the figure and its numbers; None if no credit record has a timeline.

  It shows the last recorded step of the first run of each of up to four run groups.
  """
  rows = []
  for group in groups[:MAX_RUNS]:
    run = group.runs[0]
    files = list(credit_files(run.workdir).values())
    records = (read_credit(file) for file in reversed(files))
    record = next((record for record in records if len(record.timeline)), None)
    if record:
      rows.append((visible(run_label(group, run)), record))
  if not rows:
    return None
  return {
    "svg": _draw(rows),
    "heads": ["run", "step", "seconds", *PHASES, "idle", "slots busy"],
    "rows": [[label, str(record.step), *_numbers(record.timeline)] for label, record in rows],
  }


def _numbers(timeline: np.ndarray) -> list[str]:
  """Returns the length of a step, the share of each phase and of idle time, and of busy slots."""
  code, begin, end, busy = timeline.T.astype(float)
  seconds = end.max()
  shares = [(end - begin)[code == i].sum() / seconds for i in range(len(PHASES))]
  decode = code == PHASES.index("decode")
  weights = (end - begin)[decode]
  mean = float((busy[decode] * weights).sum() / weights.sum()) if weights.sum() else 0.0
  numbers = [*shares, max(1 - sum(shares), 0.0), mean]
  return [f"{seconds:.3g}", *(f"{number:.0%}" for number in numbers)]


def _draw(rows: Sequence[tuple[str, CreditRecord]]) -> str:
  """Draws one row per run, with time on the x axis, as an SVG element."""
  with drawing_style("a step over time"):
    picture = Figure(figsize=(8.0, 0.8 + ROW_IN * len(rows)))
    height = picture.get_figheight()
    axes = picture.add_axes((0.2, 0.4 / height, 0.78, 1 - 0.75 / height))
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row, (_, record) in enumerate(rows):
      for i, color in enumerate(COLORS):
        _, begin, end, busy = record.timeline[record.timeline[:, 0] == i].T
        # Decoding is as high as the share of busy slots; other phases have the full height.
        heights = 0.8 * busy if i == PHASES.index("decode") else np.full(len(busy), 0.8)
        base = len(rows) - 1 - row
        axes.bar(begin, heights, end - begin, base, align="edge", color=color, linewidth=0)
      axes.axhline(len(rows) - 1 - row, color=GRID, linewidth=0.5)
    axes.set_yticks([len(rows) - 1 - i + 0.4 for i in range(len(rows))], [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, len(rows))
    axes.set_xlim(0, max(float(record.timeline[:, 2].max()) for _, record in rows))
    return inline_svg(picture)
