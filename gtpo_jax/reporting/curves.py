"""The PNG summary of a run: held-out accuracy, reward, entropy and length over the steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CORRECT = "#1b7837"
INCORRECT = "#b2182b"
MEAN = "#444444"
ACCENT = "#2166ac"
# Color, marker and line style of the evaluation curves, in order. Other metrics are not drawn.
EVAL_STYLES = ((ACCENT, "o", "-"), (MEAN, "s", "--"), (CORRECT, "^", ":"))
NOT_DRAWN = ("pass@1", "no_verdict")  # evaluation metrics; pass@1 equals mean@n


def draw_curves(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
  """Draws the rows of a metrics.jsonl into the PNG file `out`."""
  # Imported here because training needs matplotlib only at its end. Not imported through pyplot,
  # which would change the backend of the caller, such as a notebook.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 6.5), layout="constrained")
  axes = figure.subplots(2, 2)
  (held_out, reward), (entropy, length) = axes
  _draw_evaluations(held_out, rows)
  reward.set(title="reward in training")
  _curve(reward, rows, "reward/accuracy", color=CORRECT, label="share of correct completions")
  _curve(reward, rows, "reward/mean", color=ACCENT, linestyle="--", label="mean reward")
  entropy.set(title="policy entropy, nats per token")
  _curve(entropy, rows, "entropy/mean", color=MEAN, label="all tokens")
  _curve(entropy, rows, "entropy/correct", color=CORRECT, label="O+ (correct completions)")
  _curve(entropy, rows, "entropy/incorrect", color=INCORRECT, label="O− (incorrect completions)")
  length.set(title="completion length, tokens")
  _curve(length, rows, "length/mean", color=MEAN, label="mean")
  _curve(length, rows, "length/min", color=MEAN, linestyle=":", label="shortest")
  _curve(length, rows, "length/max", color=MEAN, linestyle="--", label="longest")
  for axis in axes.flat:
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
      axis.legend(frameon=False, fontsize=8)
  figure.suptitle(title)
  picture = io.BytesIO()
  figure.savefig(picture, dpi=110)
  temporary = out.with_suffix(".tmp.png")
  temporary.write_bytes(picture.getvalue())
  temporary.replace(out)


def _draw_evaluations(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
  axis.set(title="held-out problems solved", ylim=(0, 1.02))
  keys = {key for row in rows for key in row if key.startswith("eval/")}
  drawn = [key for key in sorted(keys, key=_eval_order) if not key.endswith(NOT_DRAWN)]
  for key, (color, marker, line) in zip(drawn, EVAL_STYLES, strict=False):
    name = key.removeprefix("eval/").split("/", 1)[1]
    label = f"sampled pass@1 ({name})" if name.startswith("mean") else name
    style = {"color": color, "marker": marker, "linestyle": line, "markersize": 4}
    _curve(axis, rows, key, label=label, **style)


def _curve(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
  points = [(row["step"], row[key]) for row in rows if key in row]
  if points:
    axis.plot(*zip(*points, strict=True), **style)


def _eval_order(key: str) -> tuple[int, str]:
  name = key.rsplit("/", 1)[-1]
  return (0 if name.startswith("mean") else 1 if name.startswith("pass") else 2, key)
