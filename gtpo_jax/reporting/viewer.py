"""The data of the credit viewer: entropies, shaped rewards and advantages of every token shown, by each method, ready for the page."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.algorithms import Algorithm, make
from gtpo_jax.reporting.credit import CreditRecord, credit_files, read_credit

MOST_TOKENS = 1_000_000  # in one report; of a run that keeps more, fewer steps are shown

METHODS = {
  "position": "Method 1: position",
  "sequence": "Method 2: completion",
  "matrix": "Method 3: group",
}
PICTURES = {
  "\n": "⏎",
  "\t": "⇥",
  "\r": "␍",
  "\x7f": "␡",
  "\u200d": "‹ZWJ›",
  "\u200b": "‹ZWSP›",
  "\ufeff": "‹BOM›",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
  """One way to give credit."""

  label: str
  algorithm: Algorithm
  trained: bool  # whether the run learned by it

  def credit(self, record: CreditRecord) -> tuple[np.ndarray, np.ndarray]:
    """Shaped rewards and advantages f32[k, g, t] of the groups shown, made from the whole batch; 0 behind a completion's end."""
    signals = record.signals(guided=bool(self.algorithm.settings.guide_completions))
    shaped, advantages = _credit(self.algorithm, signals)
    return np.asarray(shaped)[record.shown], np.asarray(advantages)[record.shown]


def schemes(algorithm: Algorithm) -> list[Scheme]:
  """What the viewer switches between: the three methods of the run's algorithm; where it has none, itself and the methods of gtpo."""
  own = algorithm.settings.compare
  base = algorithm if own else make("gtpo")
  compare = lambda name: Algorithm(base.name, dataclasses.replace(base.settings, compare=name))
  methods = [
    Scheme(label if own else f"gtpo, {label.lower()}", compare(name), name == own)
    for name, label in METHODS.items()
  ]
  return methods if own else [Scheme(f"{algorithm.name}, as trained", algorithm, True), *methods]


def viewer_data(
  workdir: Path, algorithm: Algorithm, budget: int
) -> tuple[dict[str, Any], list[str]]:
  """A run's part of the viewer: what the page reads at once, and one packed text for each group, which it opens when that is shown.

  Args:
    workdir: of the run.
    algorithm: that it learned by.
    budget: tokens; steps are left out evenly, the first and the last kept, until there are no more than that.

  Raises:
    UserError: a record is damaged or of another version.
  """
  files = credit_files(workdir)
  ways = schemes(algorithm)
  vocabulary = {}
  steps = []
  packed = []
  for file in _within(files, budget):
    record = read_credit(file)
    piece = np.asarray(
      [vocabulary.setdefault(text, len(vocabulary)) for text in record.pieces], np.int32
    )[record.piece]
    columns = [
      piece,
      record.ids,
      record.entropy[record.shown],
      record.log_probs,
      *(x for way in ways for x in way.credit(record)),
    ]
    groups = []
    for i, group in enumerate(record.shown):
      here = record.mask[group]
      packed.append(pack([column[i][here] for column in columns]))
      groups.append(
        {
          "number": int(group),
          "prompt": visible(record.prompts[i], "\n\t"),
          "answer": visible(record.answers[i], "\n\t"),
          **{
            name: getattr(record, name)[group].tolist()
            for name in ("lengths", "correct", "counted", "finished", "guided")
          },
          "reward": [rounded(x) for x in record.reward[group] + record.penalty[group]],
        }
      )
    steps.append({"step": record.step, "prompts": len(record.lengths), "groups": groups})
  return {
    "schemes": [
      {
        "label": way.label,
        "compare": way.algorithm.settings.compare,
        "scope": way.algorithm.settings.scope,
        "trained": way.trained,
        "perCompletion": way.algorithm.recipe.per_completion,
      }
      for way in ways
    ],
    "pieces": [visible(text) for text in vocabulary],
    "breaks": [i for text, i in vocabulary.items() if "\n" in text],
    "recorded": len(files),
    "steps": steps,
  }, packed


def pack(columns: Sequence[np.ndarray]) -> str:
  """Columns i32 or f32 [m] as one text: floats at 16 significant bits, all bytes sorted by their rank in the word, gzip, base64.

  Rounding leaves 5 decimal digits and makes every fourth byte 0; sorted, the rest compresses too.
  """
  words = np.stack(
    [
      _rounded_bits(column) if column.dtype == np.float32 else column.astype("<i4").view("<u4")
      for column in columns
    ]
  )
  return base64.b64encode(
    gzip.compress(words.view(np.uint8).reshape(-1, 4).T.tobytes(), 6, mtime=0)
  ).decode()


def _rounded_bits(x: np.ndarray) -> np.ndarray:
  bits = np.ascontiguousarray(x, "<f4").view("<u4")
  return np.where(np.isfinite(x), (bits + np.uint32(0x80)) & np.uint32(0xFFFFFF00), bits)


def visible(text: str, keep: str = "") -> str:
  """A text from a model or a file as it may be shown: what steers, hides or turns text (but for `keep`) stands as a sign of its own."""
  return "".join(char if char in keep else _shown(char) for char in text)


def _shown(char: str) -> str:
  if char in PICTURES:
    return PICTURES[char]
  if char < " ":
    return chr(0x2400 + ord(char))
  if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
    return f"‹U+{ord(char):04X}›"
  return char


def rounded(value: float) -> float:
  """A number with 6 digits, for JSON."""
  return float(f"{value:.6g}")


@functools.partial(jax.jit, static_argnums=0)
def _credit(
  algorithm: Algorithm, signals: dict[str, jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
  shaped, _ = algorithm.shaped(**signals)
  return jnp.where(signals["mask"], shaped.plus + shaped.minus, 0.0), algorithm.advantages(
    **signals
  )


def _within(files: dict[int, Path], budget: int) -> list[Path]:
  """As many of the files, evenly, as hold no more than `budget` tokens; the last always."""
  every = list(files.values())
  counts = [int(record.lengths[record.shown].sum()) for record in map(read_credit, every)]
  for stride in range(1, len(every) + 1):
    kept = sorted({*range(0, len(every), stride), len(every) - 1})
    if sum(counts[i] for i in kept) <= budget:
      break
  return [every[i] for i in kept] if every else []
