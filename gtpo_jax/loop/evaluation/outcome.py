"""The result of an evaluation: scored completions, metrics, and intervals of the metrics."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gtpo_jax.data.records import Problem
from gtpo_jax.loop.evaluation.estimators import best_of_k, bootstrap, majority_at_each_k, pass_at_k
from gtpo_jax.rewards import VOTES


@dataclasses.dataclass(frozen=True)
class ScoredCompletions:
  """g completions of each of n problems with their scores, in host memory."""

  texts: list[list[str]]  # [n][g]
  correct: np.ndarray  # bool[n, g]; False if there is no verdict
  scored: np.ndarray  # bool[n, g]
  reward: np.ndarray  # f32[n, g], the weighted sum of the parts, without length penalty
  lengths: np.ndarray  # i32[n, g], tokens
  finished: np.ndarray  # bool[n, g], False if cut off at the maximum length
  answers: list[list[str]]  # [n][g], what is judged: the text, or the last turn's

  def to_dicts(self, i: int) -> list[dict[str, Any]]:
    """Returns the completions of problem i as plain data; `correct` is None without a verdict."""
    return [
      {
        "text": self.texts[i][j],
        "correct": bool(self.correct[i, j]) if self.scored[i, j] else None,
        "reward": float(self.reward[i, j]),
        "length": int(self.lengths[i, j]),
        "finished": bool(self.finished[i, j]),
      }
      for j in range(len(self.texts[i]))
    ]

  def with_verdict(self, values: np.ndarray) -> list[np.ndarray]:
    """Returns, for each problem, the values of the completions that have a verdict."""
    return [row[has] for row, has in zip(values, self.scored, strict=True)]


def concatenate(parts: Sequence[ScoredCompletions]) -> ScoredCompletions:
  """Concatenates the parts along the axis of the problems."""
  values = {}
  for field in dataclasses.fields(ScoredCompletions):
    rows = [getattr(part, field.name) for part in parts]
    is_list = isinstance(rows[0], list)
    values[field.name] = [*itertools.chain(*rows)] if is_list else np.concatenate(rows)
  return ScoredCompletions(**values)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A policy's scored completions of a set of problems, and the metrics computed from them.

  Completions without a verdict are treated as if they had not been sampled; `eval/NAME/no_verdict`
  is their number. A problem with fewer than k verdicts has no pass@k, best@k or maj@k, and is left
  out of the means of these metrics.

  Two evaluations can be compared if their `settings` are equal; see `evaluation_settings`.
  """

  name: str
  problems: Sequence[Problem]  # [n]
  sampled: ScoredCompletions  # [n, g]
  greedy: ScoredCompletions  # [n, 1]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Metrics of the judge, and of the episodes of the samples.
  judge: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def judged(self) -> bool:
    """Whether any completion that ended has a verdict; if none ended, whether any has one.

    A completion that was cut off is wrong whatever a verifier says, unless its environment failed.
    """
    ended = self.sampled.finished
    scored = self.sampled.scored
    return bool((scored & ended).any() if ended.any() else scored.any())

  def columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns mean@g (the fraction that is correct), greedy, and pass@k of every problem.

    Returns:
      A dict of f64[n]. The mean of each array over the problems is the metric; a problem without a
      value has NaN.
    """
    correct = self.sampled.with_verdict(self.sampled.correct)
    mean = [row.mean() if len(row) else math.nan for row in correct]
    greedy = np.where(self.greedy.scored[:, 0], self.greedy.correct[:, 0], np.nan)
    pass_k = lambda i, k: pass_at_k(len(correct[i]), int(correct[i].sum()), k)
    return {
      f"mean@{self.sampled.correct.shape[1]}": np.asarray(mean),
      "greedy": greedy,
      **self._at("pass", ks, pass_k),
    }

  def further_columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns best@k and maj@k of every problem, in the same form as `columns`.

    best@k is the expected maximum reward of k completions, drawn without replacement. maj@k is the
    majority vote; only the kinds of problems in `VOTES` have it. A completion that was cut off does
    not vote, and an episode votes with the text of its last turn.
    """
    rewards = self.sampled.with_verdict(self.sampled.reward)
    majorities = [self._majorities(i) for i in range(len(rewards))]
    columns = self._at("best", ks, lambda i, k: best_of_k(rewards[i], k))
    if any(row is not None for row in majorities):
      majority = lambda i, k: math.nan if majorities[i] is None else majorities[i][k - 1]
      columns |= self._at("maj", ks, majority)
    return columns

  def _at(
    self, name: str, ks: Sequence[int], estimate: Callable[[int, int], float]
  ) -> dict[str, np.ndarray]:
    """Returns estimate(i, k) of each problem i with at least k verdicts, and NaN for the others."""
    g = self.sampled.scored.shape[1]
    counts = self.sampled.scored.sum(1)
    return {
      f"{name}@{k}": np.asarray(
        [math.nan if count < k <= g else estimate(i, k) for i, count in enumerate(counts)]
      )
      for k in ks
    }

  def _majorities(self, i: int) -> np.ndarray | None:
    """Returns maj@1, maj@2, ... of problem i, or None if its kind is not in `VOTES`."""
    vote_of = VOTES.get(self.problems[i].kind)
    if not vote_of:
      return None
    completions = self.sampled
    ids = np.flatnonzero(completions.scored[i])
    votes = [
      vote_of(completions.answers[i][j]) if completions.finished[i, j] else None for j in ids
    ]
    return majority_at_each_k(votes, completions.correct[i, ids])

  def metrics(self) -> dict[str, float]:
    """Returns `eval/NAME/` mean@g, greedy, pass@1, pass@g and no_verdict, for metrics.jsonl.

    If the problems have several sources, metrics of all problems come first, then of each source.
    """
    columns = self._named(self.columns(sorted({1, self.sampled.correct.shape[1]})))
    return {key: _mean(column) for key, column in columns.items()} | self._missing()

  def _named(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns by the names of metrics, and again for each source's problems alone.

    A source has no metric that none of its problems has, such as maj@k of kinds without votes.
    """
    named = {f"eval/{self.name}/{key}": column for key, column in columns.items()}
    labels = np.asarray([problem.source for problem in self.problems])
    for source in dict.fromkeys(labels.tolist()):
      if source:
        named |= {
          f"eval/{source}/{key}": np.where(labels == source, column, np.nan)
          for key, column in columns.items()
          if not np.isnan(column[labels == source]).all()
        }
    return named

  def summary(self, ks: Sequence[int] = ()) -> dict[str, Any]:
    """Returns every metric with its 95 % interval over the problems; None replaces NaN.

    `intervals` maps the name of a metric to [lower, upper], from a bootstrap with a fixed seed.

    Args:
      ks: the values of k in pass@k, best@k and maj@k; by default `default_ks`.
    """
    completions = self.sampled
    ks = ks or default_ks(completions.correct.shape[1])
    columns = self._named(self.columns(ks) | self.further_columns(ks))
    ends = bootstrap(np.stack(list(columns.values()), axis=1))
    return {
      "problems": len(completions.correct),
      "samples": completions.correct.shape[1],
      "settings": dict(self.settings),
      **{key: _number_or_none(_mean(column)) for key, column in columns.items()},
      **self._missing(),
      **{key: _number_or_none(value) for key, value in self.judge.items()},
      f"eval/{self.name}/length": float(completions.lengths.mean()),
      f"eval/{self.name}/cut_off": float(1 - completions.finished.mean()),
      "intervals": {
        key: [_number_or_none(end) for end in ends[:, i]] for i, key in enumerate(columns)
      },
    }

  def _missing(self) -> dict[str, float]:
    missing = (~self.sampled.scored).sum() + (~self.greedy.scored).sum()
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


def metrics_of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
  """Returns those values of an `Evaluation.summary` that `Evaluation.metrics` has too."""
  last_part = {key: key.rsplit("/", 1)[-1] for key in summary}
  g = next((part.removeprefix("mean@") for part in last_part.values() if "mean@" in part), "1")
  logged = {f"mean@{g}", "greedy", "pass@1", f"pass@{g}", "no_verdict"}
  return {key: value for key, value in summary.items() if last_part[key] in logged}


def default_ks(g: int) -> list[int]:
  """Returns the powers of two up to g, and g itself."""
  return sorted({2**i for i in range(g.bit_length())} | {g})


def _mean(column: np.ndarray) -> float:
  """Returns the mean of the numbers that are not NaN; NaN if there are none."""
  return float(np.nanmean(column)) if not np.isnan(column).all() else math.nan


def _number_or_none(value: float) -> float | None:
  return None if math.isnan(value) else float(value)
