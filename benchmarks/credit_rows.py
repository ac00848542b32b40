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

import numpy as np
from credit_tasks import config_of, write_problems
from study import names_of, table

import gtpo_jax
from gtpo_jax.logs.display import Display

TINY = ("filler2", "countdown")
TASKS = (*TINY, "sums", "words")
TOKENS = "norm_scope=group,loss_aggregation=token"
# The arms of the first study: uniform credit, then more and more entropy.
STUDIED = (*(f"gtpo(alpha2={x},{TOKENS})" for x in (0, 0.1, 1)), f"grpo_s(beta2=1,{TOKENS})")
# Recipes whose first gradients have different directions, without a guide or a teacher. Before the
# first update and in a single turn, gspo, gspo_token, sapo and gmpo are grpo; dr_grpo, dppo and
# reinforce_pp are rloo; grpo_s_v1 is grpo, gtpo_v1_clipped gtpo_v1, and the others are dapo.
DISTINCT = (
  *("gtpo", "gtpo_v1", "gtpo_v2", "grpo_s", "grpo_s_v2", "dapo", "dapo_forking", "rloo", "max_rl"),
  *("qae", "otb", "pass_at_k", "pass_k_max", "w_reinforce", "entropy_advantage", "empg"),
)
MEASURED = ("vineppo", "spo_chain")  # by continuations


def probe(task: str, out: Path) -> dict[str, Any]:
  """Returns the probe of a task."""
  arms, sizes = ("grpo", *DISTINCT), (6, 12)
  if task in TINY:
    arms, sizes = ("grpo", *STUDIED, *DISTINCT, *MEASURED), (12, 48)
  return gtpo_jax.probe(config_of(task, out), arms, *sizes, out / task, Display())


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
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--tasks", type=names_of(TASKS), default=list(TASKS))
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  write_problems(args.out)
  found = {task: probe(task, args.out) for task in args.tasks}
  for task, result in found.items():
    print(f"{task}: {result['verdict']}", file=sys.stderr)
  print("\n".join(tables(found)))


if __name__ == "__main__":
  main()
