"""The problems to train and evaluate on: tasks, files, limits."""

import json
from pathlib import Path

import pytest
from toys import config_of

from gtpo_jax.data.records import Problem, user
from gtpo_jax.logs.display import Display
from gtpo_jax.loop import train
from gtpo_jax.loop.inputs import resolve_inputs
from gtpo_jax.rollout.problems import (
  eval_label,
  held_out_problems,
  source_labels,
  training_problems,
)
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.sandbox import bubblewrap


def sums(path, rows):
  path.write_text(
    "".join(
      json.dumps({"prompt": f"{a}+{b}:", "answer": a + b, "kind": "last_number"}) + "\n"
      for a, b in rows
    )
  )
  return str(path)


@pytest.fixture
def files(tmp_path):
  train_file = sums(tmp_path / "train.jsonl", [(a, b) for a in range(10, 20) for b in range(1, 9)])
  return train_file, sums(tmp_path / "test.jsonl", [(a, 9) for a in range(10, 20)])


def test_weights_messages_and_the_held_out_sample(files):
  said = []
  config = config_of(
    **{"data.train": f"{files[0]}*3,{files[1]}*1", "data.eval": files[1], "eval.problems": 4}
  )
  worker = RolloutWorker(config)
  parts = training_problems(config, worker, said.append)
  assert [(len(problems), weight) for problems, weight in parts] == [(80, 3.0), (10, 1.0)]
  assert said == [f"{files[0]}: 80 problems of 80 rows", f"{files[1]}: 10 problems of 10 rows"]
  some = held_out_problems(config, worker)
  assert len(some) == 4 and some == held_out_problems(
    config_of(**{"seed": 9, "data.train": files[0], "data.eval": files[1], "eval.problems": 4}),
    worker,
  )


def test_prompts_get_the_template_and_the_system_message():
  problem = Problem("x", user("1+1"), "2", "math")
  decode = lambda worker: worker.chat.tokenizer.decode(worker.encode(problem))
  plain = decode(RolloutWorker(config_of()))
  assert "1+1" in plain and plain.endswith("<|im_start|>assistant\n")
  put = decode(RolloutWorker(config_of(**{"data.template": "12{prompt}34", "data.system": "56"})))
  assert "121+134" in put and put.index("56") < put.index("121+134") and "system" in put
  assert (
    decode(RolloutWorker(config_of(**{"data.chat": False, "data.template": "{prompt}="}))) == "1+1="
  )
  own = Problem(
    "x", ({"role": "system", "content": "7"}, {"role": "user", "content": "1"}), "2", "math"
  )
  worker = RolloutWorker(config_of(**{"data.system": "56"}))
  assert "56" not in worker.chat.tokenizer.decode(worker.encode(own))


