"""Saved folders have the loaded bytes and all files, and transformers reads them."""

import copy
import json
import shutil
import stat
import subprocess

import jax
import numpy as np
import pytest
from hf_folders import (
  hf_folder,
  our_logits,
  padded_batch,
  random_model,
  raw_tensors,
  split_file,
  torch_logits,
)
from meshes import mesh_of

from gtpo_jax.data.chat import load_chat
from gtpo_jax.models import load, save
from gtpo_jax.models.attention.rope import Yarn
from gtpo_jax.runtime.errors import UserError

INDEX = "model.safetensors.index.json"


@pytest.mark.devices
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize(
  ("dtype", "changes", "shape"),
  [
    ("float32", {}, None),
    ("bfloat16", {}, (2, 2, 1, 2)),
    ("float16", {}, None),
    ("bfloat16", {"tie_word_embeddings": False}, None),
    ("float32", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}, None),
    ("float32", {"head_dim": 16, "tie_word_embeddings": False}, (2, 2, 1, 2)),
  ],
)
@pytest.mark.some(1, slow=2)
def test_loaded_and_saved_again_every_tensor_is_byte_identical(
  dtype, changes, shape, shard_bytes, tmp_path
):
  source, _ = hf_folder(dtype, shard="20KB", **changes)
  save(
    *load(source, dtype, mesh_of(*shape) if shape else None),
    None,
    tmp_path / "out",
    shard_bytes=shard_bytes,
  )
  before = raw_tensors(source)
  after = raw_tensors(tmp_path / "out")
  assert before.keys() == after.keys()
  for name in before:
    assert before[name] == after[name], name
  assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_bytes == 20_000)


def test_shards_stay_below_the_limit_and_the_index_names_each_tensor_once(tmp_path):
  model, params = random_model()
  save(model, params, None, tmp_path / "out", shard_bytes=20_000)
  index = json.loads((tmp_path / "out" / INDEX).read_text())
  files = sorted((tmp_path / "out").glob("*.safetensors"))
  assert [file.name for file in files] == [
    f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
  ]
  sizes = [sum(len(data) for _, data in raw_tensors_of(file).values()) for file in files]
  assert max(sizes) <= 20_000 and sum(sizes) == index["metadata"]["total_size"]
  assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
  assert {name: file.name for file in files for name in raw_tensors_of(file)} == index["weight_map"]


