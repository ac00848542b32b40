"""Malformed input gives status 2 and one line with the value; no traceback, no file written."""

import json
import shutil
from pathlib import Path

import pytest

from gtpo_jax import cli
from gtpo_jax.cli import commands

ROOT = Path(__file__).parents[1]
CONFIG = """from gtpo_jax.config import default_config


def get_config():
  config = default_config()
  {line}
  return config
"""
MODEL = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "vocab_size": 512,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
  "tie_word_embeddings": True,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "rope_theta": 1e6,
}
ROW = b'{"problem": "1+1?", "answer": "2"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of configs, data, models and runs that are each malformed in one way."""
  (tmp_path / "data").mkdir()
  for name, content in {
    "garbage": b"\x80\x81\xff" * 50,
    "no_json": ROW + b"{'problem': 1}\n",
    "no_answer": b'{"problem": "1?"}\n',
    "empty": b"",
    "array": b"[1, 2]\n",
    "cut": ROW + ROW[:12],
    "good": ROW * 4,
    "null": b'{"problem": null, "answer": "2"}\n',
  }.items():
    (tmp_path / "data" / f"{name}.jsonl").write_bytes(content)
  (tmp_path / "data" / "no.parquet").write_bytes(b"PAR1 and no more")
  for name, line in {
    "syntax": "config.steps = = 3",
    "raises": "1 / 0",
    "unknown": "config.batch.promts = 3",
    "type": "config.steps = 'x'",
    "dict": "return {'steps': 3}",
    "exits": "raise SystemExit('no')",
  }.items():
    (tmp_path / f"{name}.py").write_text(CONFIG.format(line=line))
  for name, text in {
    "no_config": None,
    "bad_json": "{",
    "other": json.dumps(MODEL | {"model_type": "gpt2"}),
    "no_weights": json.dumps(MODEL),
    "cut_weights": json.dumps(MODEL),
    "negative": json.dumps(MODEL | {"hidden_size": -32}),
  }.items():
    shutil.copytree(ROOT / "gtpo_jax" / "data" / "tokenizer", tmp_path / "models" / name)
    if text is not None:
      (tmp_path / "models" / name / "config.json").write_text(text)
  (tmp_path / "models" / "cut_weights" / "model.safetensors").write_bytes(
    b'\x40\0\0\0\0\0\0\0{"a":'
  )
  (tmp_path / "file").write_text("x")
  (tmp_path / "run" / "base" / "0").mkdir(parents=True)
  (tmp_path / "run" / "config.json").write_text('{"seed": 5}')
  (tmp_path / "broken" / "base" / "0").mkdir(parents=True)
  (tmp_path / "broken" / "config.json").write_text('{"seed": ')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(commands, "prepare_jax", lambda: None)  # JAX is already running here
  return tmp_path


def contents(folder):
  """Returns the bytes of all files by path, and None for folders."""
  return {
    str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
    for path in sorted(folder.rglob("*"))
    if "__pycache__" not in path.parts
  }


def train(*overrides, config=ROOT / "configs" / "tiny.py", workdir="new"):
  return [
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    *(f"--config.{item}" for item in overrides),
  ]


def train_on_file(name, *overrides):
  return train(
    f"data.train=data/{name}", "data.eval=data/good.jsonl", "warm_start.steps=0", *overrides
  )


def train_model(name):
  return train(f"model.path=models/{name}", "warm_start.steps=0")


