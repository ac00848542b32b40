"""Computes the data of the credit viewer.

For every token shown, this is its entropy, and its shaped reward and advantage by each method.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.logs.credit import CreditRecord, credit_files, read_credit, shaped_and_advantages
from gtpo_jax.logs.text import visible

MAX_TOKENS = 1_000_000  # in one report, to bound the size of the page; see `viewer_data`

METHODS = {
  "position": "Method 1: position",
  "sequence": "Method 2: completion",
  "matrix": "Method 3: group",
}
TURNS = {"turn": "Turns: the same place of the same turn"}  # shown if it trained the run

# The shaped rewards and the advantages of a record's k groups shown, each f32[k, g, t].
Credit = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Scheme:
  """An algorithm that assigns credit to tokens, and its label in the viewer."""

  label: str
  algorithm: Algorithm
  trained: bool  # whether it trained the run

  def credit(self, record: CreditRecord) -> Credit:
    """Returns the shaped rewards and advantages, f32[k, g, t], of the record's k groups shown.

    They are computed from the complete batch, and are 0 after the end of a completion.
    """
    signals = record.signals(self.algorithm)
    shaped, advantages = shaped_and_advantages(self.algorithm, signals)
    return np.asarray(shaped)[record.shown], np.asarray(advantages)[record.shown]


def schemes(algorithm: Algorithm) -> list[Scheme]:
  """Returns the schemes that the viewer switches between.

  These are the three methods of the run's algorithm, and its own if that is another one. If the
  algorithm compares no tokens, they are the algorithm itself, followed by the methods of gtpo.
  """
  own = algorithm.settings.compare
  base = algorithm if own else make("gtpo")
  compare = lambda name: make(
    base.name, base.recipe.distillation, **base.recipe.settings | {"compare": name}
  )
  methods = [
    Scheme(label if own else f"gtpo, {label.lower()}", compare(name), name == own)
    for name, label in (METHODS | TURNS if own in TURNS else METHODS).items()
  ]
  return methods if own else [Scheme(f"{algorithm.name}, as trained", algorithm, True), *methods]


def viewer_data(
  workdir: Path, algorithm: Algorithm, max_tokens: int
) -> tuple[dict[str, Any], list[str]]:
  """Returns a run's data for the viewer.

  If the records have more than `max_tokens`, steps between the first and the last are dropped
  evenly. The data are what the page reads when it loads; with them comes a packed text per group
  shown, which the page unpacks when the user selects the group.
  """
  files = credit_files(workdir)
  run_schemes = schemes(algorithm)
  vocabulary: dict[str, int] = {}
  steps = []
  packed = []
  knows_truth = False
  for file in _thinned(files, max_tokens):
    record = read_credit(file)
    credit = [scheme.credit(record) for scheme in run_schemes]
    knows_truth |= bool(record.truth[record.shown].any())
    packed += _packed_groups(record, credit, vocabulary)
    groups = [_group(record, i, credit) for i in range(len(record.shown))]
    steps.append({"step": record.step, "prompts": len(record.lengths), "groups": groups})
  data = {
    "schemes": [
      {
        "label": scheme.label,
        "compare": scheme.algorithm.settings.compare,
        "scope": scheme.algorithm.settings.scope,
        "trained": scheme.trained,
        "perCompletion": scheme.algorithm.recipe.shaping.per_completion,
      }
      for scheme in run_schemes
    ],
    "pieces": [visible(text) for text in vocabulary],
    "breaks": [i for text, i in vocabulary.items() if "\n" in text],
    "recorded": len(files),
    "truth": knows_truth,
    "steps": steps,
  }
  return data, packed


def _group(record: CreditRecord, i: int, credit: Sequence[Credit]) -> dict[str, Any]:
  """Returns the data of the i-th group shown that the page needs before it unpacks tokens."""
  group = record.shown[i]
  names = ("lengths", "correct", "valid", "finished", "guided")
  reward = record.reward[group] + record.penalty[group]
  return {
    "number": int(group),
    "prompt": visible(record.prompts[i], "\n\t"),
    "answer": visible(record.answers[i], "\n\t"),
    "stops": record.stops[i],
    **{name: getattr(record, name)[group].tolist() for name in names},
    "reward": [rounded(x) for x in reward],
    "spread": [spread(shaped[i], record, group) for shaped, _ in credit],
  }


def spread(shaped: np.ndarray, record: CreditRecord, group: int) -> list[float]:
  """Returns how much the shaped rewards f32[g, t] of a group differ between tokens of O+ and of O-.

  Each is the mean absolute difference from the side's median, relative to its largest absolute
  value. It is 0 if all tokens of a side have the same shaped reward, or if a side has no tokens.
  """
  mask = record.mask[group] & record.valid[group][:, None]
  differences = []
  for verdict in (True, False):
    x = shaped[mask & (record.correct[group] == verdict)[:, None]]
    largest = np.abs(x).max(initial=0.0)
    differences.append(rounded(np.abs(x - np.median(x)).mean() / largest) if largest else 0.0)
  return differences


def _packed_groups(
  record: CreditRecord, credit: Sequence[Credit], vocabulary: dict[str, int]
) -> list[str]:
  """Packs the tokens of each group shown, and adds their texts to the run's vocabulary."""
  numbers = [vocabulary.setdefault(text, len(vocabulary)) for text in record.pieces]
  columns = [
    np.asarray(numbers, np.int32)[record.piece],
    record.ids,
    record.entropy[record.shown],
    record.log_probs,
    record.truth[record.shown].astype(np.int32),
    record.mask[record.shown].astype(np.int32),
  ]
  for of_scheme in credit:
    columns += of_scheme
  present = record.present[record.shown]
  return [pack([column[i][here] for column in columns]) for i, here in enumerate(present)]


def pack(columns: Sequence[np.ndarray]) -> str:
  """Packs columns i32[m] or f32[m] into one text.

  Floats keep 16 significant bits, which is about 5 decimal digits, so every fourth byte is 0. The
  bytes of all 32-bit words are then grouped by significance, which compresses better, and encoded
  by gzip and base64.
  """

  def words_of(column: np.ndarray) -> np.ndarray:
    if column.dtype != np.float32:
      return column.astype("<i4").view("<u4")
    bits = np.ascontiguousarray(column, "<f4").view("<u4")
    rounded_bits = (bits + np.uint32(0x80)) & np.uint32(0xFFFFFF00)
    return np.where(np.isfinite(column), rounded_bits, bits)

  words = np.stack([*map(words_of, columns)])
  grouped = words.view(np.uint8).reshape(-1, 4).T.tobytes()
  return base64.b64encode(gzip.compress(grouped, 6, mtime=0)).decode()


def rounded(value: float) -> float:
  """Rounds a number to 6 significant digits, for JSON."""
  return float(f"{value:.6g}")


def _thinned(files: dict[int, Path], max_tokens: int) -> list[Path]:
  """Returns evenly spaced files with at most `max_tokens` tokens.

  The first and the last file are always included, even if they have more tokens.
  """
  paths = list(files.values())
  if not paths:
    return []
  records = map(read_credit, paths)
  counts = [int(record.lengths[record.shown].sum()) for record in records]
  for stride in range(1, len(paths) + 1):
    kept = sorted({*range(0, len(paths), stride), len(paths) - 1})
    if sum(counts[i] for i in kept) <= max_tokens:
      break
  return [paths[i] for i in kept]
