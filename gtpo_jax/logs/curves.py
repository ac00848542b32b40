"""The PNG summary of a run: held-out accuracy, reward, entropy and length over the steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.paths import write_atomically

CORRECT = "#1b7837"
INCORRECT = "#b2182b"
MEAN = "#444444"
ACCENT = "#2166ac"
# Color, marker and line style of the evaluation curves, in order. Other metrics are not plotted.
EVAL_STYLES = ((ACCENT, "o", "-"), (MEAN, "s", "--"), (CORRECT, "^", ":"))
NOT_PLOTTED = ("pass@1", "no_verdict")  # evaluation metrics; pass@1 equals mean@n


def draw_curves(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
  """Draws the rows of a metrics.jsonl into the PNG file `out`."""
  # Imported here because training needs matplotlib only at its end. Not imported through pyplot,
  # which would change the backend of the caller, such as a notebook.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 7), layout="constrained")
  axes = figure.subplots(2, 2)
  (held_out, reward), (entropy, length) = axes
  _draw_evaluations(held_out, rows)
  _title(reward, "reward in training")
  _curve(reward, rows, "reward/accuracy", color=CORRECT, label="share of correct completions")
  _curve(reward, rows, "reward/mean", color=ACCENT, linestyle="--", label="mean reward")
  _title(entropy, "policy entropy, nats per token")
  _curve(entropy, rows, "entropy/mean", color=MEAN, label="all tokens")
  _curve(entropy, rows, "entropy/correct", color=CORRECT, label="O+ (correct)")
  _curve(entropy, rows, "entropy/incorrect", color=INCORRECT, label="O− (incorrect)")
  _title(length, "completion length, tokens")
  _curve(length, rows, "length/mean", color=MEAN, label="mean")
  _curve(length, rows, "length/min", color=MEAN, linestyle=":", label="shortest")
  _curve(length, rows, "length/max", color=MEAN, linestyle="--", label="longest")
  for axis in axes.flat:
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    _legend_above(axis)
  figure.suptitle(title, parse_math=False)
  picture = io.BytesIO()
  figure.savefig(picture, dpi=110)
  write_atomically(out, picture.getvalue())


def _draw_evaluations(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
  _title(axis, "held-out problems solved")
  axis.set_ylim(0, 1.02)
  axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
  keys = {key for row in rows for key in row if key.startswith("eval/")}
  keys = {key for key in keys if key.startswith("eval/all/")} or keys  # of several sources
  kind = lambda key: key.rsplit("/", 1)[-1][:4]
  order = lambda key: (0 if kind(key) == "mean" else 1 if kind(key) == "pass" else 2, key)
  plotted = [key for key in sorted(keys, key=order) if not key.endswith(NOT_PLOTTED)]
  for key, (color, marker, line) in zip(plotted, EVAL_STYLES, strict=False):
    name = key.rsplit("/", 1)[-1]
    label = f"sampled pass@1 ({name})" if name.startswith("mean") else name
    style = {"color": color, "marker": marker, "linestyle": line, "markersize": 4}
    _curve(axis, rows, key, label=label, **style)


def _title(axis: Any, text: str) -> None:
  """Sets the title of a plot, with room for a legend between the title and the curves."""
  axis.set_title(text, loc="left", pad=22, fontsize=11, fontweight="bold")


def _legend_above(axis: Any) -> None:
  """Places the legend above the axes, where it covers no curve."""
  labels = axis.get_legend_handles_labels()[1]
  if labels:
    axis.legend(
      loc="lower left",
      bbox_to_anchor=(0, 1),
      ncols=len(labels),
      borderaxespad=0.2,
      handlelength=1.6,
      columnspacing=1.2,
      frameon=False,
      fontsize=8,
    )


def _curve(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
  points = [(row["step"], row[key]) for row in rows if key in row]
  if points:
    axis.plot(*zip(*points, strict=True), **style)