CASES = {
  # configs
  "a syntax error in a config": (train(config="syntax.py"), "config syntax.py raised SyntaxError"),
  "a config that raises": (train(config="raises.py"), "division by zero"),
  "a config that exits": (train(config="exits.py"), "config exits.py raised SystemExit"),
  "a config that is a dict": (train(config="dict.py"), "must return a ConfigDict, got dict"),
  "a misspelt field": (train(config="unknown.py"), "'batch.promts', did you mean 'batch.prompts'?"),
  "text as a number": (train(config="type.py"), "'steps'"),
  "a negative seed": (train("seed=-1"), "seed must be at least 0, got -1"),
  "a seed of 33 bits": (
    train("seed=4294967296"),
    "seed must be at most 4294967295, got 4294967296",
  ),
  "a learning rate that is not a number": (
    train("optimizer.learning_rate=nan"),
    "optimizer.learning_rate must be above 0 and finite, got nan",
  ),
  "a group of one": (train("batch.group=1"), "batch.group must be at least 2, got 1"),
  "clip bounds crossed": (train("algorithm.eps_low=0.3", "algorithm.eps_high=0.2"), "eps_low"),
  "an unknown algorithm": (train("algorithm.name=gtop"), "did you mean 'gtpo'?"),
  "no skipped update allowed": (
    train("guards.skipped=0"),
    "guards.skipped must be at least 1, got 0",
  ),
  "a negative stall": (
    train("guards.stall_s=-1"),
    "guards.stall_s must be from 0 to 1e9 seconds, got -1",
  ),
  "no group to record": (
    train("log.credit_groups=0"),
    "log.credit_groups must be at least 1, got 0",
  ),
  "a stall that is not a number": (
    train("guards.stall_s=nan"),
    "guards.stall_s must be from 0 to 1e9 seconds, got nan",
  ),
  "no checkpoint to keep": (
    train("checkpoint.keep=0"),
    "checkpoint.keep must be at least 1, got 0",
  ),
  "three devices of eight": (train("mesh.data=3"), "does not fit 8 device(s)"),
  "micro-batches that do not divide": (
    train("batch.micro_batches=5"),
    "batch.prompts = 16 is not a multiple of",
  ),
  "prompts too long": (train("data.max_prompt_tokens=4"), "over the limit of 4"),
  "a template without {prompt}": (
    train("data.template=x"),
    "data.template must contain {prompt}, got 'x'",
  ),
  "a missing reward function": (
    train("reward.verifier=nowhere:f"),
    "reward function 'nowhere:f' cannot be imported",
  ),
  "a reward part without a weight": (train("reward.parts=correct*x"), "got 'correct*x'"),
  # data
  "a missing file": (train_on_file("none.jsonl"), "data/none.jsonl"),
  "bytes that are not text": (train_on_file("garbage.jsonl"), "data/garbage.jsonl"),
  "rows that are not JSON": (train_on_file("no_json.jsonl"), "data/no_json.jsonl"),
  "rows without an answer": (train_on_file("no_answer.jsonl"), "data/no_answer.jsonl"),
  "rows that are lists": (train_on_file("array.jsonl"), "data/array.jsonl"),
  "null as a problem": (train_on_file("null.jsonl"), "data/null.jsonl"),
  "a truncated row": (train_on_file("cut.jsonl"), "data/cut.jsonl"),
  "an empty file": (train_on_file("empty.jsonl"), "data/empty.jsonl"),
  "a truncated parquet file": (train_on_file("no.parquet"), "data/no.parquet"),
  # model folders
  "an empty model folder": (train_model("no_config"), "config.json"),
  "a truncated model config": (train_model("bad_json"), "is not valid JSON"),
  "another architecture": (train_model("other"), "gpt2"),
  "a negative width": (train_model("negative"), "-32"),
  "no weights": (train_model("no_weights"), "no safetensors in 'models/no_weights'"),
  "truncated weights": (train_model("cut_weights"), "is not a valid safetensors file"),
  "a missing guide": (
    train("algorithm.name=dapo_mixed", "guide.path=models/none"),
    "no folder at 'models/none'",
  ),
  # the command line and workdirs
  "an option without a value": (
    ["train", "--config=x.py", "--workdir=new", "--config.steps", "5"],
    "--config.steps=VALUE",
  ),
  "an unknown option": (["train", "--config=x.py", "--workdri=new"], "did you mean '--workdir'?"),
  "a file as workdir": (train(workdir="file"), "/file' is a file; name a folder"),
  "a workdir of another config": (train(workdir="run"), "seed was 5, now 0"),
  "a workdir with a damaged config": (
    train(workdir="broken"),
    "broken/config.json' is not valid JSON",
  ),
  "a missing step": (
    ["export", "--workdir=run", "--out=out", "--step=7"],
    "no checkpoint of step 7",
  ),
  "an empty prompt": (["sample", "--model=run", "--prompt= "], "--prompt is empty"),
}


@pytest.mark.devices
@pytest.mark.parametrize("case", CASES)
def test_a_malformed_input_is_rejected(case, folder, capfd):
  args, message = CASES[case]
  before = contents(folder)
  assert cli.main(args) == 2
  out, error = capfd.readouterr()
  lines = error.strip().splitlines()
  assert len(lines) == 1, (out, error)
  assert lines[0].startswith("gtpo: ")
  assert message in lines[0]
  assert contents(folder) == before
