"""The ready evaluations: each loads for chat and base models, and builds its problems from files of the layout that it names."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gtpo_jax.checkpoint.manager import Checkpoints
from gtpo_jax.checkpoint.workdir import claim
from gtpo_jax.config import Config, MeshSection, ModelSection, load
from gtpo_jax.models.qwen2 import init_params
from gtpo_jax.rollout.policies import find_policy
from gtpo_jax.rollout.problems import eval_label, held_out_problems
from gtpo_jax.rollout.worker import RolloutWorker, Stream, key_for
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("eval_*.py"))

# A row of each layout, a right completion, a wrong one.
ROWS = {
  "eval_gsm8k": (
    {"question": "Tom has 3 eggs and buys 4.", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    r"\boxed{7}",
    r"\boxed{8}",
  ),
  "eval_math500": (
    {
      "problem": r"Simplify $\frac{2}{4}$.",
      "solution": "s",
      "answer": r"\frac{1}{2}",
      "subject": "Algebra",
      "level": 1,
      "unique_id": "test/algebra/1.json",
    },
    r"\boxed{0.5}",
    r"\boxed{2}",
  ),
  "eval_aime24": (
    {"id": 60, "problem": "Find it.", "solution": "s", "answer": "073", "url": "u"},
    r"\boxed{73}",
    r"\boxed{37}",
  ),
  "eval_aime25": ({"problem": "Find it.", "answer": "70", "id": "0"}, r"\boxed{70}", "none"),
  "eval_humaneval": (
    {
      "task_id": "HumanEval/0",
      "prompt": 'def double(x):\n    """Twice x."""\n',
      "entry_point": "double",
      "canonical_solution": "    return 2 * x\n",
      "test": "def check(candidate):\n    assert candidate(3) == 6\n",
    },
    "```python\ndef double(x):\n    return x + x\n```",
    "    return x",
  ),
}
FILES = {
  "eval_gsm8k": ("gsm8k_test", 1319),
  "eval_aime24": ("aime24", 30),
  "eval_humaneval": ("HumanEval", 164),
}


def config_of(name, kind="", **changes):
  more = [f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items()]
  return load(f"{ROOT}/configs/{name}.py{kind}", more)


def test_there_is_one_for_each():
  assert set(CONFIGS) == set(ROWS)
  assert all(
    len((ROOT / "configs" / f"{name}.py").read_text().splitlines()) <= 100 for name in CONFIGS
  )


@pytest.mark.parametrize("kind", [":chat", ":base", ""])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_loads_and_puts_its_problems(name, kind, tmp_path):
  row = ROWS[name][0]
  file = tmp_path / "data.jsonl"
  file.write_text(json.dumps(row) + "\n")
  config = config_of(name, kind, data__eval=file)
  assert config_of(name, kind).eval_name.startswith("hf:") and eval_label(config) == "data"
  worker = RolloutWorker(config)
  (problem,) = held_out_problems(config, worker)
  text = worker.chat.tokenizer.decode(worker.encode(problem))
  question = row.get("question") or row.get("problem") or row["prompt"]
  assert question in text and ("<|im_start|>" in text) == (kind != ":base")
  assert ("boxed{}" in text) == (name != "eval_humaneval")


@pytest.mark.sandbox
@pytest.mark.parametrize("name", CONFIGS)
def test_each_judges_right_and_wrong(name, tmp_path):
  row, right, wrong = ROWS[name]
  file = tmp_path / "data.jsonl"
  file.write_text(json.dumps(row) + "\n")
  config = config_of(name, data__eval=file)
  worker = RolloutWorker(config)
  found = worker.judge(
    held_out_problems(config, worker),
    [[right, wrong]],
    np.array([[9, 9]]),
    np.array([[True, True]]),
  )
  np.testing.assert_array_equal(found.correct, [[True, False]])
  assert found.reached.all()


def test_a_kind_of_model_that_there_is_not():
  with pytest.raises(UserError, match="KeyError: 'chatt'"):
    config_of("eval_gsm8k", ":chatt")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data is not here")
@pytest.mark.parametrize("name", FILES)
def test_the_real_files(name):
  file, count = FILES[name]
  config = config_of(
    name, data__eval=REAL / f"{file}.jsonl.gz", data__max_prompt_tokens=8192
  )  # the small tokenizer's are short
  said = []
  problems = held_out_problems(config, RolloutWorker(config), said.append)
  assert len(problems) == count == config.eval.problems and said == [
    f"{REAL / file}.jsonl.gz: {count} problems of {count} rows"
  ]
  with gzip.open(REAL / f"{file}.jsonl.gz") as lines:
    assert sum(1 for _ in lines) == count


def test_a_run_is_evaluated_by_a_config_that_names_no_model(tmp_path):
  """The run's own model and formats; a config of another model is refused."""
  run = Config(model=ModelSection(lora_rank=2, compute_dtype="bfloat16"))
  with claim(tmp_path, run):
    pass
  params = init_params(RolloutWorker(run).model, key_for(0, Stream.INIT))
  keep = Checkpoints(tmp_path / "base", keep=1)
  keep.save_params(params)
  keep.close()
  found = find_policy(tmp_path, 0, config_of("eval_gsm8k"))
  assert (
    found.config.model == run.model
    and found.config.eval.problems == 1319
    and found.config.mesh == MeshSection()
  )
  assert found.read()[1] == 0
  with pytest.raises(UserError, match="leave --config out, or name the run's"):
    find_policy(tmp_path, 0, config_of("eval_gsm8k", model__preset="qwen2.5-0.5b"))
