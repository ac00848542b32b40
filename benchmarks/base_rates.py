"""Measures how often a model is right on easy problems of twenty tasks of reasoning-gym.

    python benchmarks/base_rates.py --model=FOLDER --out=runs/base_rates [--tasks=gcd,lcm,...]

Each task is one `gtpo eval`: 16 problems, 8 sampled completions of at most 48 tokens and a greedy
one. Prompts over 192 tokens are skipped, and counted. The commands are in OUT/TASK.log, the
completions in OUT/TASK.jsonl. Tasks that are done are not repeated; the table of all that are done
is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from compare import GTPO

SAMPLES = 8
COMMON = [
  "--config.sampling.max_tokens=48",
  "--config.data.max_prompt_tokens=192",
  "--config.data.bad_rows=1000",
  "--config.eval.problems=16",
]
WORDS = [
  "--config.data.template={prompt}\nReply with the answer only.",
  "--config.reward.gym_answer=line",
]
ONE_DIGIT = "min_terms=2&max_terms=2&min_digits=1&max_digits=1"


class Measured(NamedTuple):
  """A task.

  Attributes:
    knobs: in the form of `data.eval`.
    words: whether answers are words, which the prompt asks for, and which are read from the last
      line.
  """

  knobs: str = ""
  words: bool = False


TASKS = {
  "chain_sum": Measured(ONE_DIGIT),
  "basic_arithmetic": Measured(ONE_DIGIT),
  "products": Measured(ONE_DIGIT),
  "gcd": Measured("max_value=20"),
  "lcm": Measured("max_value=10"),
  "leg_counting": Measured("min_animals=1&max_animals=1&max_instances=3"),
  "letter_counting": Measured("min_words=1&max_words=2"),
  "number_sequence": Measured("max_complexity=1"),
  "coin_flip": Measured("min_trials=2&max_trials=3"),
  "count_bits": Measured("max_n=15"),
  "count_primes": Measured("max_n=20"),
  "simple_equations": Measured("max_value=9&max_terms=2"),
  "aiw": Measured("max_entities=3"),
  "calendar_arithmetic": Measured(words=True),
  "syllogism": Measured(words=True),
  "isomorphic_strings": Measured("max_string_length=3", words=True),
  "ransom_note": Measured("max_note_length=2&max_magazine_length=6", words=True),
  "family_relationships": Measured("max_family_size=4", words=True),
  "spell_backward": Measured("max_word_len=4", words=True),
  "word_sorting": Measured("min_words=3&max_words=3", words=True),
}


def evaluate(name: str, args: argparse.Namespace) -> None:
  """Evaluates the model on a task.

  Raises:
    SystemExit: the command failed.
  """
  task = TASKS[name]
  source = "&".join(filter(None, (f"rg:{name}?size=100&seed=1", task.knobs)))
  command = ["eval", f"--model={args.model}", f"--config={args.config}", *COMMON]
  command += [f"--config.data.eval={source}", f"--k=1,{SAMPLES}", *(WORDS if task.words else [])]
  command += [f"--completions={args.out / name}.jsonl", f"--json={args.out / name}.part"]
  with (args.out / f"{name}.log").open("w") as log:
    print(*command, file=log, flush=True)
    if code := subprocess.run([*GTPO, *command], stdout=log, stderr=subprocess.STDOUT).returncode:
      sys.exit(f"{name} exited with {code}; see {args.out / name}.log")
  os.replace(args.out / f"{name}.part", args.out / f"{name}.json")


def row(name: str, out: Path) -> str:
  """Returns a task's row of the table, in Markdown."""
  problems = [json.loads(line) for line in (out / f"{name}.jsonl").open()]
  summary = json.loads((out / f"{name}.json").read_text())
  accuracy = next(key for key in summary if key.endswith(f"/mean@{SAMPLES}"))
  low, high = summary["intervals"][accuracy]
  right = np.asarray([[sample["correct"] for sample in row["samples"]] for row in problems])
  mixed = (right.any(1) & ~right.all(1)).mean()
  ended = 1 - next(value for key, value in summary.items() if key.endswith("/cut_off"))
  greedy = next(value for key, value in summary.items() if key.endswith("/greedy"))
  cells = [
    f"`{name}`",
    f"`{TASKS[name].knobs.replace('&', ', ')}`" if TASKS[name].knobs else "",
    str(right.size),
    f"{summary[accuracy]:.1%} ({low:.1%} to {high:.1%})",
    f"{greedy:.1%}",
    f"{mixed:.0%}",
    f"{ended:.0%}",
  ]
  return f"| {' | '.join(cells)} |"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--config", default="configs/smollm2_sentences.py")
  parser.add_argument("--tasks", default=",".join(TASKS))
  args = parser.parse_args()
  names = args.tasks.split(",")
  if unknown := set(names) - set(TASKS):
    parser.error(f"{min(unknown)} is not a task; the tasks are {', '.join(TASKS)}")
  args.out.mkdir(parents=True, exist_ok=True)
  for name in names:
    if not (args.out / f"{name}.json").exists():
      started = time.perf_counter()
      evaluate(name, args)
      print(f"{row(name, args.out)} {time.perf_counter() - started:.0f} s", flush=True)
  heads = ["task", "knobs", "samples", "right", "greedy", "groups with contrast", "ended"]
  done = [name for name in TASKS if (args.out / f"{name}.json").exists()]
  print("\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]))
  print("\n".join(row(name, args.out) for name in done))


if __name__ == "__main__":
  main()
