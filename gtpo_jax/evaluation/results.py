"""The result of an evaluation: scored completions, the metrics of a policy, and their intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.evaluation.estimators import best_of_k, bootstrap, majority_at_each_k, pass_at_k
from gtpo_jax.rewards import VOTES


@dataclasses.dataclass(frozen=True)
class ScoredCompletions:
  """g completions of each of n problems with their scores, on the host."""

  texts: list[list[str]]  # [n][g]
  correct: np.ndarray  # bool[n, g]; False if there is no verdict
  has_verdict: np.ndarray  # bool[n, g]
  reward: np.ndarray  # f32[n, g], the weighted parts, without length penalties
  lengths: np.ndarray  # i32[n, g], tokens
  finished: np.ndarray  # bool[n, g], False if cut off at the maximum length

  def to_dicts(self, i: int) -> list[dict[str, Any]]:
    """Returns the completions of problem i as plain data; `correct` is None without a verdict."""
    return [
      {
        "text": self.texts[i][j],
        "correct": bool(self.correct[i, j]) if self.has_verdict[i, j] else None,
        "reward": float(self.reward[i, j]),
        "length": int(self.lengths[i, j]),
        "finished": bool(self.finished[i, j]),
      }
      for j in range(len(self.texts[i]))
    ]


def concatenate(parts: Sequence[ScoredCompletions]) -> ScoredCompletions:
  """Returns the completions of all parts, problem after problem."""
  texts = [row for part in parts for row in part.texts]
  names = [field.name for field in dataclasses.fields(ScoredCompletions) if field.name != "texts"]
  arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
  return ScoredCompletions(texts, **arrays)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a policy performs on a set of problems.

  A completion without a verdict counts as not sampled: a problem with fewer than k verdicts has no
  pass@k, best@k or maj@k and is left out of their means. `eval/NAME/no_verdict` is the number of
  such completions.
  """

  name: str
  problems: Sequence[Problem]  # [n]
  sampled: ScoredCompletions  # [n, g]
  greedy: ScoredCompletions  # [n, 1]

  def columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns mean@g (the share that is correct), greedy, and pass@k, each for every problem.

    Returns:
      f64[n] by name; its mean over the problems is the metric. NaN for a problem that has no value.

    Raises:
      ValueError: a k is above g.
    """
    correct = self._with_verdict(self.sampled.correct)
    mean = [row.mean() if len(row) else math.nan for row in correct]
    greedy = np.where(self.greedy.has_verdict[:, 0], self.greedy.correct[:, 0], np.nan)
    pass_k = lambda i, k: pass_at_k(len(correct[i]), int(correct[i].sum()), k)
    return {
      f"mean@{self.sampled.correct.shape[1]}": np.asarray(mean),
      "greedy": greedy,
      **self._at("pass", ks, pass_k),
    }

  def further_columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns best@k and maj@k for every problem, in the form of `columns`.

    best@k is the mean reward of the best of k (the paper's curves). maj@k is the majority vote, for
    kinds of problems with answers to vote on (`VOTES`); a completion that was cut off abstains.
    """
    rewards = self._with_verdict(self.sampled.reward)
    majorities = [self._majorities(i) for i in range(len(rewards))]
    columns = self._at("best", ks, lambda i, k: best_of_k(rewards[i], k))
    if any(row is not None for row in majorities):
      majority = lambda i, k: math.nan if majorities[i] is None else majorities[i][k - 1]
      columns |= self._at("maj", ks, majority)
    return columns

  def _with_verdict(self, values: np.ndarray) -> list[np.ndarray]:
    """For each problem, the values of its completions that have a verdict."""
    return [row[has] for row, has in zip(values, self.sampled.has_verdict, strict=True)]

  def _at(
    self, name: str, ks: Sequence[int], estimate: Callable[[int, int], float]
  ) -> dict[str, np.ndarray]:
    """estimate(i, k) for each problem i with at least k verdicts, NaN for the rest."""
    g = self.sampled.has_verdict.shape[1]
    counts = self.sampled.has_verdict.sum(1)
    return {
      f"{name}@{k}": np.asarray(
        [math.nan if count < k <= g else estimate(i, k) for i, count in enumerate(counts)]
      )
      for k in ks
    }

  def _majorities(self, i: int) -> np.ndarray | None:
    """maj@1, maj@2, ... of problem i; None if its kind has no answers to vote on."""
    vote_of = VOTES.get(self.problems[i].kind)
    if not vote_of:
      return None
    completions = self.sampled
    ids = np.flatnonzero(completions.has_verdict[i])
    votes = [vote_of(completions.texts[i][j]) if completions.finished[i, j] else None for j in ids]
    return majority_at_each_k(votes, completions.correct[i, ids])

  def metrics(self) -> dict[str, float]:
    """Returns `eval/NAME/` mean@g, greedy, pass@1, pass@g and no_verdict, for metrics.jsonl."""
    columns = self.columns(sorted({1, self.sampled.correct.shape[1]}))
    means = {f"eval/{self.name}/{key}": _mean(column) for key, column in columns.items()}
    return means | self._missing()

  def summary(self, ks: Sequence[int] = ()) -> dict[str, Any]:
    """Returns every metric with its 95 % interval over the problems; None where there is no number.

    `intervals` holds [lower, upper] under the metric's name, from a bootstrap with a fixed seed.

    Args:
      ks: the k of pass@k, best@k and maj@k; by default `default_ks`.
    """
    completions = self.sampled
    ks = ks or default_ks(completions.correct.shape[1])
    columns = {
      f"eval/{self.name}/{key}": column
      for key, column in (self.columns(ks) | self.further_columns(ks)).items()
    }
    ends = bootstrap(np.stack(list(columns.values()), axis=1))
    return {
      "problems": len(completions.correct),
      "samples": completions.correct.shape[1],
      **{key: _number_or_none(_mean(column)) for key, column in columns.items()},
      **self._missing(),
      f"eval/{self.name}/length": float(completions.lengths.mean()),
      f"eval/{self.name}/cut_off": float(1 - completions.finished.mean()),
      "intervals": {
        key: [_number_or_none(end) for end in ends[:, i]] for i, key in enumerate(columns)
      },
    }

  def _missing(self) -> dict[str, float]:
    missing = (~self.sampled.has_verdict).sum() + (~self.greedy.has_verdict).sum()
    return {f"eval/{self.name}/no_verdict": float(missing)}

  def rows(self) -> Iterator[dict[str, Any]]:
    """Yields each problem as plain data: id, prompt, answer, kind, and its scored completions."""
    for i, problem in enumerate(self.problems):
      yield {
        "id": problem.id,
        "prompt": problem.messages[-1]["content"],
        "answer": problem.answer,
        "kind": problem.kind,
        "samples": self.sampled.to_dicts(i),
        "greedy": self.greedy.to_dicts(i)[0],
      }


def default_ks(g: int) -> list[int]:
  """Returns the powers of two up to g, and g itself."""
  return sorted({2**i for i in range(g.bit_length())} | {g})


def _mean(column: np.ndarray) -> float:
  """The mean without NaN; NaN if there are no numbers."""
  return float(np.nanmean(column)) if not np.isnan(column).all() else math.nan


def _number_or_none(value: float) -> float | None:
  return None if math.isnan(value) else float(value)
