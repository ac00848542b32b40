"""Links out of a folder, pickles and code are rejected in one line; nothing runs or is written."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_folders import edit_json, hf_folder
from hostile import INDEX, contents, first_shard, move_out, rejection, weights
from hub import hub

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models import load
from gtpo_jax.runtime.errors import UserError

ROOT = Path(__file__).parents[3]
TOUCH = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder(name, folder):
  move_out(folder / name)
  assert f"{name}' is a link out of its folder" in rejection(folder)


@pytest.mark.parametrize("which", [INDEX, "shard"])
def test_a_link_out_of_a_sharded_folder(which, shards):
  file = first_shard(shards) if which == "shard" else shards / which
  move_out(file)
  assert f"{file.name}' is a link out of its folder" in rejection(shards)


def test_a_link_to_the_parent_by_dots(folder):
  weights(folder).rename(folder.parent / "w.safetensors")
  weights(folder).symlink_to("../w.safetensors")
  assert "a link out of its folder" in rejection(folder)


def test_a_link_to_itself(folder):
  weights(folder).unlink()
  weights(folder).symlink_to("model.safetensors")
  rejection(folder)


def test_a_dangling_index_link_is_one_line(shards):
  (shards / INDEX).unlink()
  (shards / INDEX).symlink_to("/nowhere/index.json")
  try:
    # Loading may also succeed: without the index, the folder still has all its files.
    load(shards, "float32")
  except UserError as error:
    assert "\n" not in str(error)


def test_links_within_the_folder_and_to_it_are_followed(folder, tmp_path):
  weights(folder).rename(folder / "blob")
  weights(folder).symlink_to("blob")
  (tmp_path / "link").symlink_to(folder)
  load(tmp_path / "link", "float32")


def hub_cache(home, source, name="models--gtpo--tiny"):
  """Copies a folder in the layout of huggingface_hub's cache: snapshots/HASH/* link to blobs/*."""
  store = home / name
  snapshot = store / "snapshots" / ("0" * 40)
  snapshot.mkdir(parents=True)
  (store / "blobs").mkdir()
  (store / "refs").mkdir()
  (store / "refs" / "main").write_text("0" * 40)
  for i, file in enumerate(sorted(source.iterdir())):
    shutil.copy(file, store / "blobs" / f"{i:064x}")
    (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
  return snapshot


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_the_hubs_own_links_are_followed(shard, tmp_path):
  load(hub_cache(tmp_path, hf_folder(shard=shard)[0]), "float32")


def test_a_link_out_of_the_hubs_cache_is_rejected(tmp_path):
  snapshot = hub_cache(tmp_path / "hub", hf_folder()[0])
  weights(snapshot).unlink()
  shutil.copy(hf_folder()[0] / "model.safetensors", tmp_path / "hub" / "other.safetensors")
  weights(snapshot).symlink_to("../../../other.safetensors")
  assert "a link out of its folder" in rejection(snapshot)


class Payload:
  def __init__(self, canary):
    self.canary = canary

  def __reduce__(self):
    return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize(
  "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_a_pickle_is_never_opened(name, folder):
  weights(folder).unlink()
  (folder / name).write_bytes(pickle.dumps(Payload(folder / "canary")))
  assert f"{name} is a pickle" in rejection(folder)


def test_a_pickle_named_safetensors_is_rejected(folder):
  weights(folder).write_bytes(pickle.dumps(Payload(folder / "canary")))
  assert "not a valid safetensors file" in rejection(folder)


def test_code_of_a_model_is_rejected(folder):
  (folder / "modeling_evil.py").write_text(TOUCH.format(str(folder / "canary")))
  edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
  assert "auto_map" in rejection(folder)


def with_tokenizer(folder):
  for file in TOKENIZER_DIR.iterdir():
    shutil.copy(file, folder)
  return folder


def test_code_of_a_tokenizer_is_rejected(folder):
  with_tokenizer(folder)
  (folder / "tokenization_evil.py").write_text(TOUCH.format(str(folder / "canary")))
  edit_json(
    folder / "tokenizer_config.json",
    auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]},
    tokenizer_class="Evil",
  )
  assert "auto_map" in rejection(folder, load_chat)