def test_prompts_that_are_too_long_count_as_bad_rows(tmp_path):
  rows = [
    {"prompt": "1+1:", "answer": 2, "kind": "last_number"},
    {"prompt": "1+" * 40 + "1:", "answer": 41, "kind": "last_number"},
  ]
  (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  name = str(tmp_path / "d.jsonl")
  said = []
  with pytest.raises(
    UserError, match=r"1 of 2 prompts \(first .*d.jsonl:2\) are over data.max_prompt_tokens = 32"
  ):
    training_problems(
      config_of(**{"data.train": name, "data.eval": name}), RolloutWorker(config_of())
    )
  config = config_of(**{"data.train": name, "data.eval": name, "data.bad_rows": 1})
  ((problems, _),) = training_problems(config, RolloutWorker(config), said.append)
  assert len(problems) == 1 and said == [
    f"{name}: 2 problems of 2 rows, 1 too long (first {name}:2)"
  ]


def test_without_other_problems_a_tenth_of_a_file_is_held_out(tmp_path):
  """As from Python: the same tenth in every run, and never trained on."""
  rows = [{"prompt": f"{i}+1:", "answer": str(i + 1)} for i in range(40)]
  name = str(tmp_path / "d.jsonl")
  (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  said = []
  config = config_of(**{"data.train": name})
  worker = RolloutWorker(config)
  ((train, _),) = training_problems(config, worker, said.append)
  held_out = held_out_problems(config, worker, said.append)
  assert said == [
    f"{name}: 36 problems of 40 rows",
    f"{name} (a tenth, held out): 4 problems of 4 rows",
  ]
  assert {x.id for x in train} | {x.id for x in held_out} == {f"d.jsonl:{i}" for i in range(1, 41)}
  again = config_of(**{"data.train": name, "seed": 7})
  assert held_out_problems(again, worker) == held_out
  inputs = resolve_inputs(config_of(), data=rows)
  from_python = inputs.records[inputs.config.data.eval].problems
  assert {x.answer for x in from_python} == {x.answer for x in held_out}
  named = config_of(**{"data.train": name, "data.eval": name})
  assert named.data.eval_name != config.data.eval_name
  mixed = config_of(**{"data.train": f"{name}*1,sums*1", "eval.problems": 8})
  assert [x.source for x in held_out_problems(mixed, worker)] == ["d"] * 4 + ["sums"] * 4
  with pytest.raises(UserError, match="holds 1 problem, so none can be held out"):
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    training_problems(config_of(**{"data.train": str(tmp_path / "one.jsonl")}), worker)


def test_a_conversation_that_the_template_rejects_is_a_malformed_row(tmp_path, monkeypatch):
  rows = [
    {"prompt": "1+1:", "answer": 2},
    {"prompt": [{"role": "tool", "content": "1+1:"}], "answer": 2},
  ]
  name = str(tmp_path / "d.jsonl")
  (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  worker = RolloutWorker(config_of())
  template = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
  monkeypatch.setattr(
    worker.chat.tokenizer, "chat_template", template + "{{ messages[0].content }}"
  )
  changes = {"data.train": name, "data.eval": name}
  with pytest.raises(UserError, match=r"d.jsonl:2: the chat template of .* rejects this .*: no"):
    training_problems(config_of(**changes), worker)
  said = []
  ((problems, _),) = training_problems(
    config_of(**changes, **{"data.bad_rows": 1}), worker, said.append
  )
  assert len(problems) == 1 and f"1 skipped, first {name}:2: the chat template" in said[0]


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_that_were_rendered_beforehand_are_told(chat, tmp_path):
  prompts = ["1+1:", "<|im_start|>user\n1+1:", "<|im_start|>user\n1+2:"]
  rows = [{"prompt": prompt, "answer": 2} for prompt in prompts]
  name = str(tmp_path / "d.jsonl")
  (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  said = []
  config = config_of(**{"data.train": name, "data.eval": name, "data.chat": chat})
  training_problems(config, RolloutWorker(config), said.append)
  assert said[0].startswith(f"{name}: 2 prompt(s) contain control tokens, which stay plain")
  assert f"(first {name}:2: '<|im_start|>'); if they were rendered" in said[0]


def test_a_kind_without_a_verifier_is_refused(tmp_path):
  (tmp_path / "d.jsonl").write_text('{"prompt": "q", "answer": "1", "kind": "poetry"}\n')
  config = config_of(**{"data.train": str(tmp_path / "d.jsonl"), "data.eval": "sums"})
  with pytest.raises(UserError, match="is of kind 'poetry', which has no verifier; valid are"):
    training_problems(config, RolloutWorker(config))


def test_a_users_verifier_accepts_any_kind(tmp_path):
  (tmp_path / "d.jsonl").write_text('{"prompt": "q", "answer": "1", "kind": "poetry"}\n')
  config = config_of(
    **{
      "data.train": str(tmp_path / "d.jsonl"),
      "data.eval": "sums",
      "reward.verifier": "test_scoring:sometimes",
    }
  )
  ((problems, _),) = training_problems(config, RolloutWorker(config))
  assert problems[0].kind == "poetry"


PROGRAM = {"task_id": 1, "text": "Write f.", "test_list": ["assert f() == 1"]}


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path):
  """A PATH without bwrap."""
  caches = (bubblewrap.sandbox_problem, bubblewrap._sandbox_command)
  for cached in caches:
    cached.cache_clear()
  monkeypatch.setenv("PATH", str(tmp_path))
  yield
  for cached in caches:
    cached.cache_clear()


def test_programs_need_a_sandbox_or_permission(tmp_path, no_bubblewrap):
  (tmp_path / "d.jsonl").write_text(json.dumps(PROGRAM) + "\n")
  changes = {
    "data.train": str(tmp_path / "d.jsonl"),
    "data.eval": "sums",
    "data.max_prompt_tokens": 64,
  }
  config = config_of(**changes)
  with pytest.raises(
    UserError,
    match="has programs to run, but there is no sandbox here: bwrap is not installed: install ",
  ):
    train(config, tmp_path / "run", Display(enabled=False))
  assert not (tmp_path / "run").exists()
  config = config_of(**changes, **{"reward.unsandboxed": True})
  said = []
  worker = RolloutWorker(config)
  ((problems, _),) = training_problems(config, worker, said.append)
  assert said[0].startswith("DANGER: reward.unsandboxed is set")
  programs = ["def f(): return 1", "def f(): return 2"]
  assert RewardManager(config).verify([problems[0]] * 2, programs) == [1.0, 0.0]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"data.train": "x.jsonl", "data.eval": "sums", "warm_start.steps": 5},
      "no file or folder at 'x.jsonl'",
    ),
    ({"data.train": "sumz"}, "unknown task 'sumz' in data, did you mean 'sums'"),
    ({"data.train": "a.jsonl*0,b.jsonl*1", "data.eval": "sums"}, "with weights above 0"),
    ({"data.train": "a.jsonl,b.jsonl", "data.eval": "sums"}, "with weights above 0"),
    ({"data.template": "no place"}, r"data.template must contain \{prompt\}, got 'no place'"),
  ],
)
def test_configs_that_cannot_work(changes, message):
  with pytest.raises(UserError, match=message):
    config_of(**changes)


