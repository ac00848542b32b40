"""What a first hour stumbles over: a misspelt column, and the traceback of a line that says it."""

import traceback

import pytest
from toys import config_of, even

import gtpo_jax
from gtpo_jax.logs.display import Display
from gtpo_jax.rollout.problems import training_problems
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

SMALL = {"data.max_prompt_tokens": 20, "sampling.max_tokens": 4, "reward.verifier": "toys:even"}


def said_about(columns, tmp_path):
  file = tmp_path / f"{columns}.csv"
  file.write_text(f"{columns}\n1+1,2\n1+2,3\n1+3,4\n")
  config = config_of(**SMALL, **{"data.train": f'"{file}"', "data.eval": f'"{file}"'})
  said = []
  training_problems(config, RolloutWorker(config), said.append)
  return [line for line in said if line.startswith("warning")], str(file)


def test_rows_without_answers_are_said(tmp_path):
  ((line,), file) = said_about("prompt,anwser", tmp_path)
  assert line == (
    f"warning: {file}: no row has an answer, so the reward function gets empty ones (columns: "
    "prompt, anwser, did you mean 'anwser'?); data.fields=prompt=COLUMN,answer=COLUMN names "
    "another column"
  )
  assert said_about("prompt,answer", tmp_path)[0] == []


@pytest.mark.parametrize("call", [gtpo_jax.train, lambda *a, **k: next(gtpo_jax.steps(*a, **k))])
def test_an_error_of_the_input_has_no_frames_of_the_library(call):
  rows = [{"promt": "1+1", "answer": "2"}]
  with pytest.raises(UserError) as error:
    call({}, display=Display(enabled=False), data=rows, reward=even)
  shown = "".join(traceback.format_exception(error.value))
  assert "has the columns promt, answer" in shown and shown.count("gtpo_jax/") <= 3
  assert "direct cause" not in shown and "sources.py" not in shown
