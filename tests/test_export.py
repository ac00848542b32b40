"""From a run to a Hugging Face folder and back: `gtpo export`, then sample, evaluate and train from what it wrote."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gtpo_jax import cli
from gtpo_jax.data.chat import load_chat
from gtpo_jax.models import load
from gtpo_jax.models.lora import merge_lora
from gtpo_jax.rollout.policies import open_policy

ROOT = Path(__file__).parents[1]
SMALL = [
  "--config.data.terms=2",
  "--config.batch.prompts=8",
  "--config.batch.group=4",
  "--config.eval.problems=8",
  "--config.eval.samples=2",
  "--config.eval.batch=8",
  "--config.eval.every=0",
  "--config.log.tensorboard=False",
]
TRAIN = ["train", "--config=configs/tiny.py", *SMALL]


def gtpo(*args):
  """In a process of its own, as a user has it."""
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
  done = subprocess.run(
    [sys.executable, "-m", "gtpo_jax", *map(str, args)],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert "Traceback" not in done.stderr, done.stderr
  return done


@pytest.fixture
def here(capsys, monkeypatch):
  """The same command line in this process, which has compiled before: (status, output, errors)."""
  monkeypatch.chdir(ROOT)

  def run(*args):
    capsys.readouterr()
    status = cli.main([str(arg) for arg in args])
    return status, *capsys.readouterr()

  return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("export") / "run"
  done = gtpo(
    *TRAIN,
    f"--workdir={workdir}",
    "--config.steps=2",
    "--config.warm_start.steps=20",
    "--config.checkpoint.every=1",
  )
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.fixture(scope="module")
def exported(run):
  out = run.parent / "a folder"
  done = gtpo("export", f"--workdir={run}", f"--out={out}")
  assert (done.returncode, done.stderr) == (0, ""), done.stderr
  assert done.stdout == f"step 2 of {run} -> {out} (float32)\n"
  return out


@pytest.fixture(scope="module")
def adapted(exported):
  """A run with adapters on the exported folder."""
  workdir = exported.parent / "adapted"
  done = gtpo(
    *TRAIN,
    f"--workdir={workdir}",
    f"--config.model.path={exported}",
    "--config.model.lora_rank=4",
    "--config.warm_start.steps=0",
    "--config.steps=1",
    "--config.optimizer.learning_rate=1e-2",
  )
  assert done.returncode == 0, done.stderr
  assert "base model: held-out pass@1" in done.stdout and f"model {exported}" in done.stdout
  return workdir


def weights_of(workdir, step=None):
  """A checkpoint's parameters, adapters merged, on the host."""
  worker, _, params, _ = open_policy(workdir, step)
  return jax.device_get(merge_lora(worker.model, params))


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def one_line(status, out, err, message):
  assert (
    (status, out) == (2, "")
    and err.startswith("gtpo: ")
    and err.count("\n") == 1
    and message in err
  ), (status, out, err)


# The folder.


def test_the_folder_is_complete(exported):
  names = {file.name for file in exported.iterdir()}
  assert names >= {
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
  }
  done = subprocess.run(
    ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=exported, capture_output=True, text=True
  )
  assert done.returncode == 0 and done.stdout.count(": OK") == len(names) - 1
  assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == sorted(
    load_chat().stop
  )
  assert load_chat(exported).tokenizer.chat_template == load_chat().tokenizer.chat_template


def test_the_weights_are_the_checkpoints(exported, run):
  model, params = load(exported, "float32")
  same(params, weights_of(run))
  assert model.config.vocab_size == 384 and model.config.width == 128


def test_transformers_opens_it_and_writes_what_we_write(exported, here):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
  model = transformers.AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
  ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "12+3:"}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
  )
  with torch.no_grad():
    written = model.generate(**ids, max_new_tokens=20, do_sample=False)[
      0, ids["input_ids"].shape[1] :
    ]
  _, out, _ = here(
    "sample", f"--model={exported}", "--prompt=12+3:", "--temperature=0", "--max_tokens=20"
  )
  assert out == tokenizer.decode(written, skip_special_tokens=True) + "\n"


