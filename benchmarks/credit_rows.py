"""Probes every recipe on two tiny models and two tasks of SmolLM2, as docs/experiments.md plans.

    python benchmarks/credit_rows.py --out=runs/credit_rows [--tasks=filler2,countdown,sums,words]

Each task is one call of `gtpo_jax.probe`, which resumes after a kill. The results are printed as a
Markdown table. The environment variable GTPO_SMOLLM2 names the folder of SmolLM2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_jax.runtime.startup import prepare_jax

prepare_jax()  # before JAX is imported

import credit_tasks
import numpy as np
from study import names_of, table

import gtpo_jax
from gtpo_jax.algorithms import RECIPES
from gtpo_jax.config import Config, load
from gtpo_jax.logs.display import Display

FORKS = {"data.train": "forks", "sampling.max_tokens": 14}
# By name: the config file of a tiny base model, and the fields that differ.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
  "filler0": ("configs/forks.py", {**FORKS, "data.filler": 0}),
  "filler2": ("configs/forks.py", {**FORKS, "data.filler": 2, "sampling.max_tokens": 26}),
  "countdown": ("configs/compare.py", {}),
}
TOKENS = "norm_scope=group,loss_aggregation=token"
# The arms of the first study: uniform credit, then more and more entropy.
STUDIED = tuple(f"gtpo(alpha2={x},{TOKENS})" for x in (0, 0.1, 1)) + tuple(
  f"grpo_s(beta2={x},{TOKENS})" for x in (0, 1)
)
LEFT_OUT = ("dapo_mixed", "rlsd", "opd")  # they need a guide or a teacher
ROWS = tuple(name for name in RECIPES if name != "grpo" and name not in LEFT_OUT)
# Recipes without continuations whose gradients differ before the first update.
DISTINCT = (
  *("gtpo", "gtpo_v1", "gtpo_v2", "grpo_s", "dapo", "dapo_forking", "dr_grpo", "rloo"),
  *("reinforce_pp", "max_rl", "qae", "otb", "pass_at_k", "pass_k_max", "w_reinforce"),
  *("entropy_advantage", "empg"),
)


def config_of(task: str, changes: Mapping[str, Any] | None = None) -> Config:
  """Returns the config of a tiny task, with some fields changed."""
  file, fields = TINY[task]
  fields = {**fields, "log.tensorboard": False, **(changes or {})}
  return load(file, [f"--config.{key}={value}" for key, value in fields.items()])


def probe(task: str, out: Path) -> dict[str, Any]:
  """Returns the probe of a task."""
  if task in TINY:
    config, arms, sizes = config_of(task), ("grpo", *STUDIED, *ROWS), (12, 48)
  else:
    credit_tasks.write_problems(out)
    config, arms, sizes = credit_tasks.config_of(task, out), ("grpo", *DISTINCT), (6, 12)
  return gtpo_jax.probe(config, arms, *sizes, out / task, Display())


def tables(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Returns a table of cosines: that of `grpo`, then differences from it.

  * marks p < 0.05 by Holm; the standard error is in parentheses.
  """

  def cell(result: Mapping[str, Any], arm: str) -> str:
    values = result["arms"].get(arm)
    if values is None:
      return ""
    if "difference" not in values:
      return f"{values['cosine'][0]:.3f}"
    x = np.subtract(values["cosines"], result["arms"]["grpo"]["cosines"])
    error = x.std(ddof=1) / np.sqrt(len(x))
    return f"{x.mean():+.3f} ({error:.3f}){'*' if values['p_holm'] < 0.05 else ''}"

  arms = dict.fromkeys(arm for result in found.values() for arm in result["arms"])
  rows = ([arm, *(cell(result, arm) for result in found.values())] for arm in arms)
  return table(["arm", *found], rows)


def main() -> None:
  tasks = [*TINY, *credit_tasks.TASKS]
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--tasks", type=names_of(tasks), default=["filler2", "countdown", "sums"])
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  found = {task: probe(task, args.out) for task in args.tasks}
  for task, result in found.items():
    print(f"{task}: {result['verdict']}", file=sys.stderr)
  print("\n".join(tables(found)))


if __name__ == "__main__":
  main()
