"""The figure of a report that shows which tokens each algorithm would pay, on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gtpo_jax.algorithms import RECIPES, Algorithm, make
from gtpo_jax.cli.report.inline_svg import GRID, INK, MINUS, PLUS, drawing_style, inline_svg
from gtpo_jax.cli.report.runs import RunGroup, run_label
from gtpo_jax.logs.credit import CreditRecord, credit_files, read_credit, shaped_and_advantages
from gtpo_jax.logs.credit_scores import class_weight, truth_metrics
from gtpo_jax.logs.text import visible
from gtpo_jax.rollout.token_truth import of_class

ROW_IN = 0.26  # inches per algorithm
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
          return _figure(record, visible(run_label(group, run)))
  return None


def _figure(record: CreditRecord, label: str) -> dict[str, Any]:
  rows = [(name, *_measured(algorithm, record)) for name, algorithm in distinct_algorithms()]
  weights = np.asarray([row[1] for row in rows])
  cell = lambda value: "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")
  return {
    "svg": _draw([row[0] for row in rows], weights),
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


def distinct_algorithms() -> list[tuple[str, Algorithm]]:
  """Returns the algorithms that assign different credit, with the names of all that share it.

  Algorithms with a guide or a teacher are left out. Objectives and ratios act on the credit only
  after the first gradient update.
  """
  same: dict[Any, list[str]] = {}
  for name, recipe in RECIPES.items():
    algorithm = make(name)
    settings = algorithm.settings
    if settings.guide_completions or recipe.distillation:
      continue
    uniform = not (recipe.per_token_credit or settings.forking_share)
    plain = uniform and not recipe.shaping.by_entropy
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


def _draw(names: Sequence[str], weights: np.ndarray) -> str:
  """Draws one row per algorithm, with W f64[rows, classes] on the x axis, as an SVG element."""
  with drawing_style("credit and truth"):
    picture = Figure(figsize=(8.0, 0.75 + ROW_IN * len(names)))
    height = picture.get_figheight()
    axes = picture.add_axes((0.34, 0.36 / height, 0.64, 1 - 0.72 / height))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.axvline(1, color=INK, linewidth=0.8)
    y = np.arange(len(names))
    for column, name in enumerate(MARKERS):
      marker, color, filled = MARKERS[name]
      face = color if filled else "none"
      x = weights[:, column]
      axes.plot(x, y, marker, color=color, markerfacecolor=face, markersize=6, label=name)
    axes.set_yticks(y, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(
      loc="lower left", bbox_to_anchor=(0, 1), ncols=len(MARKERS), frameon=False, borderpad=0
    )
    return inline_svg(picture)
