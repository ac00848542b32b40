"""The evaluation configs: each loads for chat and base models and reads files in its layout."""

import gzip
import json
from pathlib import Path

import jax
import pytest
from served import small_folder

from gtpo_jax.checkpoint.checkpoints import Checkpoints
from gtpo_jax.checkpoint.workdir import claim
from gtpo_jax.config import Config, MeshSection, ModelSection, load
from gtpo_jax.models.params import init_params
from gtpo_jax.rollout.policies import find_policy
from gtpo_jax.rollout.problems import eval_label, held_out_problems
from gtpo_jax.rollout.scoring.manager import RewardManager
from gtpo_jax.rollout.worker import RolloutWorker
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("eval_*.py"))

# For each config: a row in its layout, a correct completion, an incorrect one.
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
# The real files, with their number of problems, and the columns that only a function could read.
FILES = {
  "eval_gsm8k": ("gsm8k_test", 1319, ""),
  "eval_aime24": ("aime24", 30, ", columns that nothing reads: problem, url"),
  "eval_humaneval": ("HumanEval", 164, ", columns that nothing reads: canonical_solution"),
}


def each(names):
  """Returns test parameters, of which those whose problems are programs need a sandbox."""
  runs_programs = lambda name: "entry_point" in ROWS[name][0]
  return [
    pytest.param(name, marks=pytest.mark.sandbox) if runs_programs(name) else name for name in names
  ]


def config_of(name, kind="", **changes):
  flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items()]
  return load(f"{ROOT}/configs/{name}.py{kind}", flags)


def write_row(folder, row):
  path = folder / "data.jsonl"
  path.write_text(json.dumps(row) + "\n")
  return path


def test_every_config_is_tested_and_short():
  assert set(CONFIGS) == set(ROWS)
  for name in CONFIGS:
    text = (ROOT / "configs" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("kind", [":chat", ":base", ""])
@pytest.mark.parametrize("name", each(CONFIGS))
@pytest.mark.some(5, slow=5)
def test_each_loads_and_encodes_its_problems(name, kind, tmp_path):
  row, _, _ = ROWS[name]
  config = config_of(name, kind, data__eval=write_row(tmp_path, row))
  assert config_of(name, kind).data.eval_name.startswith("hf:")
  assert eval_label(config) == "data"
  worker = RolloutWorker(config)
  (problem,) = held_out_problems(config, worker)
  text = worker.chat.tokenizer.decode(worker.encode(problem))
  question = row.get("question") or row.get("problem") or row["prompt"]
  assert question in text
  assert ("<|im_start|>" in text) == (kind != ":base")
  assert ("boxed{}" in text) == (name != "eval_humaneval")


@pytest.mark.parametrize("name", each(CONFIGS))
def test_each_tells_correct_from_incorrect(name, tmp_path):
  row, correct, incorrect = ROWS[name]
  config = config_of(name, data__eval=write_row(tmp_path, row))
  (problem,) = held_out_problems(config, RolloutWorker(config))
  verdicts = RewardManager(config).verify([problem, problem], [correct, incorrect])
  assert verdicts == [1.0, 0.0]


def test_an_unknown_kind_of_model_is_rejected():
  with pytest.raises(UserError, match="KeyError: 'chatt'"):
    config_of("eval_gsm8k", ":chatt")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data is not on this machine")
@pytest.mark.parametrize("name", each(FILES))
def test_the_real_files(name):
  file, count, unread = FILES[name]
  path = REAL / f"{file}.jsonl.gz"
  # The small tokenizer of the tests makes long prompts.
  config = config_of(name, data__eval=path, data__max_prompt_tokens=8192)
  lines = []
  problems = held_out_problems(config, RolloutWorker(config), lines.append)
  assert len(problems) == count == config.eval.problems
  assert lines == [f"{path}: {count} problems of {count} rows{unread}"]
  with gzip.open(path) as rows:
    assert sum(1 for _ in rows) == count


@pytest.mark.slow
def test_a_config_without_a_model_evaluates_the_runs_model(tmp_path):
  """The run's model and dtypes are used; a config for another model is rejected."""
  run = Config(model=ModelSection(lora_rank=2, compute_dtype="bfloat16"))
  with claim(tmp_path, run):
    pass
  params = init_params(RolloutWorker(run).model, jax.random.key(0))
  checkpoints = Checkpoints(tmp_path / "base", keep=1)
  checkpoints.save_params(params, with_base=True)
  checkpoints.close()
  source = find_policy(tmp_path, 0, config_of("eval_gsm8k"))
  assert source.config.model == run.model
  assert source.config.eval.problems == 1319
  assert source.config.mesh == MeshSection()
  _, step = source.read()
  assert step == 0
  with pytest.raises(UserError, match="leave --config out, or use the run's"):
    find_policy(tmp_path, 0, config_of("eval_gsm8k", model__preset="qwen2.5-0.5b"))


def test_a_folder_has_no_adapters_whatever_the_config_says(tmp_path_factory):
  folder = small_folder(tmp_path_factory)
  overrides = ["--config.model.lora_rank=4", "--config.model.quantize=int8"]
  source = find_policy(folder, None, overrides=overrides)
  architecture = source.worker.model.config
  assert not architecture.lora.rank and not architecture.quantize
  assert source.read()[1] == 0
