"""Math verdicts a second, and what 5 % hostile expressions add: batches of GSM8K-like answers, clean and hostile in turns.

    python benchmarks/math_rewards.py [--json FILE] [--rounds 9] [--batch 4000] [--workers N]

Each completion is a few lines of reasoning and an answer, right or wrong by turns, boxed, after `####` or after `Answer:`. A hostile
batch has 1 in 20 answers replaced by 9^{9^{9^9}}, 3,000 nested parentheses or (10^9)!, in turns. Medians over the rounds; no two
batches share an answer, so that no cache helps across them. The last number is of what only math-verify can judge (roots), by the
workers, started before the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

import numpy as np

from gtpo_jax.rewards.math import math_verdicts
from gtpo_jax.rewards.pool import close_pools

HOSTILE = ["9^{9^{9^9}}", "(" * 3000 + "{n}" + ")" * 3000, "(10^9)!"]
REASONING = (
  "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day at the market.\n"
  * 3
)


def batch(
  size: int, hostile: bool, rng: np.random.Generator
) -> tuple[list[str], list[str], list[bool | None]]:
  """Completions, gold answers and what must be judged; None stands for "not right"."""
  completions = []
  golds = []
  expected = []
  for i in range(size):
    number = int(rng.integers(10**6))
    right = i % 2 == 0
    answer = f"{number if right else number + 1:,}"
    if hostile and i % 20 == 0:
      answer = HOSTILE[i // 20 % 3].replace("{n}", str(number + 1))
      right = False
    completions.append(
      REASONING
      + ("#### {}", "Answer: ${}", "so \\boxed{{{}}}.")[i % 3 if len(answer) < 10 else 2].format(
        answer
      )
    )
    golds.append(str(number))
    expected.append(right)
  return completions, golds, expected


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--batch", type=int, default=4000)
  parser.add_argument("--workers", type=int)
  parser.add_argument("--json")
  args = parser.parse_args()

  rng = np.random.default_rng(0)
  seconds = {False: [], True: []}
  for i in range(args.rounds + 1):
    for hostile in (False, True) if i % 2 else (True, False):
      completions, golds, expected = batch(args.batch, hostile, rng)
      began = time.perf_counter()
      verdicts = math_verdicts(completions, golds, workers=args.workers)
      seconds[hostile].append(time.perf_counter() - began)
      assert verdicts == expected, "a wrong verdict"
  clean, hostile = (
    np.asarray(seconds[kind][1:]) for kind in (False, True)
  )  # the first round compiles patterns

  roots = [
    (f"\\boxed{{{k}\\sqrt{{{n}}}}}", f"\\sqrt{{{k * k * n}}}")
    for k in range(2, 12)
    for n in (2, 3, 5, 6, 7, 10, 11, 13, 14, 15)
  ]
  math_verdicts(*zip(*roots[:8], strict=True), workers=args.workers)
  began = time.perf_counter()
  assert all(math_verdicts(*zip(*roots, strict=True), workers=args.workers)), "a wrong verdict"
  roots_per_s = len(roots) / (time.perf_counter() - began)
  close_pools()

  result = {
    "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "batch": args.batch,
    "rounds": args.rounds,
    "verdicts_per_s": float(args.batch / np.median(clean)),
    "clean_s": float(np.median(clean)),
    "hostile_s": float(np.median(hostile)),
    "hostile_over_clean": float(np.median(hostile / clean)),
    "math_verify_per_s": roots_per_s,
  }
  for name, value in result.items():
    print(f"{name:<20} {value:.4g}" if isinstance(value, float) else f"{name:<20} {value}")
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
