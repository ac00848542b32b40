"""Measures math verdicts per second on GSM8K-like answers, and the cost of hostile expressions.

    python benchmarks/math_rewards.py [--json FILE] [--rounds 9] [--batch 4000] [--workers N]

Each completion is a few lines of reasoning and an answer that is boxed, after `####`, or after
`Answer:`. Correct and incorrect answers alternate. In a hostile batch, 1 in 20 answers is
9^{9^{9^9}}, 3,000 nested parentheses or (10^9)!, in turn. Clean and hostile batches alternate; the
results are medians over the rounds. All batches have different answers, so caches do not help. The
last number is the rate for answers with roots, which only math-verify can check; its workers are
started before the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

import numpy as np

from gtpo_jax.rewards.math.verdicts import math_verdicts
from gtpo_jax.rewards.math.worker_pool import close_pools

HOSTILE = ["9^{9^{9^9}}", "(" * 3000 + "{n}" + ")" * 3000, "(10^9)!"]
HOSTILE_EVERY = 20
FORMATS = ("#### {}", "Answer: ${}", "so \\boxed{{{}}}.")
LONGEST_PLAIN_ANSWER = 10  # characters; longer ones are always boxed
REASONING = 3 * (
  "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\n"
  "She makes 9 * 2 = $<<9*2=18>>18 every day at the market.\n"
)


def batch(
  size: int, hostile: bool, rng: np.random.Generator
) -> tuple[list[str], list[str], list[bool | None]]:
  """Returns completions, gold answers and the expected verdicts."""
  completions = []
  golds = []
  expected = []
  for i in range(size):
    number = int(rng.integers(10**6))
    correct = i % 2 == 0
    answer = f"{number if correct else number + 1:,}"
    if hostile and i % HOSTILE_EVERY == 0:
      answer = HOSTILE[i // HOSTILE_EVERY % 3].replace("{n}", str(number + 1))
      correct = False
    answer_format = FORMATS[i % 3 if len(answer) < LONGEST_PLAIN_ANSWER else 2]
    completions.append(REASONING + answer_format.format(answer))
    golds.append(str(number))
    expected.append(correct)
  return completions, golds, expected


def measure_math_verify(workers: int | None) -> float:
  """Returns the verdicts per second on answers with roots."""
  roots = [
    (f"\\boxed{{{k}\\sqrt{{{n}}}}}", f"\\sqrt{{{k * k * n}}}")
    for k in range(2, 12)
    for n in (2, 3, 5, 6, 7, 10, 11, 13, 14, 15)
  ]
  completions, golds = zip(*roots, strict=True)
  math_verdicts(completions[:8], golds[:8], workers=workers)  # starts the workers
  started = time.perf_counter()
  assert all(math_verdicts(completions, golds, workers=workers)), "a wrong verdict"
  return len(roots) / (time.perf_counter() - started)


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
      started = time.perf_counter()
      verdicts = math_verdicts(completions, golds, workers=args.workers)
      seconds[hostile].append(time.perf_counter() - started)
      assert verdicts == expected, "a wrong verdict"
  # The first round compiles the patterns.
  clean_seconds = np.asarray(seconds[False][1:])
  hostile_seconds = np.asarray(seconds[True][1:])
  math_verify_per_s = measure_math_verify(args.workers)
  close_pools()

  result = {
    "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "batch": args.batch,
    "rounds": args.rounds,
    "verdicts_per_s": float(args.batch / np.median(clean_seconds)),
    "clean_s": float(np.median(clean_seconds)),
    "hostile_s": float(np.median(hostile_seconds)),
    "hostile_over_clean": float(np.median(hostile_seconds / clean_seconds)),
    "math_verify_per_s": math_verify_per_s,
  }
  for name, value in result.items():
    print(f"{name:<20} {value:.4g}" if isinstance(value, float) else f"{name:<20} {value}")
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
