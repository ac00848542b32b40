"""How well the credit of an algorithm agrees with the truth, on tasks that know it.

Of tokens: in correct completions (O+), those to find decide the verdict; in incorrect ones (O-),
they are wrong. The credit of a token is its advantage on O+ and its negative on O-. Credit is
compared within completions only: how it differs between problems says nothing about tokens.

Of turns: the truth of a turn is its true advantage, and its credit is the mean advantage of its
tokens. Turns are compared within the episodes of a prompt, and within single episodes.
"""

from __future__ import annotations

import numpy as np

from gtpo_jax.algorithms import Algorithm
from gtpo_jax.logs.credit import batch_signals, shaped_and_advantages
from gtpo_jax.logs.truth import CLASSES, BatchTruth, Segments, decides, is_wrong, of_class
from gtpo_jax.rollout.batch import Batch
from gtpo_jax.rollout.scoring.turn_signals import first_tokens

DIGITS = 5  # decimal places of the credit relative to the largest; smaller differences are ties


def step_metrics(algorithm: Algorithm, batch: Batch, truth: BatchTruth) -> dict[str, float]:
  """Returns the truth metrics of a step; {} if nothing of the batch knows its truth.

  `truth/known` is the share of the tokens with a code; `truth_metrics` and `turn_metrics` describe
  the others. Every process must call it.
  """
  if truth.tokens is None and not truth.turns and truth.segments is None:
    return {}
  signals = batch_signals(batch)
  _, advantages = shaped_and_advantages(algorithm, signals)
  mask = signals.mask
  advantages = np.asarray(advantages)
  metrics = {}
  if truth.tokens is not None:
    codes = np.where(mask, truth.tokens, 0)
    metrics["truth/known"] = _ratio((codes > 0).sum(), mask.sum())
    metrics |= truth_metrics(codes, signals.correct, advantages, signals.entropy)
  for player, of_turns in truth.turns.items():
    found = turn_metrics(of_turns, advantages, mask)
    metrics |= {f"truth/turn_{name}/{player}": value for name, value in found.items()}
  if truth.segments is not None:
    metrics |= segment_metrics(truth.segments, advantages[truth.segments.group])
  return metrics


def segment_metrics(segments: Segments, advantages: np.ndarray) -> dict[str, float]:
  """Returns how well the credit of a group orders its segments as their gains in value do.

  The credit of a segment is the mean advantage of its tokens. `truth/mc_rank` is Kendall's rank
  correlation within completions, where the credit of whole completions is always 0, and
  `truth/mc_rank_group` that over all segments of the group. Gains are noisy, with the values'
  standard error `truth/mc_error`, so even perfect credit does not reach 1. The advantages of the
  group are f32[g, t].
  """
  gains, credit, completions = [], [], []
  for j, number in enumerate(segments.number):
    for k in range(number.max(initial=-1) + 1):
      tokens = number == k
      gain = float(segments.gain[j, tokens][0])
      if not np.isnan(gain):
        gains.append(round(gain, DIGITS))
        credit.append(float(advantages[j, tokens].mean(dtype=np.float64)))
        completions.append(j)
  x = np.asarray(credit)
  x = np.round(x / (np.abs(x).max(initial=0.0) or 1.0), DIGITS)
  y, sets = np.asarray(gains), np.asarray(completions, int)
  return {
    "truth/mc_rank": rank_correlation(x, y, sets),
    "truth/mc_rank_group": rank_correlation(x, y, np.zeros_like(sets)),
    "truth/mc_error": segments.error,
    "truth/mc_tokens": float(segments.tokens),
  }