def test_no_question_about_code_of_a_tokenizer_in_the_models_config(folder):
  """transformers would ask on the terminal whether to run it, and piped input could answer yes."""
  with_tokenizer(folder)
  canary = folder / "canary"
  (folder / "tokenization_evil.py").write_text(TOUCH.format(str(canary)) + "class Evil: pass\n")
  edit_json(folder / "config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
  edit_json(folder / "tokenizer_config.json", tokenizer_class=None)
  script = (
    "import sys\n"
    "from gtpo_jax.data.chat import load_chat\n"
    "from gtpo_jax.runtime.errors import UserError\n"
    "try: load_chat(sys.argv[1])\nexcept UserError as error: print('rejected', error)"
  )
  done = subprocess.run(
    [sys.executable, "-c", script, folder],
    cwd=ROOT,
    input="y\n" * 9,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert not canary.exists(), done.stdout + done.stderr
  assert done.returncode == 0, done.stdout + done.stderr
  assert "y/N" not in done.stdout + done.stderr, done.stdout + done.stderr


TOKENIZERS = {  # by name: a file, what it contains, and the message
  "missing": ("tokenizer_config.json", None, "no tokenizer in"),
  "broken": ("tokenizer_config.json", "[", "is not valid JSON"),
  "list": ("tokenizer_config.json", "[]", "holds list, not an object"),
  "deep": ("tokenizer_config.json", "[" * 10**5, "is not valid JSON"),
  "empty object": ("tokenizer.json", "{}", "cannot be read"),
  "bytes": ("tokenizer.json", "\xff\0", "cannot be read"),
  "number": ("generation_config.json", "3", "holds int, not an object"),
  "end in letters": ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
  "no end": ("generation_config.json", '{"eos_token_id": [1, null]}', "eos_token_id"),
  "negative end": ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_hostile_tokenizers(case, folder):
  name, content, message = TOKENIZERS[case]
  file = with_tokenizer(folder) / name
  if content is None:
    file.unlink()
  else:
    file.write_bytes(content.encode("latin-1"))
  assert message in rejection(folder, load_chat)


@pytest.mark.parametrize(
  "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_tokenizers_links_out_of_the_folder(name, folder):
  move_out(with_tokenizer(folder) / name)
  assert "link out of its folder" in rejection(folder, load_chat)


@pytest.mark.parametrize(("ends", "stop"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_every_eos_of_generation_config_stops(ends, stop, folder):
  with_tokenizer(folder)
  (folder / "generation_config.json").unlink()
  if ends is not None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
  assert set(load_chat(folder).stop) == set(load_chat().stop) | stop


def test_an_empty_folder(tmp_path):
  (tmp_path / "home" / "hf").mkdir(parents=True)
  assert "cannot read config.json in" in rejection(tmp_path / "home" / "hf")


def test_no_weights(folder):
  weights(folder).unlink()
  assert rejection(folder) == f"no safetensors in {str(folder)!r}"


def test_a_folder_instead_of_a_file(folder):
  (folder / "config.json").unlink()
  (folder / "config.json").mkdir()
  assert "config.json" in rejection(folder)
  shutil.rmtree(folder / "config.json")
  shutil.copy(hf_folder()[0] / "config.json", folder)
  weights(folder).unlink()
  weights(folder).mkdir()
  assert "not a valid safetensors file" in rejection(folder)


@pytest.mark.parametrize(
  "name",
  [
    "setup.py",
    "no/such/folder",
    "/proc/nowhere",
    "",
    " ",
    "a b/c",
    "../../x",
    "a/b\0",
    "x" * 5000,
    "https://hf.co/a/b",
  ],
  ids=lambda name: name[:20],
)
def test_names_without_a_folder(name):
  with pytest.raises(UserError) as caught:
    load(name)
  assert "\n" not in str(caught.value) and ("no folder at" in str(caught.value) or not name)


HUB = """
import sys, time
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.models import load
began = time.perf_counter()
try:
  load("gtpo/nowhere")
except UserError as error:
  print("rejected:", error)
print("quick" if time.perf_counter() - began < 10 else "slow")
model, params = load("gtpo/tiny", "float32")
print("loaded", model.config.width)
"""


def run_with_hub(program, **variables):
  """Runs a program that succeeds, with these variables of the hub's library."""
  environment = {**os.environ, **variables}
  environment.pop("HF_HUB_CACHE", None)
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return done


def test_a_hub_id_is_read_from_the_cache_or_rejected_in_one_line(tmp_path):
  hub_cache(tmp_path / "hub", hf_folder()[0])
  before = contents(tmp_path / "hub" / "models--gtpo--tiny")
  done = run_with_hub(HUB, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), JAX_NUM_CPU_DEVICES="1")
  lines = done.stdout.splitlines()
  assert len(lines) == 3 and lines[1:] == ["quick", "loaded 32"] and done.stderr == "", done
  assert lines[0].startswith(
    "rejected: 'gtpo/nowhere' is neither a local folder nor completely cached"
  )
  assert contents(tmp_path / "hub" / "models--gtpo--tiny") == before


DOWNLOAD = """
from gtpo_jax.models.hf.folder import find
print(find("us/small"))
"""


@pytest.mark.slow
def test_a_download_that_is_cut_off_is_resumed(tmp_path):
  """The hub's library asks for what follows the last complete piece of 10 MiB."""
  weights = np.random.default_rng(0).bytes(24 * 2**20)
  files = {"config.json": b"{}", "model.safetensors": weights}
  cut = {"model.safetensors": []}
  with hub({"us/small": files}, cut) as address:
    done = run_with_hub(DOWNLOAD, HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
  assert cut["model.safetensors"] == [None, f"bytes={10 * 2**20}-"]
  folder = Path(done.stdout.splitlines()[-1])
  assert {name: (folder / name).read_bytes() for name in files} == files


def test_the_source_has_no_call_that_runs_code():
  for file in (ROOT / "gtpo_jax").rglob("*.py"):
    source = file.read_text()
    for word in (
      "trust_remote_code",
      "pickle.load",
      "torch.load",
      "import pickle",
      "allow_pickle=True",
    ):
      assert word not in source, file
