"""Mistakes and malformed input: each ends with one line of advice, and writes nothing."""

import json
import shutil
from pathlib import Path

import pytest

from gtpo_jax import cli
from gtpo_jax.cli import commands, processes

ROOT = Path(__file__).parents[1]
ROWS = [{"prompt": f"{i}+{i}:", "answer": str(2 * i), "kind": "last_number"} for i in range(1, 6)]
FILES = {
  "train.jsonl": ROWS,
  "test.jsonl": ROWS[:2],
  "questions.jsonl": [{"instruction": "1+1:", "output": "2"}],
  "poems.jsonl": [{**ROWS[0], "kind": "poem"}],
  "long.jsonl": [{"prompt": "1+" * 40, "answer": "40", "kind": "last_number"}],
  "demos.jsonl": [{"prompt": "1+1:", "completion": "1+1=2"}],
  "answers.jsonl": [{"prompt": "1+1:", "response": "1+1=2"}],
  "essays.jsonl": [{"prompt": "1+1:", "completion": "well, " * 60}],
}
REWARDS = """import json

numbers = 3


def graded(prompts, completions, answers, extras):
  return [0.0] * len(completions)


def of_trl(completions, answer, **kwargs):
  return [0.0] * len(completions)
"""


# By name: the bytes of problems that are malformed, and the body of a config.
BAD_DATA = {
  "garbage.jsonl": b"\x80\x81\xff" * 50,
  "no_json.jsonl": b'{"problem": "1+1?", "answer": "2"}\n{\'problem\': 1}\n',
  "no_answer.jsonl": b'{"problem": "1?"}\n',
  "empty.jsonl": b"",
  "array.jsonl": b"[1, 2]\n",
  "cut.jsonl": b'{"problem": "1+1?", "answer": "2"}\n{"problem": ',
  "null.jsonl": b'{"problem": null, "answer": "2"}\n',
  "no.parquet": b"PAR1 and no more",
}
BAD_CONFIGS = {
  "syntax": "config = = 3",
  "raises": "1 / 0",
  "exits": "raise SystemExit('no')",
  "dict": "return {'steps': 3}",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """What a user has after an hour: problems, demonstrations, rewards, a run and an export."""
  for name, rows in FILES.items():
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
  for name, content in BAD_DATA.items():
    (tmp_path / name).write_bytes(content)
  for name, line in BAD_CONFIGS.items():
    (tmp_path / f"{name}.py").write_text(f"def get_config():\n  {line}\n")
  (tmp_path / "train.json").write_text(json.dumps(ROWS))
  (tmp_path / "my_mistaken_rewards.py").write_text(REWARDS)
  (tmp_path / "mine.py").write_text("config = {}\n")
  (tmp_path / "run" / "base" / "0").mkdir(parents=True)
  (tmp_path / "run" / "config.json").write_text('{"seed": 5}')
  shutil.copytree(ROOT / "gtpo_jax" / "data" / "tokenizer", tmp_path / "hf")
  (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
  (tmp_path / "cut").mkdir()
  (tmp_path / "cut" / "config.json").write_text("{")
  (tmp_path / "broken" / "base" / "0").mkdir(parents=True)
  (tmp_path / "broken" / "config.json").write_text('{"seed": ')
  monkeypatch.chdir(tmp_path)
  for module in (commands, processes):
    monkeypatch.setattr(module, "prepare_jax", lambda: None)  # JAX is already running here
  return tmp_path


def train(*overrides, config="tiny", workdir="new"):
  fields = [f"--config.{override}" for override in overrides]
  return ["train", f"--config={config}", f"--workdir={workdir}", *fields]


def own(*overrides, file="train.jsonl"):
  """A run on a file of the user's own."""
  data = (f"data.train={file}", "data.eval=test.jsonl", "warm_start.steps=0")
  return train(*data, *overrides)


def imitate(file, *overrides):
  return own("warm_start.steps=5", f"warm_start.data={file}", *overrides)


# The arguments after `gtpo`, and what the line says to do.
MISTAKES = {
  "a misspelt command": (["trian"], "did you mean 'train'?"),
  "a misspelt option": (["train", "--confg=tiny"], "did you mean '--config'?"),
  "no workdir": (["train", "--config=tiny"], "required: --workdir"),
  "a misspelt config": (train(config="tinny"), "did you mean 'tiny'?"),
  "a config of the clone, elsewhere": (train(config="configs/tiny.py"), "--config=tiny names"),
  "a config that does not exist": (
    train(config="nothing.py"),
    "`gtpo configs` lists the shipped ones",
  ),
  "a config without get_config": (train(config="mine.py"), "get_config"),
  "a misspelt config to print": (["configs", "tinny"], "did you mean 'tiny'?"),
  "a field without its section": (train("learning_rate=1"), "'optimizer.learning_rate'"),
  "a misspelt field": (train("batch.grup=4"), "did you mean 'batch.group'?"),
  "a field without equals": (
    ["train", "--config=tiny", "--workdir=new", "--config.steps", "5"],
    "--config.steps=VALUE",
  ),
  "text as a number": (train("steps=many"), "steps"),
  "a misspelt algorithm": (train("algorithm.name=GTPO"), "did you mean 'gtpo'?"),
  "a group of one": (train("batch.group=1"), "batch.group must be at least 2, got 1"),
  "greedy sampling": (train("sampling.temperature=0"), "must be above 0 while learning"),
  "a batch that does not divide": (train("batch.micro_batches=3"), "is not a multiple of"),
  "a large model without weights": (train(config="qwen2_5_7b_gtpo"), "set model.path to"),
  "a model that is not here": (own("model.path=hf/none"), "no folder at 'hf/none'"),
  "a run as a model": (own("model.path=run"), "gtpo export"),
  "an incomplete model": (own("model.path=hf"), "config.json"),
  "one traced step": (train("profile.steps=5"), "two steps, such as 3:5"),
  "a json file": (own(file="train.json"), "write one JSON object per line instead"),
  "a file that is not here": (own(file="tain.jsonl"), "no file or folder at 'tain.jsonl'"),
  "other columns": (own(file="questions.jsonl"), "set data.fields to the columns of prompt and"),
  "fields without an answer": (
    own("data.fields=prompt=instruction", file="questions.jsonl"),
    "prompt=question,answer=answer",
  ),
  "an unknown kind": (
    own(file="poems.jsonl"),
    "valid are last_number, countdown, forks, sentence, exact",
  ),
  "prompts that are too long": (own(file="long.jsonl"), "data.max_prompt_tokens = 24"),
  "a template without a prompt": (own("data.template=Think."), "must contain {prompt}"),
  "own data without demonstrations": (own("warm_start.steps=5"), "set warm_start.data to a file"),
  "demonstrations without steps": (
    own("warm_start.data=demos.jsonl"),
    "effect with warm_start.steps",
  ),
  "demonstrations in other columns": (imitate("answers.jsonl"), "no column 'completion'"),
  "demonstrations that are too long": (imitate("essays.jsonl"), "sampling.max_tokens = 36"),
  "demonstrations that are not here": (imitate("demo.jsonl"), "no file or folder at 'demo.jsonl'"),
  "a reward with a dot": (own("reward.verifier=my_mistaken_rewards.graded"), "module:function"),
  "a reward that is not here": (own("reward.verifier=my_rewads:f"), "cannot be imported"),
  "a reward with the parameters of TRL": (
    own("reward.verifier=my_mistaken_rewards:of_trl"),
    "takes (completions, answer, **kwargs), but is called as function(prompts, completions",
  ),
  "a part with a dot": (
    own("reward.parts=correct,my_mistaken_rewards.graded"),
    "is not named as module:function, such as my_mistaken_rewards:graded",
  ),
  "a reward that is no function": (
    own("reward.verifier=my_mistaken_rewards:numbers"),
    "is of type int and cannot be called",
  ),
  "a misspelt part": (
    own("reward.parts=correct,boxd*0.1"),
    "is none of correct, verifier, judge, env, boxed",
  ),
  "a graded reward without correct": (
    own("reward.parts=my_mistaken_rewards:graded"),
    "use reward.parts=correct,my_mistaken_rewards:graded",
  ),
  "a weight of correct": (
    own("reward.parts=correct*2,my_mistaken_rewards:graded"),
    "reward.parts=correct*1,my_mistaken_rewards:graded*0.5",
  ),
  "a judge without a model": (
    own("reward.judge.base_url=http://127.0.0.1:9/v1"),
    "needs reward.judge.model too",
  ),
  "a judge that is not there": (
    own("reward.judge.base_url=http://127.0.0.1:9/v1", "reward.judge.model=m"),
    "check reward.judge.base_url and that the server is running",
  ),
  "the workdir of another run": (train(workdir="run"), "name another workdir"),
  "a file as workdir": (train(workdir="mine.py"), "name a folder"),
  "an export of a run without a checkpoint": (
    ["export", "--workdir=run", "--out=out"],
    "no checkpoint",
  ),
  "an export of an export": (["export", "--workdir=hf", "--out=out"], "already a Hugging Face"),
  "an evaluation of a folder without problems": (["eval", "--model=hf"], "give --config=FILE"),
  "a report of an empty folder": (["report", "--workdir=none", "--out=r.html"], "gtpo train"),
  "a slice without a shape": (["plan", "--config=tiny", "--topology=v5p"], "v5p:4x4x4"),
  "GPUs without a number": (["plan", "--config=tiny", "--topology=h100"], "for example h100:8"),
  # malformed input
  "a syntax error in a config": (train(config="syntax.py"), "config syntax.py raised SyntaxError"),
  "a config that raises": (train(config="raises.py"), "division by zero"),
  "a config that exits": (train(config="exits.py"), "config exits.py raised SystemExit"),
  "a config that is a dict": (train(config="dict.py"), "must return a ConfigDict, got dict"),
  "a reward part without a weight": (train("reward.parts=correct*x"), "got 'correct*x'"),
  **{name: (own(file=name), name) for name in BAD_DATA},
  "a truncated model config": (own("model.path=cut"), "is not valid JSON"),
  "a missing guide": (
    train("algorithm.name=dapo_mixed", "guide.path=no/such/model"),
    "no folder at 'no/such/model'",
  ),
  "a damaged config of a run": (train(workdir="broken"), "broken/config.json' is not valid JSON"),
  # options and devices
  "no config": (["train", "--workdir=w"], "required: --config"),
  "a folder as config": (train(config="run"), "--config=run is a folder; name a file in it"),
  "a section as a field": (train("mesh=3"), "'mesh' is a section; set one of its fields"),
  "three devices of eight": (
    train("mesh.data=3"),
    "a mesh of data 3 x expert 1 x fsdp 1 x context 1 x tensor 1 does not fit 8 device(s)",
  ),
  "two axes for the rest": (train("mesh.tensor=-1"), "only one mesh axis may be -1"),
  "positions that do not divide": (
    train("mesh.context=8", "sampling.max_tokens=42"),
    "sampling.max_tokens = 42 is not a multiple of mesh.context x mesh.tensor = 8",
  ),
  "a workdir that cannot be written": (
    train(workdir="/proc/none"),
    "cannot write into workdir '/proc/none'",
  ),
}
# The same of commands that read a run, {run}.
OF_A_RUN = {
  "a model that is not here": (["sample", "--model=none", "--prompt=1"], "no folder at 'none'"),
  "a negative seed": (
    ["sample", "--model={run}", "--prompt=1", "--seed=-1"],
    "--seed must be in [0, 2**32), got -1",
  ),
  "results in no folder": (
    ["eval", "--model={run}", "--json=none/out.json"],
    "cannot write 'none/out.json'",
  ),
  "completions in no folder": (
    ["eval", "--model={run}", "--completions=none/out.jsonl"],
    "cannot write 'none/out.jsonl'",
  ),
  "problems that are not here": (
    ["eval", "--model={run}", "--data=none.jsonl"],
    "no file or folder at 'none.jsonl'",
  ),
  "a misspelt task": (
    ["eval", "--model={run}", "--data=sumz"],
    "unknown task 'sumz' in data, did you mean 'sums'?",
  ),
  "an empty prompt": (["sample", "--model={run}", "--prompt= "], "--prompt is empty"),
  "an empty stop string": (
    ["sample", "--model={run}", "--prompt=1", "--stop="],
    "--stop must be a tuple of at most 16 non-empty strings",
  ),
  "a long prompt": (["sample", "--model={run}", "--prompt=" + "1+" * 30], "over the limit of 24"),
  "a missing step": (
    ["sample", "--model={run}", "--prompt=1", "--step=9"],
    "no checkpoint of step 9",
  ),
  "too much mass": (
    ["sample", "--model={run}", "--prompt=1", "--top_p=2"],
    "sampling.top_p must be in (0, 1], got 2.0",
  ),
  "a number of samples in letters": (
    ["eval", "--model={run}", "--k=a"],
    "--k must be whole numbers",
  ),
}


def contents(folder):
  """Returns the bytes of all files by path, and None for folders."""
  return {
    str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
    for path in sorted(folder.rglob("*"))
    if "__pycache__" not in path.parts
  }


def check_mistake(arguments, advice, folder, capfd):
  before = contents(folder)
  assert cli.main(arguments) == 2, capfd.readouterr()
  out, error = capfd.readouterr()
  lines = error.strip().splitlines()
  assert len(lines) == 1, (out, error)
  assert lines[0].startswith("gtpo: ")
  assert advice in lines[0]
  assert contents(folder) == before


@pytest.mark.devices
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_a_line_that_says_what_to_do(mistake, folder, capfd):
  check_mistake(*MISTAKES[mistake], folder, capfd)


@pytest.mark.parametrize("mistake", OF_A_RUN)
def test_a_mistake_with_a_run(mistake, folder, finished_run, capfd):
  arguments, advice = OF_A_RUN[mistake]
  arguments = [argument.format(run=finished_run[0]) for argument in arguments]
  check_mistake(arguments, advice, folder, capfd)
