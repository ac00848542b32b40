"""Tests `gtpo export`, and sampling, evaluation and training from the exported folder."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess

import jax
import numpy as np
import pytest
from command_line import ROOT, SMALL, TRAIN, command_line, environment, gtpo
from flax.traverse_util import flatten_dict
from hub import TOKEN, hub

from gtpo_jax import cli
from gtpo_jax.cli.export import base_model, has_small_tokenizer, model_card
from gtpo_jax.config import flatten, freeze
from gtpo_jax.data.chat import load_chat
from gtpo_jax.models import load
from gtpo_jax.models.lora import merge_lora
from gtpo_jax.rollout.policies import open_policy


@pytest.fixture
def gtpo_here(capsys, monkeypatch):
  """Runs the command in this process, to reuse its compiled programs: (status, stdout, stderr)."""
  monkeypatch.chdir(ROOT)

  def run(*args):
    capsys.readouterr()
    status = cli.main([str(arg) for arg in args])
    return status, *capsys.readouterr()

  return run


@pytest.fixture(scope="module")
def run(finished_run):
  return finished_run[0]


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
  out = tmp_path_factory.mktemp("export") / "a folder"
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert cli.main(["export", f"--workdir={run}", f"--out={out}"]) == 0
  assert printed.getvalue() == f"step 2 of {run} -> {out} (float32)\n"
  return out


@pytest.fixture(scope="module")
def adapted(exported):
  """A run that trains adapters on the exported folder, which it names by a relative path."""
  workdir = exported.parent / "adapted"
  done = gtpo(
    *TRAIN,
    f"--workdir={workdir}",
    f"--config.model.path={relative(exported)}",
    "--config.model.lora_rank=4",
    "--config.warm_start.steps=0",
    "--config.warm_start.batch=16",
    "--config.steps=1",
    "--config.optimizer.learning_rate=1e-2",
  )
  assert done.returncode == 0, done.stderr
  assert "base model: held-out pass@1" in done.stdout
  assert f"model {relative(exported)}" in done.stdout
  return workdir


def relative(folder):
  """The folder's path from the working directory of the commands."""
  return os.path.relpath(folder, ROOT)


def weights_of(workdir, step=None):
  """Returns a checkpoint's parameters on the host, with adapters merged."""
  worker, _, params, _ = open_policy(workdir, step)
  return jax.device_get(merge_lora(worker.model, params))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def assert_one_line(status, out, err, message):
  assert (status, out) == (2, ""), err
  assert err.startswith("gtpo: ")
  assert err.count("\n") == 1
  assert message in err


# ---- the folder


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
  assert done.returncode == 0
  assert done.stdout.count(": OK") == len(names) - 1
  assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == sorted(
    load_chat().stop
  )
  assert load_chat(exported).tokenizer.chat_template == load_chat().tokenizer.chat_template


def test_the_weights_are_those_of_the_checkpoint(exported, run):
  model, params = load(exported, "float32")
  assert_equal(params, weights_of(run))
  assert model.config.vocab_size == 384
  assert model.config.width == 128


def test_transformers_loads_it_and_generates_the_same(exported, gtpo_here):
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
    tokens = model.generate(**ids, max_new_tokens=20, do_sample=False)
  completion = tokens[0, ids["input_ids"].shape[1] :]
  _, out, _ = gtpo_here(
    "sample", f"--model={exported}", "--prompt=12+3:", "--temperature=0", "--max_tokens=20"
  )
  assert out == tokenizer.decode(completion, skip_special_tokens=True) + "\n"


def test_the_model_card(exported, run):
  card = (exported / "README.md").read_text()
  _, header, text = card.split("---\n", 2)
  assert 'library_name: "transformers"' in header
  assert '"gtpo"' in header
  assert "base_model" not in header
  assert "random weights after 10 steps of imitation" in text
  assert "2 steps of 8 prompts x 4 completions" in text
  assert "`sums`" in text
  rows = {
    line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")
  }
  config = json.loads((run / "config.json").read_text())
  keys = [key for key in flatten(config) if not key.startswith("algorithm.")]
  assert [key for key in keys if key not in rows] == ["model.path"]
  changed = text.partition("All settings")[0]
  assert "| batch.group | 4 |" in changed and "sampling.temperature" not in changed
  assert rows["model.remat"] == "| model.remat | full |" and "model.remat" not in changed
  assert rows["algorithm.name"] == "| algorithm.name | gtpo |"
  assert rows["batch.group"] == "| batch.group | 4 |"
  assert "None" not in rows["algorithm.alpha2"]
  assert "0.00015" in rows["optimizer.learning_rate"]
  last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
  assert f"{last['reward/mean']:.4g}" in rows["reward/mean"]
  assert f"{last['eval/sums/mean@2']:.4g}" in rows["sums/mean@2"]
  assert "| step 0 | step 2 |" in text
  for version in (f"jax {jax.__version__}", "Python 3.", "transformers "):
    assert version in text
  assert shlex.join(["gtpo", "export", f"--workdir={run}", f"--out={exported}"]) in text


