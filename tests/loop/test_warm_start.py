"""Warm starts on demonstrations: what they imitate, and a base model that answers as they do."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import gtpo_jax
from gtpo_jax.config import freeze
from gtpo_jax.data.demonstration_rows import load_demonstrations
from gtpo_jax.logs.display import Display
from gtpo_jax.loop.warm_start import demonstrations, make_teacher
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

ROWS = [
  {"prompt": f"{word}:", "completion": word[::-1]} for word in ("abc", "tree", "house", "cloud")
]
SHAPE = {
  "steps": 1,
  "data": {"max_prompt_tokens": 16},
  "sampling": {"max_tokens": 12},
  "batch": {"prompts": 8, "group": 2},
  "eval": {"problems": 4, "samples": 2, "batch": 4, "every": 0},
}


def config_of(**warm_start):
  return freeze({**SHAPE, "warm_start": {"steps": 2, "data": "records:mine", **warm_start}})


def teacher_of(rows, config):
  loaded = load_demonstrations("mine", config.warm_start.columns, config.data.bad_rows, rows)
  said = []
  worker = RolloutWorker(config)
  teacher = make_teacher(config, worker, said.append, {"records:mine": loaded})
  return worker, teacher, said


def test_the_arrays_are_the_demonstrations():
  config = config_of(batch=8)
  worker, teacher, said = teacher_of(ROWS, config)
  assert said == ["records:mine: 4 demonstrations of 4 rows"]
  assert teacher.name == "4 demonstrations of records:mine"
  batch = jax.device_get(demonstrations(config, worker, teacher, np.random.default_rng(0), 3))
  assert batch.tokens.shape == (3, 8, 12)
  seen = set()
  for prompt, length, tokens, mask in zip(
    batch.prompts.tokens.reshape(-1, 16),
    batch.prompts.lengths.reshape(-1),
    batch.tokens.reshape(-1, 12),
    batch.mask.reshape(-1, 12),
    strict=True,
  ):
    completion = tokens[mask]
    assert completion[-1] == worker.chat.tokenizer.eos_token_id
    text = worker.chat.tokenizer.decode(prompt[len(prompt) - length :])
    (answer,) = worker.chat.decode([completion])
    seen.add((next(row["prompt"] for row in ROWS if row["prompt"] in text), answer))
  assert seen == {(row["prompt"], row["completion"]) for row in ROWS}


def test_no_demonstration_is_dropped_and_no_character_changed(tmp_path):
  """Nine of ten stay nine of ten; a base model learns the spaces and line ends too."""
  rows = [{"prompt": "3+4=", "completion": " 7\n"}] * 9 + [{"prompt": "3+4=", "completion": "3 "}]
  rows += [{"prompt": "s", "completion": "\t"}, {"prompt": "n", "completion": 7}]
  file = tmp_path / "demos.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  plain = dataclasses.replace(config_of().data, chat=False)
  config = dataclasses.replace(config_of(), data=plain)
  _, teacher, said = teacher_of(rows, config)
  assert said == ["records:mine: 12 demonstrations of 12 rows"]
  from_file = load_demonstrations(str(file), config.warm_start.columns)
  answers = [" 7\n"] * 9 + ["3 ", "\t", "7"]
  assert [problem.answer for problem in from_file.problems] == answers
  worker = RolloutWorker(config)
  drawn = teacher.draw(np.random.default_rng(0), 600)
  texts = [worker.chat.tokenizer.decode(pair.completion[:-1]) for pair in drawn]
  assert set(texts) == set(answers)
  assert 400 < texts.count(" 7\n") < 500  # 450 of 600 on average
  for bad, message in (("", "has no completion: ''"), (None, "has no completion: None")):
    with pytest.raises(UserError, match=message):
      teacher_of([{"prompt": "a", "completion": bad}], config)
  with pytest.raises(UserError, match="'mine' contains no demonstration \\(0 rows\\)"):
    teacher_of([], config)


def test_other_columns():
  rows = [{"question": row["prompt"], "solution": row["completion"]} for row in ROWS]
  _, teacher, _ = teacher_of(rows, config_of(fields="prompt=question,completion=solution"))
  _, expected, _ = teacher_of(ROWS, config_of())
  draw = lambda teacher: teacher.draw(np.random.default_rng(3), 20)
  assert draw(teacher) == draw(expected)


CALL = {"function": {"name": "add", "arguments": '{"x": "4+3"}'}}
TURNS = [
  {"role": "assistant", "content": None, "tool_calls": [CALL]},
  {"role": "tool", "content": "7<|im_end|>"},
  {"role": "assistant", "content": "It is 7."},
]


def test_of_several_turns_only_those_of_the_assistant_are_imitated():
  config = freeze({**SHAPE, "warm_start": {"steps": 2, "data": "records:mine", "batch": 2}})
  config = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, max_tokens=60))
  rows = [{"prompt": "4+3:", "completion": turns} for turns in (TURNS, TURNS[2:])]
  worker, teacher, _ = teacher_of(rows, config)
  decode = worker.chat.tokenizer.decode
  texts = set()
  for prompt, completion, drawn in teacher.draw(np.random.default_rng(0), 20):
    assert decode(prompt).endswith("4+3:<|im_end|>\n<|im_start|>assistant\n")
    own = [token for token, is_drawn in zip(completion, drawn, strict=True) if is_drawn]
    texts.add((decode(completion), decode(own), len(worker.chat.controls(completion))))
  last = "It is 7.<|im_end|>"
  between = "\n<|im_start|>tool\n7<|im_end|><|im_end|>\n<|im_start|>assistant\n"
  # The package's own template does not show calls, so the first turn is empty.
  assert texts == {(f"<|im_end|>{between}{last}", f"<|im_end|>{last}", 5), (last, last, 1)}


def test_turns_that_cannot_be_imitated_are_malformed_rows():
  config = config_of(batch=2)
  for turns, message in (
    ([], "does not begin and end with a turn of the assistant"),
    (TURNS[:2], "does not begin and end with a turn of the assistant"),
    ([TURNS[2], TURNS[2]], "two turns of the assistant and nothing between"),
    ([{"role": "robot", "content": "x"}], "a message of a role which is none of system"),
    ([{"role": "assistant", "content": ""}], "a message of the assistant without text"),
    ([{**TURNS[0], "tool_calls": [{"function": {}}]}], "a call that has no name"),
    ([{**TURNS[0], "tool_calls": [{"name": "f", "arguments": 3}]}], "arguments are not an object"),
  ):
    with pytest.raises(UserError, match=message):
      teacher_of([{"prompt": "4+3:", "completion": turns}], config)


def test_demonstrations_that_are_too_long_are_refused_or_left_out():
  long = {"prompt": "long:", "completion": "x y " * 9}
  with pytest.raises(UserError) as error:
    teacher_of([ROWS[0], long], config_of())
  assert "1 of 2 demonstrations are too long, the first is mine[1]" in str(error.value)
  assert "(sampling.max_tokens = 12); raise these, or data.bad_rows" in str(error.value)
  allowed = dataclasses.replace(config_of(), data=dataclasses.replace(config_of().data, bad_rows=1))
  _, teacher, _ = teacher_of([ROWS[0], long], allowed)
  assert teacher.name.startswith("1 demonstrations")
  with pytest.raises(UserError, match="1 of 1 demonstrations are too long"):
    teacher_of([long], allowed)


@pytest.mark.manual
def test_a_base_model_answers_as_the_demonstrations_do(tmp_path):
  """From random weights; then the run learns on the same words, by command line and in Python."""
  demos = tmp_path / "demos.jsonl"
  demos.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  problems = [{"prompt": r["prompt"], "answer": r["completion"], "kind": "exact"} for r in ROWS]
  config = {**SHAPE, "warm_start": {"steps": 300}, "batch": {"prompts": 8, "group": 4}}
  from_file = {**config, "warm_start": {"steps": 300, "data": str(demos)}}
  for settings, given in ((from_file, {}), (config, {"demonstrations": ROWS})):
    display = Display(enabled=False)
    result = gtpo_jax.train(settings, display=display, data=problems, held_out=problems, **given)
    accuracy = next(
      v for k, v in result.history[0].items() if k.startswith("eval/") and "mean" in k
    )
    assert accuracy > 0.9
    assert "warm-started base model" in result.summary
