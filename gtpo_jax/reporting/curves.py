"""The picture of a run: held-out accuracy, reward, entropy and length over the steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RIGHT = "#1b7837"
WRONG = "#b2182b"
MEAN = "#444444"
ACCENT = "#2166ac"


def draw_curves(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
  """Draws the rows of a metrics.jsonl into the PNG file `out`."""
  from matplotlib.figure import (
    Figure,
  )  # without pyplot, whose backend is the caller's: a notebook's own

  def curve(axis: Any, key: str, **style: Any) -> None:
    points = [(row["step"], row[key]) for row in rows if key in row]
    if points:
      axis.plot(*zip(*points, strict=True), **style)

  figure = Figure(figsize=(10, 6.5), layout="constrained")
  (held_out, reward), (entropy, length) = axes = figure.subplots(2, 2)
  evaluated = sorted(
    {key for row in rows for key in row if key.startswith("eval/")}, key=_eval_order
  )
  for key, style in zip(
    [key for key in evaluated if not key.endswith(("pass@1", "no_verdict"))],
    ("o-", "s--", "^:"),
    strict=False,
  ):
    label = key.removeprefix("eval/").split("/", 1)[1]
    curve(
      held_out,
      key,
      color={"o": ACCENT, "s": MEAN, "^": RIGHT}[style[0]],
      marker=style[0],
      linestyle=style[1:],
      markersize=4,
      label="sampled pass@1 (" + label + ")" if label.startswith("mean") else label,
    )
  held_out.set(title="held-out problems solved", ylim=(0, 1.02))
  curve(reward, "reward/accuracy", color=RIGHT, label="share of correct completions")
  curve(reward, "reward/mean", color=ACCENT, linestyle="--", label="mean reward")
  reward.set(title="reward in training")
  curve(entropy, "entropy/mean", color=MEAN, label="all tokens")
  curve(entropy, "entropy/correct", color=RIGHT, label="O+ (correct completions)")
  curve(entropy, "entropy/incorrect", color=WRONG, label="O− (incorrect completions)")
  entropy.set(title="policy entropy, nats a token")
  curve(length, "length/mean", color=MEAN, label="mean")
  curve(length, "length/min", color=MEAN, linestyle=":", label="shortest")
  curve(length, "length/max", color=MEAN, linestyle="--", label="longest")
  length.set(title="completion length, tokens")
  for axis in axes.flat:
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
      axis.legend(frameon=False, fontsize=8)
  figure.suptitle(title)
  picture = io.BytesIO()
  figure.savefig(picture, dpi=110)
  fresh = out.with_suffix(".tmp.png")
  fresh.write_bytes(picture.getvalue())
  fresh.replace(out)


def _eval_order(key: str) -> tuple[int, str]:
  kind = key.rsplit("/", 1)[-1]
  return (0 if kind.startswith("mean") else 1 if kind.startswith("pass") else 2, key)
