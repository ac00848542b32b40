"""The figure of a report that shows episodes as rows of turns, with credit and truth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gtpo_jax.cli.report.inline_svg import GRID, INK, MINUS, PLUS, drawing_style, inline_svg
from gtpo_jax.cli.report.runs import RunGroup, run_label
from gtpo_jax.logs.credit import CreditRecord, credit_files, read_credit, shaped_and_advantages
from gtpo_jax.logs.credit_scores import turn_metrics, turn_table
from gtpo_jax.logs.text import visible
from gtpo_jax.rollout.scoring.turn_signals import first_tokens

ROW_IN = 0.5  # inches per episode
EPISODES = 8
TURNS = 8
CHARS = 13  # of a turn's text
CONTROL = re.compile(r"<\|[^|<>]*\|>|</?s>")  # tokens that end a turn


def turns_figure(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
  """Returns the figure and its numbers; None if no run's first credit record knows turns' truth.

  It shows a prompt's episodes in the first such record, with the credit of the algorithm that
  trained the run.
  """
  for group, run in [(of, run) for of in groups for run in of.runs]:
    for file in list(credit_files(run.workdir).values())[:1]:
      record = read_credit(file)
      at = first_tokens(record.mask[record.shown])
      if np.isfinite(record.turn_truth[record.shown][at]).any():
        signals = record.signals(run.algorithm)
        _, advantages = shaped_and_advantages(run.algorithm, signals)
        label = visible(run_label(group, run))
        return _figure(record, np.asarray(advantages), signals.mask, label)
  return None


def _figure(
  record: CreditRecord, advantages: np.ndarray, mask: np.ndarray, label: str
) -> dict[str, Any]:
  rows = []
  group = record.shown[0]
  table = turn_table(record.turn_truth, advantages, mask)
  for j in range(min(EPISODES, mask.shape[1])):
    here = np.flatnonzero(table["episode"] == group * mask.shape[1] + j)[:TURNS]
    texts = turn_texts(record, 0, j)
    turns = [
      (text, float(table["credit"][i]), float(table["truth"][i]))
      for i, text in zip(here, texts, strict=False)
    ]
    rows.append(("right" if record.correct[group, j] else "wrong", turns))
  scores = turn_metrics(record.turn_truth, advantages, mask)
  return {
    "svg": _draw(rows),
    "heads": ["episode", "turn", "text", "credit", "truth"],
    "rows": [
      [f"{j + 1}, {verdict}", k + 1, text, _number(credit), _number(truth)]
      for j, (verdict, turns) in enumerate(rows)
      for k, (text, credit, truth) in enumerate(turns)
    ],
    "text": (
      f"Episodes of one prompt in step {record.step} of {label}, turn by turn. The colour is the "
      "credit that the turn got from the algorithm of the run: its mean advantage. The truth is "
      "its true advantage, which the environment knows: by how much it made success more "
      f"probable. In the whole batch, {scores['sign']:.0%} of the turns have credit of the right "
      f"sign, and the rank correlation of credit and truth is {scores['rank']:.2f} within prompts "
      f"and {scores['rank_episode']:.2f} within episodes."
    ),
  }


def turn_texts(record: CreditRecord, i: int, j: int) -> list[str]:
  """Returns the texts of the turns of an episode of the i-th group shown, shortened."""
  mask = record.mask[record.shown[i], j]
  number = np.cumsum(first_tokens(mask))
  texts = []
  for turn in range(1, int(number.max(initial=0)) + 1):
    pieces = record.piece[i, j][mask & (number == turn)]
    text = CONTROL.sub("", "".join(record.pieces[piece] for piece in pieces))
    text = visible(" ".join(text.split()))
    texts.append(text if len(text) <= CHARS else text[: CHARS - 1] + "…")
  return texts


def _number(value: float) -> str:
  return "–" if np.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _draw(rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> str:
  """Draws a row per episode and a box per turn, as an SVG element."""
  largest = max((abs(turn[1]) for _, turns in rows for turn in turns), default=0.0) or 1.0
  with drawing_style("credit of turns"):
    picture = Figure(figsize=(8.0, ROW_IN * len(rows)))
    axes = picture.add_axes((0.07, 0.0, 0.93, 1.0))
    axes.axis("off")
    axes.set_xlim(0, max(len(turns) for _, turns in rows))
    axes.set_ylim(len(rows), 0)
    for y, (verdict, turns) in enumerate(rows):
      axes.text(-0.06, y + 0.45, verdict, ha="right", va="center", color=INK)
      for x, (text, credit, truth) in enumerate(turns):
        color = to_rgba(PLUS if credit > 0 else MINUS, 0.5 * abs(credit) / largest)
        corner = (x + 0.02, y + 0.05)
        axes.add_patch(Rectangle(corner, 0.96, 0.85, facecolor=color, edgecolor=GRID))
        middle = {"ha": "center", "va": "center", "parse_math": False}
        axes.text(x + 0.5, y + 0.3, text, **middle)
        axes.text(x + 0.5, y + 0.68, f"{_number(credit)} / {_number(truth)}", fontsize=8, **middle)
    return inline_svg(picture)