def test_the_model_card(exported, run):
  card = (exported / "README.md").read_text()
  _, header, text = card.split("---\n", 2)
  assert (
    'library_name: "transformers"' in header and '"gtpo"' in header and "base_model" not in header
  )
  assert (
    "random weights after 20 steps of imitation" in text
    and "2 steps of 8 prompts x 4 completions" in text
    and "`sums`" in text
  )
  rows = {
    line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")
  }
  config = json.loads((run / "config.json").read_text())
  flat = lambda tree, prefix="": [
    key
    for name, value in tree.items()
    for key in (flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"])
  ]
  missing = [key for key in flat(config) if key not in rows and not key.startswith("algorithm.")]
  assert not missing
  assert (
    rows["algorithm.name"] == "| algorithm.name | gtpo |"
    and rows["batch.group"] == "| batch.group | 4 |"
  )
  assert "None" not in rows["algorithm.alpha2"] and "0.00015" in rows["optimizer.learning_rate"]
  last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
  assert (
    f"{last['reward/mean']:.4g}" in rows["reward/mean"]
    and f"{last['eval/sums/mean@2']:.4g}" in rows["sums/mean@2"]
  )
  assert "| step 0 | step 2 |" in text
  assert f"jax {jax.__version__}" in text and "Python 3." in text and "transformers " in text
  assert shlex.join(["gtpo", "export", f"--workdir={run}", f"--out={exported}"]) in text


def test_the_base_model_and_an_earlier_step(run, here, tmp_path):
  for step in (0, 1):
    status, out, err = here(
      "export", f"--workdir={run}", f"--out={tmp_path / str(step)}", f"--step={step}"
    )
    assert (status, err) == (0, "") and out.startswith(f"step {step} of ")
    same(load(tmp_path / str(step), "float32")[1], weights_of(run, step))
    assert f"--step={step}" in (tmp_path / str(step) / "README.md").read_text()
  card = (tmp_path / "0" / "README.md").read_text()
  assert (
    ": 0 steps of" in card and "reward/mean" not in card.split("## Settings")[0]
  )  # nothing of later steps
  assert np.any(
    load(tmp_path / "0", "float32")[1]["embedding"]
    != load(tmp_path / "1", "float32")[1]["embedding"]
  )


def test_half_precision(run, here, tmp_path):
  status, out, err = here(
    "export", f"--workdir={run}", f"--out={tmp_path / 'out'}", "--dtype=bfloat16"
  )
  assert (status, err) == (0, "") and out.endswith("(bfloat16)\n")
  assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2 * 700_000
  same(
    load(tmp_path / "out", "bfloat16")[1],
    jax.tree.map(lambda x: x.astype("bfloat16"), weights_of(run)),
  )


def test_mistakes_get_one_line_and_leave_nothing(run, exported, here, tmp_path):
  before = {file.name: file.stat().st_mtime_ns for file in exported.iterdir()}
  out = f"--out={tmp_path / 'out'}"
  done = gtpo("export", f"--workdir={run}", f"--out={exported}")
  one_line(done.returncode, done.stdout, done.stderr, "holds something already; name a new folder")
  assert {file.name: file.stat().st_mtime_ns for file in exported.iterdir()} == before
  for args, message in [
    ((f"--workdir={run}", out, "--step=9"), "no checkpoint of step 9"),
    (
      (f"--workdir={run}", out, "--dtype=int8"),
      "dtype must be one of float32, bfloat16, float16; got 'int8'",
    ),
    ((f"--workdir={run}", out, "--adapter"), "adapters"),
    ((f"--workdir={run}", out, "--adapter", "--dtype=float32"), "--dtype is of whole models"),
    ((f"--workdir={tmp_path / 'none'}", out), "no folder at"),
    ((f"--workdir={tmp_path}", out), ""),
    ((f"--workdir={exported}", out, "--step=1"), "is a Hugging Face folder"),
    ((f"--workdir={run}",), "required: --out"),
    ((f"--workdir={run}", out, "--stp=1"), "did you mean '--step'"),
  ]:
    one_line(*here("export", *args), message)
  assert not list(tmp_path.iterdir())


def test_a_folder_is_not_a_run(exported, here, tmp_path):
  """What has no config and no metrics of ours cannot have a card of ours."""
  one_line(*here("export", f"--workdir={exported}", f"--out={tmp_path / 'out'}"), "")


# Back again.


def test_the_folder_and_the_run_write_the_same(run, exported, here):
  args = ("sample", "--prompt=12+3:", "--temperature=0", "--max_tokens=20")
  (status, out, err) = here(*args, f"--model={run}")
  again = here(*args, f"--model={exported}")
  assert (status, err) == (0, "") and out.strip()
  assert again == (status, out, err)


def test_the_folder_and_the_run_are_equally_right(run, exported, here, tmp_path):
  a = tmp_path / "a.json"
  b = tmp_path / "b.json"
  assert here("eval", f"--model={run}", f"--json={a}")[0] == 0
  status, _, err = here(
    "eval", f"--model={exported}", "--config=configs/tiny.py", *SMALL, f"--json={b}"
  )
  assert (status, err) == (0, "")
  a, b = (json.loads(file.read_text()) for file in (a, b))
  assert a["eval/sums/greedy"] == b["eval/sums/greedy"] and a["problems"] == b["problems"] == 8
  assert a["eval/sums/mean@2"] == pytest.approx(
    b["eval/sums/mean@2"], abs=0.2
  )  # the same draws, of nearly the same numbers
  one_line(*here("eval", f"--model={exported}"), "give --config=FILE")
  one_line(*here("sample", f"--model={exported}", "--prompt=1", "--step=1"), "has no steps")


def test_a_tokenizer_that_reaches_beyond_the_vocabulary_is_refused(exported, here, tmp_path):
  other = shutil.copytree(exported, tmp_path / "other")
  (other / "generation_config.json").write_text('{"eos_token_id": [383, 384]}')
  one_line(*here("sample", f"--model={other}", "--prompt=1"), "ids up to 384")


def test_training_goes_on_from_the_folder(run, exported, here, tmp_path):
  workdir = tmp_path / "more"
  args = (
    *TRAIN,
    f"--workdir={workdir}",
    f"--config.model.path={exported}",
    "--config.warm_start.steps=0",
  )
  status, out, err = here(*args, "--config.steps=1")
  assert (status, err) == (0, "") and "base model: held-out pass@1" in out, err
  first = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])
  last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
  assert first["eval/sums/greedy"] == last["eval/sums/greedy"]  # it begins where the other ended
  assert not (workdir / "base").exists()  # the folder has it
  same(weights_of(workdir, 0), weights_of(run))
  assert here("export", f"--workdir={workdir}", f"--out={tmp_path / 'out'}")[0] == 0
  card = (tmp_path / "out" / "README.md").read_text()
  assert f"base_model: {json.dumps(str(exported))}" in card and f"from `{exported}`" in card
  one_line(
    *here("export", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}", "--adapter"),
    "has no adapters (model.lora_rank = 0)",
  )