def test_no_name_changes_the_layout_of_the_card():
  """Markdown must see neither HTML, nor the end of a cell, of code or of a line."""
  train = "</script>|`a`\n# b\u202e.jsonl"
  config = freeze({"data": {"train": train, "eval": "sums"}})
  row = {"step": 1, "eval/<b>|/mean@2": 0.5}
  card = model_card(config, 1, [row], "gtpo export '```'", "<b>\n# c")
  assert "on `` </script>|`a` # b‹U+202E›.jsonl ``: 1 step of" in card
  assert r"| data.train | &lt;/script>\|`a` # b‹U+202E›.jsonl |" in card
  assert r"| &lt;b>\|/mean@2 | 0.5 | 0.5 |" in card
  assert "# &lt;b> # c, trained by gtpo\n" in card and "from `<b> # c`" in card
  assert "````\ngtpo export '```'\n````" in card
  config = freeze({"model": {"path": "/hf/mine"}})
  card = model_card(config, 1, [row], "gtpo export", "/hf/mine")
  assert "# mine, trained by gtpo\n" in card and "| model.preset |" not in card


def test_the_name_of_the_base_model(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "hf" / "mine").mkdir(parents=True)
  assert base_model("hf/mine") == base_model("hf/../hf/mine/") == str(tmp_path / "hf" / "mine")
  assert base_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
  assert base_model("") == ""
  card = lambda base: model_card(freeze({}), 0, [], "gtpo export", base)
  assert '\nbase_model: "Qwen/Qwen2.5-0.5B"\n' in card("Qwen/Qwen2.5-0.5B")
  assert "base_model:" not in card(base_model("hf/mine"))  # the hub would refuse it


