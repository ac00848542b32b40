"""Held-out evaluation: what sampled completions and the greedy one are worth, with intervals over the problems."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.evaluation.estimators import best_of_k, bootstrap, majority_at, pass_at_k
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.rewards import VOTES
from gtpo_jax.rollout.problems import eval_label
from gtpo_jax.rollout.worker import Policy, RolloutWorker, Stream, key_for
from gtpo_jax.sampling.filters import SamplingParams


@dataclasses.dataclass(frozen=True)
class Answers:
  """g completions of each of n problems, and what was found of them; on the host."""

  texts: list[list[str]]  # [n][g]
  correct: np.ndarray  # bool[n, g]; False where there is no verdict
  reached: np.ndarray  # bool[n, g]; False where there is no verdict
  reward: np.ndarray  # f32[n, g], the weighted parts, without length penalties
  lengths: np.ndarray  # i32[n, g], tokens
  finished: np.ndarray  # bool[n, g], False where the length ran out

  def row(self, i: int) -> list[dict[str, Any]]:
    """The completions of problem i as plain data; `correct` is None where there is no verdict."""
    return [
      {
        "text": self.texts[i][j],
        "correct": bool(self.correct[i, j]) if self.reached[i, j] else None,
        "reward": float(self.reward[i, j]),
        "length": int(self.lengths[i, j]),
        "finished": bool(self.finished[i, j]),
      }
      for j in range(len(self.texts[i]))
    ]


GREEDY = SamplingParams(temperature=0.0)
ARRAYS = tuple(field.name for field in dataclasses.fields(Answers) if field.name != "texts")


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a policy does on a set of problems.

  A completion without a verdict is as if it had not been sampled: a problem with fewer than k of the others has no pass@k, best@k and
  maj@k, and takes no part in their means. How many there are is `eval/NAME/no_verdict`.
  """

  name: str
  problems: Sequence[Problem]  # [n]
  sampled: Answers  # [n, g]
  greedy: Answers  # [n, 1]

  def columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """mean@g (the share that is right), greedy, and pass@k: by name f64[n], whose mean over the problems is the metric.

    NaN where a problem has none. Raises ValueError for a k above g.
    """
    right = self._of_verdicts(self.sampled.correct)
    return {
      f"mean@{self.sampled.correct.shape[1]}": np.asarray(
        [row.mean() if len(row) else math.nan for row in right]
      ),
      "greedy": np.where(self.greedy.reached[:, 0], self.greedy.correct[:, 0], np.nan),
      **self._at("pass", ks, lambda i, k: pass_at_k(len(right[i]), int(right[i].sum()), k)),
    }

  def further_columns(self, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """best@k, the mean reward of the best of k (the paper's curves), and maj@k, the majority vote, where a kind has answers (`VOTES`).

    A completion that was cut off abstains. NaN and errors as for `columns`.
    """
    rewards = self._of_verdicts(self.sampled.reward)
    majorities = [self._majorities(i) for i in range(len(rewards))]
    columns = self._at("best", ks, lambda i, k: best_of_k(rewards[i], k))
    if any(row is not None for row in majorities):
      columns |= self._at(
        "maj", ks, lambda i, k: math.nan if majorities[i] is None else majorities[i][k - 1]
      )
    return columns

  def _of_verdicts(self, values: np.ndarray) -> list[np.ndarray]:
    """Each problem's values of the completions that have a verdict."""
    return [row[kept] for row, kept in zip(values, self.sampled.reached, strict=True)]

  def _at(
    self, name: str, ks: Sequence[int], estimate: Callable[[int, int], float]
  ) -> dict[str, np.ndarray]:
    """estimate(problem, k) of every problem with k verdicts or more."""
    g = self.sampled.reached.shape[1]
    counts = self.sampled.reached.sum(1)
    return {
      f"{name}@{k}": np.asarray(
        [math.nan if count < k <= g else estimate(i, k) for i, count in enumerate(counts)]
      )
      for k in ks
    }

  def _majorities(self, i: int) -> np.ndarray | None:
    """maj@1, maj@2 ... of problem i; None where its kind has no answers to vote on."""
    vote = VOTES.get(self.problems[i].kind)
    s = self.sampled
    kept = np.flatnonzero(s.reached[i])
    return vote and majority_at(
      [vote(s.texts[i][j]) if s.finished[i, j] else None for j in kept], s.correct[i, kept]
    )

  def metrics(self) -> dict[str, float]:
    """For a line of metrics.jsonl: `eval/NAME/` mean@g, greedy, pass@1, pass@g and no_verdict."""
    columns = self.columns(sorted({1, self.sampled.correct.shape[1]}))
    return {
      f"eval/{self.name}/{key}": _mean(column) for key, column in columns.items()
    } | self._missing()

  def summary(self, ks: Sequence[int] = ()) -> dict[str, Any]:
    """Every metric at each k (powers of two up to g, and g, unless given), and its 95 % interval over the problems.

    `intervals` holds [lower, upper] by the metric's name, from a bootstrap of fixed seed. None stands for no number.
    """
    s = self.sampled
    ks = ks or default_ks(self.sampled.correct.shape[1])
    columns = {
      f"eval/{self.name}/{key}": column
      for key, column in (self.columns(ks) | self.further_columns(ks)).items()
    }
    ends = bootstrap(np.stack(list(columns.values()), axis=1))
    return {
      "problems": len(s.correct),
      "samples": s.correct.shape[1],
      **{key: _number(_mean(column)) for key, column in columns.items()},
      **self._missing(),
      f"eval/{self.name}/length": float(s.lengths.mean()),
      f"eval/{self.name}/cut_off": float(1 - s.finished.mean()),
      "intervals": {key: [_number(end) for end in ends[:, i]] for i, key in enumerate(columns)},
    }

  def _missing(self) -> dict[str, float]:
    return {
      f"eval/{self.name}/no_verdict": float(
        (~self.sampled.reached).sum() + (~self.greedy.reached).sum()
      )
    }

  def rows(self) -> Iterator[dict[str, Any]]:
    """Problem by problem as plain data: id, prompt, answer, kind, and each completion with what was found of it."""
    for i, problem in enumerate(self.problems):
      yield {
        "id": problem.id,
        "prompt": problem.messages[-1]["content"],
        "answer": problem.answer,
        "kind": problem.kind,
        "samples": self.sampled.row(i),
        "greedy": self.greedy.row(i)[0],
      }


def default_ks(g: int) -> list[int]:
  """1, 2, 4 ... up to g, and g itself."""
  return sorted({2**i for i in range(g.bit_length())} | {g})


class Stopped(Exception):
  """Raised in an evaluation that was asked to stop."""


def evaluate_run(
  config: Config,
  worker: RolloutWorker,
  params: Params,
  problems: Sequence[Problem],
  samples: int | None = None,
  stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
  """The evaluation that a run's config asks for, of `held_out_problems`: the same random keys at every step. Raises Stopped."""
  return evaluate(
    worker,
    worker.policy(params),
    eval_label(config),
    problems,
    key_for(config.seed, Stream.EVALUATE),
    samples=samples or config.eval.samples,
    batch=config.eval.batch,
    sampling_params=config.eval_sampling_params,
    stopping=stopping,
  )


def warm_up_evaluation(config: Config, policy: Policy, problems: Sequence[Problem]) -> None:
  """Compiles every program that `evaluate_run` may need for the run's own number of samples."""
  batch = min(config.eval.batch, len(problems))
  for group, sampling_params in ((config.eval.samples, config.eval_sampling_params), (1, GREEDY)):
    policy.engine.warm_up(policy.params, batch, group=group, sampling_params=sampling_params)


def evaluate(
  worker: RolloutWorker,
  policy: Policy,
  name: str,
  problems: Sequence[Problem],
  key: jax.Array,
  *,
  samples: int,
  batch: int,
  sampling_params: SamplingParams,
  stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
  """Answers every problem `samples` times and once greedily, `batch` problems at a time (the last batch is filled up).

  Raises:
    Stopped: `stopping`, asked before every batch, was True.
  """
  batch = min(batch, len(problems))

  def part_of(start: int, group: int, how: SamplingParams) -> Answers:
    if stopping():
      raise Stopped
    part = list(problems[start : start + batch])
    filled = part + [part[-1]] * (batch - len(part))
    pending = worker.pending(filled, group)
    worker.generate(policy, filled, jax.random.fold_in(key, start), group, how, pending)
    found = pending.result()
    n = len(part)
    return Answers(
      pending.texts[:n],
      *(
        x[:n]
        for x in (found.correct, found.reached, found.reward, pending.lengths, pending.finished)
      ),
    )

  def answers(group: int, how: SamplingParams) -> Answers:
    parts = [part_of(start, group, how) for start in range(0, len(problems), batch)]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    return Answers([row for part in parts for row in part.texts], **arrays)

  return Evaluation(name, problems, answers(samples, sampling_params), answers(1, GREEDY))


def _mean(column: np.ndarray) -> float:
  """The mean of what is a number; NaN where nothing is."""
  return float(np.nanmean(column)) if not np.isnan(column).all() else math.nan


def _number(value: float) -> float | None:
  return None if math.isnan(value) else float(value)