def test_labels_of_metrics():
  labels = {
    "sums": "sums",
    "/data/gsm8k_test.jsonl.gz": "gsm8k_test",
    "hf:openai/gsm8k:main:test": "hf_openai_gsm8k_main_test",
  }
  for name, label in labels.items():
    assert eval_label(config_of(**{"data.eval": name})) == label


@pytest.mark.skipif(
  not (Path(__file__).parents[3] / "shared" / "data").is_dir(), reason="the real data is not here"
)
def test_the_real_gsm8k():
  folder = Path(__file__).parents[3] / "shared" / "data"
  config = config_of(
    **{
      "data.train": str(folder / "gsm8k_train.jsonl.gz"),
      "data.eval": str(folder / "gsm8k_test.jsonl.gz"),
      "data.max_prompt_tokens": 1024,
      "sampling.max_tokens": 64,
    }
  )
  worker = RolloutWorker(config)
  ((problems, _),) = training_problems(config, worker)
  assert len(problems) == 7473 and len(held_out_problems(config, worker)) == 500


def test_problems_of_several_sources_are_labelled(files):
  said = []
  config = config_of(
    **{
      "data.train": f"sums*1,{files[0]}*1,{files[1]}*1",
      "data.eval": f"sums, countdown,{files[1]}",
      "eval.problems": 8,
    }
  )
  worker = RolloutWorker(config)
  parts = training_problems(config, worker, said.append)
  assert [problems[0].source for problems, _ in parts] == ["sums", "train", "test"]
  held_out = held_out_problems(config, worker, said.append)
  assert [problem.source for problem in held_out] == ["sums"] * 3 + ["countdown"] * 3 + ["test"] * 2
  assert eval_label(config) == "all"
  assert said[-1] == "8 problems of 3 sources are evaluated (eval.problems)"
  one = config_of(**{"data.train": files[0], "data.eval": files[1]})
  ((problems, _),) = training_problems(one, RolloutWorker(one))
  assert problems[0].source == "" and held_out_problems(one, RolloutWorker(one))[0].source == ""


def test_labels_of_sources():
  names = ["rg:gcd?seed=1", "rg:gcd?seed=2", "a/b.jsonl", "tfds:x/y", "rg:gcd"]
  assert source_labels(names) == ["rg:gcd", "rg:gcd-2", "b", "tfds_x_y", "rg:gcd-3"]
  assert source_labels(["sums"]) == [""]


def test_fewer_problems_than_sources_are_refused():
  with pytest.raises(UserError, match=r"eval\.problems = 1 is below the number of sources"):
    config_of(**{"data.train": "sums", "data.eval": "sums,countdown", "eval.problems": 1})
