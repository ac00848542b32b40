"""The tasks of the studies of credit: their configs, and the problems with two words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_jax.config import Config, load
from gtpo_jax.data.tasks.sentences import TOPICS, WORDS
from gtpo_jax.rewards.synthetic import sentence_correct

CONFIGS = Path(__file__).parents[1] / "configs"
TRAINING_PROBLEMS = 2000
HELD_OUT = 64
SUMS = "rg:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
LORA_LEARNING_RATE = 2e-4  # ten times that of all weights, as "LoRA without regret" recommends
# The fields that the tasks of SmolLM2 share.
REAL = {
  "data.max_prompt_tokens": 80,
  "batch.pack": False,  # packing would compile many shapes
  "model.compute_dtype": "bfloat16",
}
FILLER2 = {"data.filler": 2, "sampling.max_tokens": 26, "batch.pack": False}
# By name: the config file, and the fields that differ. {out} is the folder of the results.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
  "filler0": ("forks", {"data.filler": 0, "sampling.max_tokens": 14}),
  "filler2": ("forks", FILLER2),
  "confident": ("forks", {**FILLER2, "data.train": "forks_confident"}),
  "countdown": ("compare", {"batch.pack": False}),
  "words": (
    "smollm2_sentences",
    {
      **REAL,
      "data.train": "{out}/words-train.jsonl",
      "data.eval": "{out}/words-eval.jsonl",
      "reward.verifier": "credit_tasks:two_words",
      "sampling.max_tokens": 40,
    },
  ),
  "sums": (
    "smollm2_sentences",
    {
      **REAL,
      "data.train": f"{SUMS}&size={TRAINING_PROBLEMS}&seed=1",
      "data.eval": f"{SUMS}&size={HELD_OUT}&seed=2",
      "sampling.max_tokens": 32,
    },
  ),
}


def two_words(
  prompts: Sequence[str],
  completions: Sequence[str],
  answers: Sequence[str],
  extras: Sequence[dict[str, str]],
) -> list[bool]:
  """Returns whether each text is a sentence with the topic and both words; see `rewards.md`."""
  return [
    all(sentence_correct(text, extra["topic"], extra[key]) for key in ("first", "second"))
    for text, extra in zip(completions, extras, strict=True)
  ]


def write_problems(out: Path) -> None:
  """Writes the problems with two words, the same in every call; training and held-out differ."""
  words = list(itertools.combinations(WORDS.split(), 2))
  topics = TOPICS.split()
  rng = np.random.default_rng(0)
  codes = rng.permutation(len(topics) * len(words))[: HELD_OUT + TRAINING_PROBLEMS]
  rows = []
  for number, code in enumerate(codes.tolist()):
    topic = topics[code % len(topics)]
    first, second = words[code // len(topics)]
    article = "an" if topic[0] in "aeiou" else "a"
    prompt = (
      f"Write one short sentence about {article} {topic}. Use the words {first} and {second} in it."
    )
    extra = {"topic": topic, "first": first, "second": second}
    row = {"id": f"words-{number}", "prompt": prompt, "answer": f"{first} {second}"}
    rows.append(json.dumps({**row, "kind": "exact", "extra": extra}))
  for name, part in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
    (out / f"words-{name}.jsonl").write_text("\n".join(part) + "\n")


def config_of(name: str, out: Path, **changes: Any) -> Config:
  """Returns the config of a task, or of a task with adapters.

  Args:
    name: a key of `TASKS`, or one followed by `_lora` and the rank of the adapters.
    out: the folder of the results.
    **changes: fields of the config, with two underscores for each dot.
  """
  task, _, rank = name.partition("_lora")
  file, fields = TASKS[task]
  fields = {"log.tensorboard": False, **fields}
  if rank:
    fields |= {"model.lora_rank": int(rank), "optimizer.learning_rate": LORA_LEARNING_RATE}
  fields |= {key.replace("__", "."): value for key, value in changes.items()}
  overrides = [f"--config.{key}={value}" for key, value in fields.items()]
  return load(str(CONFIGS / f"{file}.py"), [x.replace("{out}", str(out)) for x in overrides])
