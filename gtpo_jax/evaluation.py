"""Held-out evaluation: mean@n and unbiased pass@k of sampled completions, and the greedy answer."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from gtpo_jax.config import Config
from gtpo_jax.data.records import Problem
from gtpo_jax.models.qwen2 import Params
from gtpo_jax.problems import eval_label
from gtpo_jax.rollout import Actor, Policy, Stream, key_for
from gtpo_jax.sampling.filters import Sampler


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a policy does on a set of problems."""

  name: str
  correct: np.ndarray  # bool[problems, samples]
  greedy: np.ndarray   # bool[problems]

  @property
  def mean(self) -> float:
    """mean@n: the share of sampled completions that are right; the unbiased pass@1."""
    return float(self.correct.mean())

  def pass_at(self, k: int) -> float:
    """pass@k, averaged over the problems."""
    samples = self.correct.shape[1]
    return float(np.mean([pass_at_k(samples, int(right), k) for right in self.correct.sum(1)]))

  def metrics(self, ks: Sequence[int] | None = None) -> dict[str, float]:
    """`eval/NAME/mean@n`, `eval/NAME/pass@k` for each k (1 and the number of samples unless given), `eval/NAME/greedy`."""
    samples = self.correct.shape[1]
    out = {f"eval/{self.name}/mean@{samples}": self.mean, f"eval/{self.name}/greedy": float(self.greedy.mean())}
    return out | {f"eval/{self.name}/pass@{k}": self.pass_at(k) for k in ks or sorted({1, samples})}


def pass_at_k(n: int, right: int, k: int) -> float:
  """The chance that at least one of k completions drawn from n without replacement is right: 1 - C(n-right, k) / C(n, k).

  Source: Chen et al. 2021 (2107.03374), eq. 1. Raises ValueError unless 1 <= k <= n.
  """
  if not 1 <= k <= n:
    raise ValueError(f"pass@k needs 1 <= k <= n samples, got k = {k} and n = {n}")
  return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def evaluate_run(config: Config, actor: Actor, params: Params, problems: Sequence[Problem], samples: int | None = None) -> Evaluation:
  """The evaluation that a run's config asks for, of `held_out_problems`: the same random keys at every step."""
  return evaluate(actor, actor.policy(params), eval_label(config), problems, key_for(config.seed, Stream.EVALUATE),
                  samples=samples or config.eval.samples, batch=config.eval.batch, sampler=config.eval_sampler)


def evaluate(actor: Actor, policy: Policy, name: str, problems: Sequence[Problem], key: jax.Array, *, samples: int, batch: int,
             sampler: Sampler) -> Evaluation:
  """Answers every problem `samples` times and once greedily, `batch` problems at a time (the last batch is filled up)."""
  batch = min(batch, len(problems))

  def answers(group: int, how: Sampler) -> np.ndarray:
    rows = []
    for start in range(0, len(problems), batch):
      part = list(problems[start:start + batch])
      filled = part + [part[-1]] * (batch - len(part))
      rollouts = actor.answer(policy, filled, jax.random.fold_in(key, start), group, how)
      _, found = actor.judged(rollouts, filled)
      rows.append(found.correct[:len(part)])
    return np.concatenate(rows)

  return Evaluation(name, answers(samples, sampler), answers(1, Sampler(temperature=0.0))[:, 0])
