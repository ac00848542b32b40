"""Measures how many verdicts a second verifiers reach: of mathematics, or of programs.

    python benchmarks/rewards.py math [--json FILE] [--rounds 9] [--batch 4000] [--workers N]
    python benchmarks/rewards.py code [--json FILE] [--seconds 4] [--at_once 1,8,16]

`math`: a completion is a few lines of reasoning and an answer like those of GSM8K that is boxed,
after `####`, or after `Answer:`. Correct and incorrect answers alternate. In a hostile batch, 1 in
20 answers is 9^{9^{9^9}}, 3,000 nested parentheses or (10^9)!, in turn. Clean and hostile batches
alternate; the results are medians over the rounds. All batches have different answers, so caches do
not help. The last number is the rate for answers with roots, which only math-verify can check; its
workers are started before the measurement.

`code`: each run executes a correct program, similar to those of HumanEval (a dozen asserts), in its
own sandbox, with several numbers of concurrent runs. It is measured with and without `from typing
import List`, which one in eight HumanEval programs contains (the import takes 10 ms). The load of
the machine at the start is reported too, because other work slows the runs down.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from measuring import show, store

from gtpo_jax.rewards.code import run_code
from gtpo_jax.rewards.math.verdicts import math_verdicts
from gtpo_jax.rewards.math.worker_pool import close_pools
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.sandbox.bubblewrap import sandbox_problem

HOSTILE = ["9^{9^{9^9}}", "(" * 3000 + "{n}" + ")" * 3000, "(10^9)!"]
HOSTILE_EVERY = 20
FORMATS = ("#### {}", "Answer: ${}", "so \\boxed{{{}}}.")
LONGEST_PLAIN_ANSWER = 10  # characters; longer ones are always boxed
REASONING = 3 * (
  "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day.\n"
  "She makes 9 * 2 = $<<9*2=18>>18 every day at the market.\n"
)


def math_batch(
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


def measure_math(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the rates of clean and hostile batches, and of answers with roots."""
  rng = np.random.default_rng(0)
  seconds = {False: [], True: []}
  for i in range(args.rounds + 1):
    for hostile in (False, True) if i % 2 else (True, False):
      completions, golds, expected = math_batch(args.batch, hostile, rng)
      started = time.perf_counter()
      verdicts = math_verdicts(completions, golds, workers=args.workers)
      seconds[hostile].append(time.perf_counter() - started)
      assert verdicts == expected, "a wrong verdict"
  clean, hostile = (
    np.asarray(seconds[x][1:]) for x in (False, True)
  )  # the first compiles patterns
  math_verify_per_s = measure_math_verify(args.workers)
  close_pools()
  return {
    "batch": args.batch,
    "rounds": args.rounds,
    "verdicts_per_s": float(args.batch / np.median(clean)),
    "clean_s": float(np.median(clean)),
    "hostile_s": float(np.median(hostile)),
    "hostile_over_clean": float(np.median(hostile / clean)),
    "math_verify_per_s": math_verify_per_s,
  }


PROGRAM = """
def running_maximum(numbers):
  result = []
  for number in numbers:
    result.append(max(result[-1], number) if result else number)
  return result
"""
TESTS = """
def check(candidate):
  assert candidate([]) == []
  for n in range(1, 12):
    assert candidate(list(range(n))) == list(range(n))
  assert candidate([3, 2, 3, 100, 3]) == [3, 3, 3, 100, 100]

check(running_maximum)
"""


def run_programs(program: str, at_once: int, seconds: float) -> dict[str, float]:
  """Returns the runs per second, and the median and 99th percentile of the seconds per run."""
  end = time.perf_counter() + seconds
  run_seconds = []

  def work() -> None:
    while (started := time.perf_counter()) < end:
      result = run_code(program, TESTS, timeout_s=30)
      assert result.passed, result
      run_seconds.append(time.perf_counter() - started)

  started = time.perf_counter()
  with ThreadPoolExecutor(at_once) as pool:
    for job in [pool.submit(work) for _ in range(at_once)]:
      job.result()
  return {
    "runs_per_s": len(run_seconds) / (time.perf_counter() - started),
    "median_s": float(np.median(run_seconds)),
    "p99_s": float(np.percentile(run_seconds, 99)),
  }


def measure_code(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the rates by program and number of concurrent runs.

  Raises:
    UserError: this machine has no sandbox.
  """
  started = time.perf_counter()
  if problem := sandbox_problem():
    raise UserError(problem)
  result: dict[str, Any] = {"prepared_s": time.perf_counter() - started}
  for name, program in (("plain", PROGRAM), ("typing", "from typing import List\n" + PROGRAM)):
    for at_once in map(int, args.at_once.split(",")):
      rates = run_programs(program, at_once, args.seconds)
      result |= {f"{name}/{at_once}/{key}": value for key, value in rates.items()}
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("kind", choices=("math", "code"))
  parser.add_argument("--rounds", type=int, default=9, help="of math")
  parser.add_argument("--batch", type=int, default=4000, help="of math")
  parser.add_argument("--workers", type=int, help="of math")
  parser.add_argument("--seconds", type=float, default=4.0, help="of code, for each row")
  parser.add_argument("--at_once", default="1,8,16", help="of code")
  parser.add_argument("--json")
  args = parser.parse_args()
  result = {
    "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "load": os.getloadavg()[0],
  }
  result |= (measure_math if args.kind == "math" else measure_code)(args)
  show(result)
  store(result, args.json)


if __name__ == "__main__":
  main()