def test_the_card_says_that_llama_cpp_does_not_know_the_small_tokenizer(exported, tmp_path):
  assert (
    "conversion.TextModel.get_vocab_base_pre = lambda *_: 'qwen2'"
    in (exported / "README.md").read_text()
  )
  assert has_small_tokenizer(load_chat(exported)) and has_small_tokenizer(load_chat())
  other = shutil.copytree(exported, tmp_path / "other")
  text = (other / "tokenizer.json").read_text()
  (other / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|turn_start|>"'))
  assert not has_small_tokenizer(load_chat(other))


def test_the_base_model_and_an_earlier_step(run, gtpo_here, tmp_path):
  for step in (0, 1):
    status, out, err = gtpo_here(
      "export", f"--workdir={run}", f"--out={tmp_path / str(step)}", f"--step={step}"
    )
    assert (status, err) == (0, "")
    assert out.startswith(f"step {step} of ")
    assert_equal(load(tmp_path / str(step), "float32")[1], weights_of(run, step))
    assert f"--step={step}" in (tmp_path / str(step) / "README.md").read_text()
  card = (tmp_path / "0" / "README.md").read_text()
  assert ": 0 steps of" in card
  assert "reward/mean" not in card.split("## Settings")[0]  # no metrics of later steps
  embedding = lambda step: load(tmp_path / str(step), "float32")[1]["embedding"]
  assert np.any(embedding(0) != embedding(1))


def test_half_precision(run, gtpo_here, tmp_path):
  status, out, err = gtpo_here(
    "export", f"--workdir={run}", f"--out={tmp_path / 'out'}", "--dtype=bfloat16"
  )
  assert (status, err) == (0, "")
  assert out.endswith("(bfloat16)\n")
  assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2 * 700_000
  assert_equal(
    load(tmp_path / "out", "bfloat16")[1],
    jax.tree.map(lambda x: x.astype("bfloat16"), weights_of(run)),
  )


def test_mistakes_print_one_line_and_write_nothing(run, exported, gtpo_here, tmp_path):
  before = {file.name: file.stat().st_mtime_ns for file in exported.iterdir()}
  out = f"--out={tmp_path / 'out'}"
  result = gtpo_here("export", f"--workdir={run}", f"--out={exported}")
  assert_one_line(*result, "is not empty; name a new folder")
  assert {file.name: file.stat().st_mtime_ns for file in exported.iterdir()} == before
  for args, message in [
    ((f"--workdir={run}", out, "--step=9"), "no checkpoint of step 9"),
    (
      (f"--workdir={run}", out, "--dtype=int8"),
      "dtype must be one of float32, bfloat16, float16; got 'int8'",
    ),
    ((f"--workdir={run}", out, "--adapter"), "adapters"),
    (
      (f"--workdir={run}", out, "--adapter", "--dtype=float32"),
      "--dtype applies only to complete models",
    ),
    ((f"--workdir={tmp_path / 'none'}", out), "no folder at"),
    ((f"--workdir={tmp_path}", out), ""),
    ((f"--workdir={exported}", out, "--step=1"), "is already a Hugging Face folder"),
    ((f"--workdir={run}",), "required: --out"),
    ((f"--workdir={run}", out, "--stp=1"), "did you mean '--step'"),
  ]:
    assert_one_line(*gtpo_here("export", *args), message)
  assert not list(tmp_path.iterdir())


def test_a_folder_is_not_a_run(exported, gtpo_here, tmp_path):
  """A folder without our config and metrics has no data for the model card."""
  assert_one_line(*gtpo_here("export", f"--workdir={exported}", f"--out={tmp_path / 'out'}"), "")


# ---- sampling, evaluation and training from the folder


def test_the_folder_and_the_run_sample_the_same(run, exported, gtpo_here):
  args = ("sample", "--prompt=12+3:", "--temperature=0", "--max_tokens=20")
  (status, out, err) = gtpo_here(*args, f"--model={run}")
  again = gtpo_here(*args, f"--model={exported}")
  assert (status, err) == (0, "")
  assert out.strip()
  assert again == (status, out, err)


def test_the_folder_and_the_run_have_the_same_accuracy(run, exported, gtpo_here, tmp_path):
  run_json = tmp_path / "run.json"
  folder_json = tmp_path / "folder.json"
  assert gtpo_here("eval", f"--model={run}", f"--json={run_json}")[0] == 0
  status, _, err = gtpo_here(
    "eval", f"--model={exported}", "--config=configs/tiny.py", *SMALL, f"--json={folder_json}"
  )
  assert status == 0, err
  of_run = json.loads(run_json.read_text())
  of_folder = json.loads(folder_json.read_text())
  assert of_run["eval/sums/greedy"] == of_folder["eval/sums/greedy"]
  assert of_run["problems"] == of_folder["problems"] == 8
  # The same random draws from nearly the same probabilities.
  assert of_run["eval/sums/mean@2"] == pytest.approx(of_folder["eval/sums/mean@2"], abs=0.2)
  assert_one_line(*gtpo_here("eval", f"--model={exported}"), "give --config=FILE")
  assert_one_line(
    *gtpo_here("sample", f"--model={exported}", "--prompt=1", "--step=1"), "has no steps"
  )


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_rejected(exported, gtpo_here, tmp_path):
  other = shutil.copytree(exported, tmp_path / "other")
  (other / "generation_config.json").write_text('{"eos_token_id": [383, 384]}')
  assert_one_line(*gtpo_here("sample", f"--model={other}", "--prompt=1"), "ids up to 384")


@pytest.mark.slow
def test_training_continues_from_the_folder(run, exported, gtpo_here, tmp_path):
  workdir = tmp_path / "more"
  args = (
    *TRAIN,
    f"--workdir={workdir}",
    f"--config.model.path={exported}",
    "--config.warm_start.steps=0",
    "--config.warm_start.batch=16",
  )
  status, out, err = gtpo_here(*args, "--config.steps=1")
  assert (status, err) == (0, "")
  assert "base model: held-out pass@1" in out
  first = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])
  last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
  assert (
    first["eval/sums/greedy"] == last["eval/sums/greedy"]
  )  # it starts where the other run ended
  assert not (workdir / "base").exists()  # the base model is in the exported folder
  assert_equal(weights_of(workdir, 0), weights_of(run))
  assert gtpo_here("export", f"--workdir={workdir}", f"--out={tmp_path / 'out'}")[0] == 0
  card = (tmp_path / "out" / "README.md").read_text()
  assert "base_model:" not in card and f"from `{exported}`" in card
  assert_one_line(
    *gtpo_here("export", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}", "--adapter"),
    "has no adapters (model.lora_rank = 0)",
  )