def raw_tensors_of(file):
  header, data = split_file(file)
  return {
    name: (entry["dtype"], data[slice(*entry["data_offsets"])])
    for name, entry in header.items()
    if name != "__metadata__"
  }


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
  model, params = random_model()
  save(model, params, None, tmp_path / "out", shard_bytes=1)
  assert (
    len(list((tmp_path / "out").glob("*.safetensors"))) == len(raw_tensors(tmp_path / "out")) == 26
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(load(tmp_path / "out", "float32")[1]),
    jax.device_get(params),
  )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with every kind of file."""
  folder = tmp_path_factory.mktemp("saved") / "out"
  chat = load_chat()
  save(
    *random_model(),
    chat.tokenizer,
    folder,
    stop=chat.stop,
    files={"README.md": "# Café\n"},
    shard_bytes=20_000,
  )
  return folder


def test_the_manifest_is_what_sha256sum_checks(saved, tmp_path):
  check = lambda folder: subprocess.run(
    ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
  )
  done = check(saved)
  assert done.returncode == 0, done.stdout
  assert done.stdout.count(": OK") == len(list(saved.iterdir())) - 1  # every file but SHA256SUMS
  other = shutil.copytree(saved, tmp_path / "out")
  (other / "config.json").write_text("{}")
  assert check(other).returncode == 1


def test_files_are_complete_and_readable_by_others(saved):
  names = {file.name for file in saved.iterdir()}
  assert names >= {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "SHA256SUMS",
    INDEX,
  }
  assert (saved / "README.md").read_text(encoding="utf-8") == "# Café\n"
  for file in saved.iterdir():
    assert file.stat().st_mode & stat.S_IROTH and file.stat().st_size, file
  assert saved.stat().st_mode & 0o005 == 0o005
  assert [file.name for file in saved.parent.iterdir()] == ["out"]


def test_the_tokenizer_is_saved_too(saved):
  first = load_chat()
  again = load_chat(saved)
  messages = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1+2=<|im_end|>é"}]
  assert first.encode_prompt(messages) == again.encode_prompt(messages)
  assert (first.stop, first.pad, first.vocab_size, first.control) == (
    again.stop,
    again.pad,
    again.vocab_size,
    again.control,
  )
  assert first.tokenizer.chat_template == again.tokenizer.chat_template


def test_generation_config_lists_every_end_token(saved, tmp_path):
  chat = load_chat()
  assert json.loads((saved / "generation_config.json").read_text()) == {
    "eos_token_id": sorted(chat.stop),
    "pad_token_id": chat.pad,
  }
  transformers = pytest.importorskip("transformers")
  assert transformers.GenerationConfig.from_pretrained(saved).eos_token_id == sorted(chat.stop)
  model, params = random_model()
  save(model, params, None, tmp_path / "out", stop=[5, 3])
  assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
    "eos_token_id": [3, 5]
  }


def test_a_tokenizer_with_several_chat_templates(tmp_path):
  tokenizer = copy.deepcopy(load_chat().tokenizer)
  tokenizer.chat_template = {
    "default": tokenizer.chat_template,
    "tool_use": "{{ messages[0].content }}",
  }
  model, params = random_model()
  save(model, params, tokenizer, tmp_path / "out")
  assert (
    load_chat(tmp_path / "out").tokenizer.get_chat_template("tool_use")
    == "{{ messages[0].content }}"
  )


SHAPES = {
  "tied": {},
  "untied": {"tied": False},
  "head_dim": {"head_dim": 16},
  "odd heads": {"heads": 7, "kv_heads": 1},
  "numbers": {"rope_theta": 12345.5, "norm_eps": 1e-5, "context": 4096},
  "narrow": {"head_dim": 2, "kv_heads": 4},
  "yarn": {"context": 64, "rope_scaling": Yarn(4.0, 64)},
  "yarn of other settings": {
    "context": 256,
    "rope_theta": 100.0,
    "rope_scaling": Yarn(2.5, 64, 16.0, 0.5, 1.25),
  },
}


@pytest.mark.devices
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.some(1, slow=3)
def test_what_we_save_is_what_transformers_loads(name, tmp_path):
  """Every setting of the architecture is the same when we or transformers load the folder."""
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  model, params = random_model(**SHAPES[name])
  params = jax.tree.map(lambda x: x * 3 + 0.05, params)  # biases are not zero either
  save(model, params, None, tmp_path / "out")
  again, read = load(tmp_path / "out", "float32")
  assert again.config == model.config
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), jax.device_get(params))
  reference, report = transformers.Qwen2ForCausalLM.from_pretrained(
    tmp_path / "out", output_loading_info=True, attn_implementation="eager", local_files_only=True
  )
  assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
    report
  )
  assert reference.dtype == __import__("torch").float32
  tokens, mask = padded_batch(length=100 if "yarn" in name else 17)
  want = torch_logits(reference.eval(), tokens, mask)
  np.testing.assert_allclose(
    our_logits(model, params, tokens, mask)[mask], want[mask], rtol=0, atol=2e-4
  )
  assert np.abs(want[mask]).max() > 0.5


@pytest.mark.parametrize(
  ("kept", "asked", "code"),
  [
    ("float32", "bfloat16", "BF16"),
    ("bfloat16", "float32", "F32"),
    ("float32", "float16", "F16"),
    ("bfloat16", None, "BF16"),
  ],
)
def test_the_requested_dtype(kept, asked, code, tmp_path):
  torch = pytest.importorskip("torch")
  source, _ = hf_folder(kept)
  save(*load(source, kept), None, tmp_path / "out", dtype=asked)
  before = raw_tensors(source)
  after = raw_tensors(tmp_path / "out")
  assert {dtype for dtype, *_ in after.values()} == {code}
  assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == (
    asked or kept
  )
  as_torch = lambda entry, kind: torch.frombuffer(bytearray(entry[2]), dtype=getattr(torch, kind))
  for name in before:
    assert torch.equal(
      as_torch(before[name], kept).to(getattr(torch, asked or kept)),
      as_torch(after[name], asked or kept),
    ), name


def test_a_value_that_half_precision_cannot_represent_is_rejected(tmp_path):
  model, params = random_model()
  with pytest.raises(UserError, match=r"embedding|embed_tokens|float16"):
    save(
      model,
      params | {"embedding": params["embedding"] + 1e5},
      None,
      tmp_path / "out",
      dtype="float16",
    )


def test_bad_dtypes_are_rejected_before_anything_is_written(tmp_path):
  with pytest.raises(
    UserError, match="dtype must be one of float32, bfloat16, float16; got 'int8'"
  ):
    save(*random_model(), None, tmp_path / "out", dtype="int8")
  assert not list(tmp_path.iterdir())


def test_the_same_model_gives_the_same_files(tmp_path):
  for name in ("a", "b"):
    save(*random_model(), load_chat().tokenizer, tmp_path / name)
  assert (tmp_path / "a" / "SHA256SUMS").read_text() == (tmp_path / "b" / "SHA256SUMS").read_text()


@pytest.mark.devices
@pytest.mark.slow
def test_a_sharded_model_is_saved_as_on_one_device(tmp_path):
  model, params = random_model()
  save(model, params, None, tmp_path / "one")
  save(*load(tmp_path / "one", "float32", mesh_of(2, 2, 1, 2)), None, tmp_path / "eight")
  assert (tmp_path / "one" / "SHA256SUMS").read_text() == (
    tmp_path / "eight" / "SHA256SUMS"
  ).read_text()
