"""Rows for an environment, which may lack a prompt and an answer."""

import dataclasses

import pytest
from own_environments import Echo

from gtpo_jax.data.sources import load_records
from gtpo_jax.loop.inputs import resolve_inputs
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

ROWS = [{"level": 1}, {"level": 2}, {"level": 2}, {"level": 3, "prompt": "Go:"}]


def test_an_environment_adds_the_prompt():
  inputs = resolve_inputs({}, data=ROWS, held_out=ROWS, environment=Echo)
  worker = RolloutWorker(inputs.config, environment=inputs.environment)
  ((problems, _),) = training_problems(inputs.config, worker, records=inputs.records)
  assert [problem.row["level"] for problem in problems] == [1, 2, 3]  # two rows are the same
  assert [problem.messages[-1]["content"] for problem in problems] == ["", "", "Go:"]
  assert problems[0].row["answer"] == ""
  text = worker.chat.tokenizer.decode(worker.encode(problems[0], "Play!"))
  assert text == "<|im_start|>user\nPlay!<|im_end|>\n<|im_start|>assistant\n"


def test_other_rows_are_read_as_always():
  known = {"prompt": "1+1=", "answer": "2", "level": 4}
  (problem,) = load_records([known], "rows", needs=()).problems
  (as_always,) = load_records([known], "rows").problems
  assert problem == dataclasses.replace(as_always)
  with pytest.raises(UserError, match="has the columns level, no known layout"):
    load_records(ROWS, "rows")
