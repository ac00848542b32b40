"""Figures of a report: a step over time, credit by token and by turn, and the probe of recipes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gtpo_jax.algorithms import RECIPES, Algorithm, make
from gtpo_jax.cli.probing.statistics import probe_rows
from gtpo_jax.cli.report.inline_svg import GRID, INK, MINUS, MIXED, PLUS, drawing_style, inline_svg
from gtpo_jax.cli.report.runs import RunGroup, run_label
from gtpo_jax.logs.credit import (
  PHASES,
  CreditRecord,
  credit_files,
  read_credit,
  shaped_and_advantages,
)
from gtpo_jax.logs.credit_scores import class_weight, truth_metrics, turn_metrics, turn_table
from gtpo_jax.logs.text import visible
from gtpo_jax.logs.truth import of_class
from gtpo_jax.rollout.scoring.turn_signals import first_tokens

COLORS = (INK, PLUS, MIXED, MINUS)  # of the phases
MAX_RUNS = 4
TIMELINE_ROW_IN = 0.9  # inches per run


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
    "svg": _draw_timeline(rows),
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


def _draw_timeline(rows: Sequence[tuple[str, CreditRecord]]) -> str:
  """Draws one row per run, with time on the x axis, as an SVG element."""
  with drawing_style("a step over time"):
    picture = Figure(figsize=(8.0, 0.8 + TIMELINE_ROW_IN * len(rows)))
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


TRUTH_ROW_IN = 0.26  # inches per algorithm
# By class, from the most deserving: marker, color, and whether the marker is filled.
MARKERS = {
  "decisive": ("o", PLUS, True),
  "copied": ("o", PLUS, False),
  "filler": ("s", MINUS, True),
  "inert": ("s", INK, False),
}
SCORES = {
  "credit/truth_auroc_correct": "AUROC, O+",
  "credit/truth_auroc_incorrect": "AUROC, O−",
  "credit/truth_lift_correct": "lift, O+",
  "credit/truth_lift_incorrect": "lift, O−",
}


def truth_figure(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
  """Returns the figure and its numbers; None if no run has a credit record that knows the truth.

  It shows the first such record of the first run, whose completions come from the base model. Every
  algorithm is applied to the same completions. W = A+ - A- of a class of tokens is the mean
  advantage in correct completions minus that in incorrect ones, relative to W over all tokens: with
  uniform credit it is 1 for every class.
  """
  for group in groups:
    for run in group.runs:
      for file in credit_files(run.workdir).values():
        record = read_credit(file)
        if record.truth.any():
          return _truth_figure(record, visible(run_label(group, run)))
  return None


def _truth_figure(record: CreditRecord, label: str) -> dict[str, Any]:
  rows = [(name, *_measured(algorithm, record)) for name, algorithm in distinct_algorithms()]
  weights = np.asarray([row[1] for row in rows])
  cell = lambda value: "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")
  return {
    "svg": _draw_truth([row[0] for row in rows], weights),
    "heads": ["algorithm", *MARKERS, *SCORES.values()],
    "rows": [[name, *map(cell, by_class), *map(cell, scores)] for name, by_class, scores in rows],
    "text": (
      f"The completions of step {record.step} of {label}, with the advantages that each algorithm "
      "would give them with its published settings. On this task it is known which tokens decide: "
      "decisive ones, and copied ones, which must agree with them. Filler may be anything, and "
      "inert tokens are fixed by the format. Credit that finds the decisions has its circles on "
      "the right and its squares on the left; uniform credit has all of them at 1."
    ),
  }


def probe_figure(groups: Sequence[RunGroup]) -> dict[str, Any] | None:
  """Returns the figure and numbers of the first run's `gtpo probe`; None if no run has one."""
  for run in (run for group in groups for run in group.runs):
    if (file := run.workdir / "probe.json").exists():
      return draw_probe(json.loads(file.read_text()))
  return None


