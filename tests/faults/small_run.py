"""A run of six steps in this process, for tests that change its files."""

import json

from toys import ADDITIONS, Listener, even, lasting

import gtpo_jax
from gtpo_jax.config import freeze
from gtpo_jax.logs.credit import credit_files, read_credit
from gtpo_jax.logs.log_files import read_jsonl

STEPS = 6
CONFIG = {
  "steps": STEPS,
  "model": {"preset": "tiny"},
  "data": {"max_prompt_tokens": 20},
  "batch": {"prompts": 4, "group": 4},
  "sampling": {"max_tokens": 8},
  "eval": {"problems": 4, "samples": 2, "batch": 4, "every": 2},
  "checkpoint": {"every": 2, "keep": 3},
  "log": {"samples": 2, "credit_every": 2},
  "optimizer": {"learning_rate": 1e-3},
}


def train(workdir, **changes):
  """Trains to the end and returns the result and the messages."""
  display = Listener()
  result = gtpo_jax.train(
    freeze({**CONFIG, **changes}), workdir, display, lambda: False, reward=even, data=ADDITIONS
  )
  return result, display.said


def logs(workdir, step=STEPS):
  """Returns the logs without timing metrics, and the digests of a checkpoint, the last one."""
  record = (
    (workdir / "checkpoints" / str(step) / "integrity_record").read_bytes().partition(b"\n")[2]
  )
  return {
    "metrics": lasting(read_jsonl(workdir / "metrics.jsonl")),
    "samples": read_jsonl(workdir / "samples.jsonl"),
    "evaluations": read_jsonl(workdir / "evaluations.jsonl"),
    "credit": [read_credit(file).step for file in credit_files(workdir).values()],
    "leaves": json.loads(record)["leaves"],
  }