# Adapters.


def test_the_adapters_alone_are_trained_and_the_run_resumes(adapted, exported, here):
  before, after = (flatten_dict(jax.device_get(open_policy(adapted, step)[2])) for step in (0, 1))
  base = flatten_dict(jax.device_get(load(exported, "float32")[1]))
  assert len(before) == len(after) == len(base) + 14
  for path, x in base.items():
    assert x.tobytes() == before[path].tobytes() == after[path].tobytes(), path
  assert all(
    np.any(before[path] != after[path]) for path in before if path[-1] == "lora_a"
  )  # decay moves A even where nothing was learned
  status, out, err = here(
    *TRAIN,
    f"--workdir={adapted}",
    f"--config.model.path={exported}",
    "--config.model.lora_rank=4",
    "--config.warm_start.steps=0",
    "--config.optimizer.learning_rate=1e-2",
    "--config.steps=2",
  )
  assert (status, err) == (0, "") and f"resumed at step 1 of 2 from {adapted}" in out
  status, _, err = here(
    *TRAIN,
    f"--workdir={adapted}",
    f"--config.model.path={exported}",
    "--config.model.lora_rank=8",
    "--config.warm_start.steps=0",
    "--config.optimizer.learning_rate=1e-2",
    "--config.steps=2",
  )
  assert status == 2 and "model.lora_rank" in err and err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT about names of transformers
def test_adapters_are_exported_for_peft_and_merged(adapted, exported, here, tmp_path):
  status, out, err = here(
    "export", f"--workdir={adapted}", f"--out={tmp_path / 'peft'}", "--adapter"
  )
  assert (status, err) == (0, "") and out.endswith("(adapters)\n")
  names = {file.name for file in (tmp_path / "peft").iterdir()}
  assert names == {"README.md", "SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"}
  assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())[
    "base_model_name_or_path"
  ] == str(exported)
  assert here("export", f"--workdir={adapted}", f"--out={tmp_path / 'whole'}")[0] == 0
  same(load(tmp_path / "whole", "float32")[1], weights_of(adapted))

  torch = pytest.importorskip("torch")
  peft = pytest.importorskip("peft")
  reference = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft").eval()
  model, params = load(tmp_path / "whole", "float32")
  tokens = np.random.default_rng(0).integers(0, 384, (2, 24))
  with torch.no_grad():
    want = reference(torch.from_numpy(tokens)).logits.numpy()
  np.testing.assert_allclose(model.apply({"params": params}, tokens), want, rtol=0, atol=2e-4)
  args = ("sample", "--prompt=12+34:", "--temperature=0", "--max_tokens=16")
  assert here(*args, f"--model={adapted}") == here(*args, f"--model={tmp_path / 'whole'}")