# ---- adapters


@pytest.mark.slow
def test_only_the_adapters_are_trained_and_the_run_resumes(adapted, exported, gtpo_here):
  before, after = (flatten_dict(jax.device_get(open_policy(adapted, step)[2])) for step in (0, 1))
  base = flatten_dict(jax.device_get(load(exported, "float32")[1]))
  assert len(before) == len(after) == len(base) + 14
  for path, x in base.items():
    assert x.tobytes() == before[path].tobytes() == after[path].tobytes(), path
  # B is 0, so the gradient of A is 0 too, but weight decay changes A.
  assert all(np.any(before[path] != after[path]) for path in before if path[-1] == "lora_a")
  args = (
    *TRAIN,
    f"--workdir={adapted}",
    f"--config.model.path={relative(exported)}",
    "--config.warm_start.steps=0",
    "--config.warm_start.batch=16",
    "--config.optimizer.learning_rate=1e-2",
    "--config.steps=2",
  )
  status, out, err = gtpo_here(*args, "--config.model.lora_rank=4")
  assert (status, err) == (0, "")
  assert f"resumed at step 1 of 2 from {adapted}" in out
  status, _, err = gtpo_here(*args, "--config.model.lora_rank=8")
  assert status == 2
  assert "model.lora_rank" in err
  assert err.count("\n") == 1


@pytest.mark.slow
def test_an_export_is_pushed_to_a_hub(run, tmp_path):
  """A token that may not write is refused before anything is written here."""
  stored = {}
  line = command_line("export", f"--workdir={run}", f"--out={tmp_path / 'out'}", "--push=us/mine")
  with hub(stored) as address:
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    start = lambda token: subprocess.run(
      line,
      env={**environment(), **variables, "HF_TOKEN": token},
      capture_output=True,
      text=True,
      timeout=300,
    )
    refused = start("hf_another")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--push=us/mine: the hub refused it (" in refused.stderr
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    done = start(TOKEN)
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith(f"\npushed to {address}/us/mine\n")
  files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
  assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
  assert stored == {"us/mine": files}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT warns about names in transformers
def test_adapters_are_exported_for_peft_and_merged(adapted, exported, gtpo_here, tmp_path):
  status, out, err = gtpo_here(
    "export", f"--workdir={adapted}", f"--out={tmp_path / 'peft'}", "--adapter"
  )
  assert (status, err) == (0, "")
  assert out.endswith("(adapters)\n")
  names = {file.name for file in (tmp_path / "peft").iterdir()}
  assert names == {"README.md", "SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"}
  adapter_config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
  assert adapter_config["base_model_name_or_path"] == str(
    exported
  )  # although the run's is relative
  card = (tmp_path / "peft" / "README.md").read_text()
  assert 'library_name: "peft"' in card
  assert "base_model:" not in card and f"from `{exported}`" in card
  assert "llama.cpp" not in card
  assert gtpo_here("export", f"--workdir={adapted}", f"--out={tmp_path / 'merged'}")[0] == 0
  assert_equal(load(tmp_path / "merged", "float32")[1], weights_of(adapted))

  torch = pytest.importorskip("torch")
  peft = pytest.importorskip("peft")
  reference = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft").eval()
  model, params = load(tmp_path / "merged", "float32")
  tokens = np.random.default_rng(0).integers(0, 384, (2, 24))
  with torch.no_grad():
    expected = reference(torch.from_numpy(tokens)).logits.numpy()
  np.testing.assert_allclose(model.apply({"params": params}, tokens), expected, rtol=0, atol=2e-4)
  args = ("sample", "--prompt=12+34:", "--temperature=0", "--max_tokens=16")
  assert gtpo_here(*args, f"--model={adapted}") == gtpo_here(
    *args, f"--model={tmp_path / 'merged'}"
  )
