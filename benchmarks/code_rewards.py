"""Measures how many programs per second the sandbox for code rewards runs.

    python benchmarks/code_rewards.py [--json FILE] [--seconds 4] [--at_once 1,8,16]

Each run executes a correct program, similar to those of HumanEval (a dozen asserts), in its own
sandbox. It is measured with and without `from typing import List`, which one in eight HumanEval
programs contains (the import takes 10 ms), and with several numbers of concurrent runs. The load of
the machine at the start is reported too, because other work slows the runs down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gtpo_jax.rewards.code import run_code
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.sandbox.bubblewrap import sandbox_problem

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


def measure(program: str, at_once: int, seconds: float) -> dict[str, float]:
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--seconds", type=float, default=4.0)
  parser.add_argument("--at_once", default="1,8,16")
  parser.add_argument("--json")
  args = parser.parse_args()

  result = {
    "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
    "load": os.getloadavg()[0],
  }
  started = time.perf_counter()
  if problem := sandbox_problem():
    raise UserError(problem)
  result["prepared_s"] = time.perf_counter() - started
  print(
    f"python {result['python']}, {result['cores']} cores, load {result['load']:.1f}, "
    f"prepared in {result['prepared_s']:.2f} s"
  )
  print(f"{'program':>8} {'at once':>8} {'runs/s':>8} {'median':>10} {'p99':>10}")
  for name, program in (("plain", PROGRAM), ("typing", "from typing import List\n" + PROGRAM)):
    for at_once in map(int, args.at_once.split(",")):
      row = result[f"{name}/{at_once}"] = measure(program, at_once, args.seconds)
      median_ms = row["median_s"] * 1e3
      p99_ms = row["p99_s"] * 1e3
      print(
        f"{name:>8} {at_once:>8} {row['runs_per_s']:>8.1f} {median_ms:>7.1f} ms {p99_ms:>7.1f} ms"
      )
  if args.json:
    with open(args.json, "w") as out:
      json.dump(result, out, indent=2)


if __name__ == "__main__":
  main()