def draw_probe(result: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the figure and the numbers of a probe, as `gtpo_jax.probe` returns it."""
  arms = result["arms"]
  heads, *rows = probe_rows(arms)
  first, *others = arms
  with drawing_style("probe"):
    axes = _row_axes([visible(name) for name in others], 0, below_in=0.56, above_in=0.1)
    for y, name in enumerate(others):
      middle, low, high = arms[name]["difference"]
      color = (PLUS if middle > 0 else MINUS) if low > 0 or high < 0 else INK
      axes.plot([low, high], [y, y], color=color, linewidth=1.2)
      axes.plot(middle, y, "o", color=color, markersize=6)
    axes.set_xlabel(f"cosine with the true gradient, minus that of {visible(first)}")
    svg = inline_svg(axes.figure)
  text = (
    f"Verdict: {result['verdict']}. Measured before training on {result['batches']} batches, with "
    f"{result['reference']} others for the true gradient; 95 % intervals."
  )
  return {"svg": svg, "heads": heads, "rows": rows, "text": visible(text)}


def distinct_algorithms() -> list[tuple[str, Algorithm]]:
  """Returns the algorithms that assign different credit, with the names of all that share it.

  Algorithms with a guide, a teacher or signals of their own are left out. Objectives and ratios act
  on the credit only after the first gradient update.
  """
  same: dict[Any, list[str]] = {}
  for name, recipe in RECIPES.items():
    algorithm = make(name)
    settings = algorithm.settings
    if settings.guide_completions or recipe.distillation or recipe.needs:
      continue
    uniform = not (recipe.per_token_credit or settings.forking_share)
    plain = uniform and not recipe.shaping.from_verdict
    same.setdefault("plain" if plain else name, []).append(name)
  joined = lambda names: ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
  return [(joined(names), make(names[0])) for names in same.values()]


def _measured(algorithm: Algorithm, record: CreditRecord) -> tuple[list[float], list[float]]:
  """Returns W by class, relative to W over all tokens, and the scores of the credit."""
  signals = record.signals(algorithm)
  _, advantages = shaped_and_advantages(algorithm, signals)
  advantages = np.asarray(advantages)
  codes = np.where(signals.mask, record.truth, 0)
  right = np.broadcast_to(record.correct[..., None], codes.shape)
  tokens = (codes > 0) & (advantages != 0).any((1, 2), keepdims=True)
  overall = class_weight(advantages, tokens, right)
  weights = [
    class_weight(advantages, tokens & of_class(codes, name), right) / (overall or np.nan)
    for name in MARKERS
  ]
  metrics = truth_metrics(codes, record.correct, advantages, record.entropy)
  return weights, [metrics[key] for key in SCORES]


def _row_axes(names: Sequence[str], at: float, below_in: float, above_in: float) -> Axes:
  """Returns the axes of a figure with a row for each name and a vertical line.

  Args:
    names: of the rows, from the top.
    at: where the line is.
    below_in, above_in: the margins, in inches.
  """
  picture = Figure(figsize=(8.0, 0.75 + TRUTH_ROW_IN * len(names)))
  height = picture.get_figheight()
  axes = picture.add_axes((0.34, below_in / height, 0.64, 1 - (below_in + above_in) / height))
  axes.spines[["top", "right", "left"]].set_visible(False)
  axes.axvline(at, color=INK, linewidth=0.8)
  axes.set_yticks(np.arange(len(names)), names)
  axes.set_ylim(len(names) - 0.4, -0.6)
  axes.tick_params(axis="y", length=0)
  return axes


def _draw_truth(names: Sequence[str], weights: np.ndarray) -> str:
  """Draws one row per algorithm, with W f64[rows, classes] on the x axis, as an SVG element."""
  with drawing_style("credit and truth"):
    axes = _row_axes(names, 1, below_in=0.36, above_in=0.36)
    y = np.arange(len(names))
    for column, name in enumerate(MARKERS):
      marker, color, filled = MARKERS[name]
      face = color if filled else "none"
      x = weights[:, column]
      axes.plot(x, y, marker, color=color, markerfacecolor=face, markersize=6, label=name)
    axes.grid(axis="y", color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(
      loc="lower left", bbox_to_anchor=(0, 1), ncols=len(MARKERS), frameon=False, borderpad=0
    )
    return inline_svg(axes.figure)


TURNS_ROW_IN = 0.5  # inches per episode
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
        return _turns_figure(record, np.asarray(advantages), signals.mask, label)
  return None


def _turns_figure(
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
    "svg": _draw_turns(rows),
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


def _draw_turns(rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> str:
  """Draws a row per episode and a box per turn, as an SVG element."""
  largest = max((abs(turn[1]) for _, turns in rows for turn in turns), default=0.0) or 1.0
  with drawing_style("credit of turns"):
    picture = Figure(figsize=(8.0, TURNS_ROW_IN * len(rows)))
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