def turn_metrics(truth: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Returns how well the credit of turns agrees with their true advantages.

  `known` is the share of the turns whose truth is known; the others cover these, in groups with
  any advantage. `sign` is the share of the turns with a truth other than 0 whose credit has its
  sign; a credit of 0 counts one half. `rank` is Kendall's rank correlation within groups: of the
  pairs of turns with different truths, the share that the credit orders rightly minus the share
  that it orders wrongly. `rank_episode` is the same within episodes, where the credit of whole
  completions is always 0. A metric without turns or pairs is NaN.

  The truth is f32[n, g, t], NaN on tokens of turns where it is unknown, the advantages are
  f32[n, g, t], and the mask bool[n, g, t] has the drawn tokens.
  """
  trained = (advantages != 0).any((1, 2))
  turns = turn_table(truth, advantages, mask)
  known = ~np.isnan(turns["truth"])
  scored = known & trained[turns["group"]]
  turns = {name: column[scored] for name, column in turns.items()}
  credit = turns["credit"]
  credit = np.round(credit / (np.abs(credit).max(initial=0.0) or 1.0), DIGITS)
  counted = turns["truth"] != 0
  agree = np.sign(credit[counted]) * np.sign(turns["truth"][counted])
  return {
    "known": _ratio(known.sum(), known.size),
    "sign": _ratio(((1 + agree) / 2).sum(), counted.sum()),
    "rank": rank_correlation(credit, turns["truth"], turns["group"]),
    "rank_episode": rank_correlation(credit, turns["truth"], turns["episode"]),
  }


def turn_table(
  truth: np.ndarray, advantages: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns the known values of each turn, in columns [turns].

  These are its `group` in [0, n), its `episode` in [0, n g), its `truth`, and its `credit`, the
  mean advantage of its tokens. The arguments are as in `turn_metrics`.
  """
  begins = first_tokens(mask)
  at = np.nonzero(begins)
  number = np.cumsum(begins.reshape(-1)).reshape(mask.shape)[mask] - 1
  sums = np.bincount(number, advantages[mask].astype(np.float64), len(at[0]))
  counts = np.bincount(number, minlength=len(at[0]))
  return {
    "group": at[0],
    "episode": at[0] * mask.shape[1] + at[1],
    "truth": truth[at].astype(np.float64),
    "credit": sums / np.maximum(counts, 1),
  }


def rank_correlation(x: np.ndarray, y: np.ndarray, sets: np.ndarray) -> float:
  """Returns the mean of sign(x_i - x_j) sign(y_i - y_j) over the pairs of a set with y_i != y_j.

  This is Kendall's tau in which pairs that only x ties count 0. NaN if there is no pair.

  Args:
    x, y: f64[m].
    sets: i64[m], the set of each entry; entries of a set are next to each other.
  """
  agree = 0.0
  pairs = 0
  starts = np.flatnonzero(np.diff(sets, prepend=-1))
  for a, b in zip(np.split(x, starts[1:]), np.split(y, starts[1:]), strict=True):
    order = np.sign(b[:, None] - b)
    agree += (np.sign(a[:, None] - a) * order).sum()
    pairs += np.count_nonzero(order)
  return _ratio(agree, pairs)


def truth_metrics(
  codes: np.ndarray, correct: np.ndarray, advantages: np.ndarray, entropy: np.ndarray
) -> dict[str, float]:
  """Returns the scores of the credit, and entropy and accuracy by token class.

  `credit/truth_*_correct` score the credit on O+ against the deciding tokens, and
  `credit/truth_*_incorrect` that on O- against the wrong ones; see `credit_scores`.
  `credit/w/CLASS` is W = A+ - A-: the mean advantage of the class on O+ minus that on O-. These
  leave out groups without any advantage. `truth/entropy/CLASS`, in nats, and `truth/right/CLASS`,
  the share of its tokens that are right, cover all groups. A metric without tokens is NaN.

  The codes are u8[n, g, t] from `token_truth`, 0 for tokens to leave out; correct is bool[n, g],
  and the advantages and the entropy, in nats, are f32[n, g, t].
  """
  known = codes > 0
  trained = known & (advantages != 0).any((1, 2), keepdims=True)
  right = np.broadcast_to(correct[..., None], codes.shape)
  metrics = {}
  for name, side, target, credit in (
    ("correct", trained & right, decides(codes), advantages),
    ("incorrect", trained & ~right, is_wrong(codes), -advantages),
  ):
    scores = credit_scores(credit, target, side)
    metrics |= {f"credit/truth_{score}_{name}": value for score, value in scores.items()}
  for name in CLASSES:
    tokens = of_class(codes, name)
    metrics[f"credit/w/{name}"] = class_weight(advantages, tokens & trained, right)
    metrics[f"truth/entropy/{name}"] = _mean(entropy, tokens)
  for name in ("copied", "decisive"):  # the others are never wrong
    metrics[f"truth/right/{name}"] = _mean(~is_wrong(codes), of_class(codes, name))
  return metrics


def credit_scores(credit: np.ndarray, target: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Returns how well the credit finds the target tokens.

  `auroc` is the probability that a target token has more credit than another token of the same
  completion, where ties count one half; uniform credit scores 0.5. `lift` is the target's share of
  the credit over its share of the tokens. A token with more credit than the mean of its completion
  is favoured: `precision` is the share of the favoured tokens that are targets, and `recall` the
  share of the targets that are favoured. A score is NaN if its denominator is 0.

  The credit is f32[n, g, t]; the targets and the tokens to score, the mask, are bool[n, g, t].
  """
  t = mask.shape[-1]
  mask = mask.reshape(-1, t)
  target = target.reshape(-1, t) & mask
  credit = np.where(mask, credit.reshape(-1, t), 0.0).astype(np.float64)
  share = _ratio(credit[target].sum(), credit[mask].sum())
  credit = np.round(credit / (np.abs(credit).max(initial=0.0) or 1.0), DIGITS)
  counts = np.maximum(mask.sum(1, keepdims=True), 1)
  favoured = mask & (credit - credit.sum(1, keepdims=True) / counts > 10.0**-DIGITS)
  return {
    "auroc": auroc(credit, target, mask),
    "lift": _ratio(share, _ratio(target.sum(), mask.sum())),
    "precision": _ratio((favoured & target).sum(), favoured.sum()),
    "recall": _ratio((favoured & target).sum(), target.sum()),
  }


def auroc(x: np.ndarray, target: np.ndarray, mask: np.ndarray) -> float:
  """Returns the probability that a target in a row has a larger x than another entry of that row.

  Ties count one half. With one row, it is the area under the ROC curve; with several, the pairs
  are pooled over the rows. NaN if there is no pair.

  x is f64[rows, t]; the targets and the entries to compare, the mask, are bool[rows, t].
  """
  wins = 0.0
  pairs = 0
  for row, targets, others in zip(x, target & mask, ~target & mask, strict=True):
    found = row[targets]
    missed = np.sort(row[others])
    below = np.searchsorted(missed, found, "left")
    not_above = np.searchsorted(missed, found, "right")
    wins += (below + not_above).sum() / 2
    pairs += len(found) * len(missed)
  return _ratio(wins, pairs)


def class_weight(advantages: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> float:
  """Returns W = A+ - A- of some tokens: their mean advantage on O+ minus that on O-.

  NaN if a side has no such token. All arguments are [n, g, t].
  """
  return _mean(advantages, tokens & right) - _mean(advantages, tokens & ~right)


def _mean(x: np.ndarray, mask: np.ndarray) -> float:
  return _ratio(x[mask].sum(dtype=np.float64), mask.sum())


def _ratio(a: float, b: float) -> float:
  return float(a / b) if b else float("nan")
