"""Measures whether the group gradient of GRPO has token credit, because opposite signs cancel.

    python benchmarks/credit_cancellation.py --out=runs/credit_cancellation

The plan and the result are in docs/experiments.md. On tiny tasks, every prefix of 32 completions of
a problem is continued, which measures the true advantage of each token. OUT keeps the problems that
are done, and `cancellation.png`. It starts from the base models of `credit_rows.py` if OUT is the
same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import numpy as np
from credit_tasks import config_of
from study import COLORS, names_of

from gtpo_jax.arrays import KeyStream
from gtpo_jax.logs.display import Display
from gtpo_jax.loop.warm_start import base_model
from gtpo_jax.rollout.collector import Collector, group_keys
from gtpo_jax.rollout.continuations import ValueEstimator
from gtpo_jax.rollout.frozen import FrozenPolicies
from gtpo_jax.rollout.groups import Group
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker

PROBLEMS = {"filler0": 24, "countdown": 24, "filler2": 12}
GROUPS = (4, 8, 16, 32)
CONTINUATIONS = 8  # of each prefix, in each of two sets
SHARING = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 32))  # completions through a state
KINDS = ("tokens", "logits, alone", "logits, summed")
DRAWS = 2000  # of the bootstrap

Tokens = tuple[int, ...]


class Sums(NamedTuple):
  """Inner products of the credit with the true one, which add up over states and problems.

  Attributes:
    both: credit times the mean of the two measurements of the true credit.
    own: credit times credit.
    true: one measurement of the true credit times the other, so that their noise drops out.
  """

  both: float = 0.0
  own: float = 0.0
  true: float = 0.0

  @classmethod
  def of(cls, credit: np.ndarray, first: np.ndarray, second: np.ndarray) -> Sums:
    """Returns the products of three vectors."""
    return cls(*map(float, (credit @ (first + second) / 2, credit @ credit, first @ second)))

  def __add__(self, other: Sums) -> Sums:
    return Sums(*np.add(self, other))

  def cosine(self) -> float:
    """Returns the cosine of the credit with the true one."""
    size = self.own * self.true
    return self.both / np.sqrt(size) if size > 0 else float("nan")


def measured(
  group: Group, estimator: ValueEstimator, keys: Sequence[np.ndarray]
) -> list[dict[Tokens, float]]:
  """Returns two measurements of the value of every prefix of a group, and its verdicts."""
  cuts: list[list[int]] = []
  seen: set[Tokens] = set()
  for completion in group.completions:
    ids = completion.tokens.tolist()
    new = [m for m in range(len(ids)) if tuple(ids[:m]) not in seen]
    seen |= {tuple(ids[:m]) for m in new}
    cuts.append(new)
  found = []
  for key in keys:
    values = estimator.values([group], [cuts], CONTINUATIONS, key)
    of_prefix = {}
    for j, completion in enumerate(group.completions):
      ids = completion.tokens.tolist()
      of_prefix |= {tuple(ids[:m]): values.mean[0, j, k] for k, m in enumerate(cuts[j])}
      of_prefix[tuple(ids)] = float(group.rewards.correct[j])
    found.append(of_prefix)
  return found


def products(
  completions: Sequence[Tokens],
  log_probs: Sequence[np.ndarray],
  correct: np.ndarray,
  values: Sequence[Mapping[Tokens, float]],
) -> dict[str, Sums]:
  """Returns the products of a group's credit with the true one, by kind and by sharing.

  The gradient of a token's log-prob by the logits of its state is 1 on the token, minus the
  probabilities. Tokens that no completion has are one.

  Args:
    completions: the tokens of each.
    log_probs: f32[m] of each, nats.
    correct: f64[g].
    values: two measurements of the value of each prefix.
  """
  credit = correct - correct.mean()
  states: dict[Tokens, list[tuple[int, int]]] = defaultdict(list)  # completions and next tokens
  for j, ids in enumerate(completions):
    for m, token in enumerate(ids):
      states[ids[:m]].append((j, token))
  found: dict[str, Sums] = defaultdict(Sums)
  for prefix, visits in states.items():
    tokens = sorted({token for _, token in visits})
    gain = lambda token, of, prefix=prefix: of[(*prefix, token)] - of[prefix]
    # f64[3, visits]: the credit, and two measurements of the true one
    weights = np.array([[credit[j], *(gain(token, of) for of in values)] for j, token in visits]).T
    probabilities = {token: np.exp(log_probs[j][len(prefix)]) for j, token in visits}
    p = np.array([probabilities[token] for token in tokens])
    p = np.append(p, max(0.0, 1.0 - p.sum()))
    by_logits = np.eye(len(p))[[tokens.index(token) for _, token in visits]] - p
    summed = Sums.of(*(weights @ by_logits))
    found["tokens"] += Sums.of(*weights)
    for i, row in enumerate(by_logits):
      found["logits, alone"] += Sums.of(*np.outer(weights[:, i], row))
    found["logits, summed"] += summed
    low = next(low for low, high in SHARING if low <= len(visits) <= high)
    found[f"from {low}"] += summed
  return dict(found)


def measure(task: str, out: Path) -> list[dict[str, Any]]:
  """Returns the products of each problem by size of the group, from OUT where they are there."""
  file = out / f"cancellation-{task}.jsonl"
  rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
  config = config_of(task, out, batch__prompts=1, batch__group=max(GROUPS))
  if len(rows) == PROBLEMS[task]:
    return rows
  with contextlib.closing(RewardManager(config)) as rewards:
    worker = RolloutWorker(config)
    folder = out / task
    folder.mkdir(parents=True, exist_ok=True)
    params = base_model(config, worker, folder, Display(), lambda: False)
    policy = worker.policy(params)
    estimator = ValueEstimator(worker, rewards, policy, config.sampling_params)
    problems = training_problems(config, worker)
    frozen = FrozenPolicies(None, None, {}, {})
    collector = Collector(config, worker, rewards, problems, frozen, steps=len(rows))
    while len(rows) < PROBLEMS[task]:
      (group,) = collector.collect(params, 0, print).groups
      keys = [
        group_keys(config, policy.engine, stream, [group], max(GROUPS))
        for stream in (KeyStream.CONTINUE, KeyStream.MEASURE)
      ]
      values = measured(group, estimator, keys)
      completions = [tuple(x.tokens.tolist()) for x in group.completions]
      log_probs = [x.arrays()["log_probs"] for x in group.completions]
      correct = np.asarray(group.rewards.correct, np.float64)
      row = {str(g): products(completions[:g], log_probs[:g], correct[:g], values) for g in GROUPS}
      with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
      rows.append(json.loads(json.dumps(row)))
  return rows


def total(rows: Sequence[Mapping[str, Any]], g: int, key: str) -> Sums:
  """Returns the products of all problems, with groups of g."""
  return sum((Sums(*row[str(g)].get(key, Sums())) for row in rows), Sums())


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
  """Returns the cosines by size of the group, and by how many completions share a state."""
  lines = []
  rng = np.random.default_rng(0)
  for task, rows in found.items():
    for key in KINDS:
      cosines = ", ".join(f"{total(rows, g, key).cosine():.3f}" for g in GROUPS)
      lines.append(f"{task}, {key}, groups of {GROUPS}: {cosines}")
    differences = []
    for _ in range(DRAWS):
      drawn = [rows[i] for i in rng.integers(0, len(rows), len(rows))]
      few, many = (total(drawn, g, KINDS[2]).cosine() for g in (GROUPS[0], GROUPS[-1]))
      differences.append(many - few)
    low, high = np.nanpercentile(differences, (2.5, 97.5))
    lines.append(f"{task}, summed, {GROUPS[-1]} minus {GROUPS[0]}: [{low:.3f}, {high:.3f}]")
    for low, high in SHARING:
      part = total(rows, GROUPS[-1], f"from {low}")
      share = part.true / total(rows, GROUPS[-1], KINDS[2]).true
      lines.append(
        f"{task}, {low} to {high} completions: {part.cosine():.3f}, {share:.0%} of credit"
      )
  return lines


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
  """Draws the cosines by size of the group."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 3.2), layout="constrained")
  axes = figure.subplots()
  for (task, rows), color in zip(found.items(), COLORS, strict=False):
    for key, style in zip(KINDS, (":", "--", "-"), strict=True):
      values = [total(rows, g, key).cosine() for g in GROUPS]
      axes.plot(GROUPS, values, style, color=color, marker=".", label=f"{task}, {key}")
  axes.set_xscale("log", base=2)
  axes.set_xticks(GROUPS, map(str, GROUPS))
  axes.set_ylim(0, 1)
  axes.set_xlabel("completions of a group")
  axes.set_ylabel("cosine with the true token credit")
  axes.spines[["top", "right"]].set_visible(False)
  figure.legend(loc="outside right center", fontsize=8)
  figure.savefig(file, dpi=130)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--tasks", type=names_of(PROBLEMS), default=["filler0", "filler2"])
  args = parser.parse_args()
  found = {task: measure(task, args.out) for task in args.tasks}
  print("\n".join(tables(found)))
  draw(found, args.out / "cancellation.png")


if __name__ == "__main__":
  main()
