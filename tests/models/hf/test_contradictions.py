"""Folders that say one thing twice, and differently, are refused in one line with both values."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from family_cases import FAMILY_CASES
from hf_folders import edit_json, hf_folder, join_file, split_file
from hostile import INDEX, first_shard, rejection, weights

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models import load
from gtpo_jax.models.hf.config_json import describe_unused_keys, read_config
from gtpo_jax.models.hf.folder import find, is_hf_folder
from gtpo_jax.models.hf.load import split_names
from gtpo_jax.runtime.errors import UserError

FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"


def of_family(name, folder):
  return Path(shutil.copytree(hf_folder(**FAMILY_CASES[name])[0], folder / "home" / "hf"))


# Family, changes of its config.json, and what the line says.
CONFIGS = [
  ("gemma3", {"sliding_window_pattern": 3}, ("layer_types[1]", FULL, "pattern = 3", WINDOW)),
  ("gemma3", {"_sliding_window_pattern": 5}, ("layer_types[1]", FULL, "_pattern = 5", WINDOW)),
  ("qwen3_5", {"full_attention_interval": 2}, ("layer_types[1]", DELTA, "interval = 2", FULL)),
  ("smollm3", {"no_rope_layer_interval": 3}, ("no_rope_layers[1] = 0", "interval = 3", "True")),
  ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1, 1]}, ("[1, 0, 1, 0, 1, 1]", "each of the 5")),
  ("qwen3_moe-dense", {"mlp_only_layers": [1, 5]}, ("[1, 5]", "num_hidden_layers = 5", "layer 5")),
  ("qwen3_moe-dense", {"mlp_only_layers": [-1]}, ("[-1]", "num_hidden_layers = 5", "layer -1")),
  (
    "qwen3_moe",
    {"num_experts": 5, "num_local_experts": 4},
    ("num_experts = 5", "num_local_experts = 4"),
  ),
  (
    "olmoe",
    {"num_experts": 7, "num_local_experts": 8},
    ("num_experts = 7", "num_local_experts = 8"),
  ),
  ("qwen2_moe", {"n_routed_experts": 9}, ("num_experts = 5", "n_routed_experts = 9")),
  (
    "qwen3_5",
    {"partial_rotary_factor": 0.5},
    ("partial_rotary_factor = 0.5", "rope_parameters.partial_rotary_factor = 0.25"),
  ),
  ("gemma3", {"hidden_act": "relu"}, ("hidden_act = 'relu'", "gelu_pytorch_tanh")),
  ("qwen2", {"hidden_activation": "gelu"}, ("hidden_activation = 'gelu'", "'silu'")),
  ("llama", {"activation_function": "gelu_new"}, ("activation_function = 'gelu_new'", "'silu'")),
  ("olmo3", {"sliding_window_pattern": 2}, ("layer_types[1]", WINDOW, "pattern = 2", FULL)),
  ("llama", {"tie_word_embeddings": True, "tie_weights": False}, ("= True", "tie_weights = False")),
  (
    "qwen2",
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "rope_type": "yarn"}},
    ("rope_scaling.rope_type = 'yarn'", "rope_scaling.type = 'linear'"),
  ),
  ("llama", {"n_layer": 3}, ("num_hidden_layers = 2", "n_layer = 3")),
  ("llama", {"num_kv_heads": 4}, ("num_key_value_heads = 2", "num_kv_heads = 4")),
  ("llama", {"kv_channels": 99}, ("head_dim = 8", "kv_channels = 99")),
  ("llama", {"layer_norm_eps": 0.5}, ("rms_norm_eps = 1e-06", "layer_norm_eps = 0.5")),
  ("llama", {"d_ff": 9}, ("intermediate_size = ", "d_ff = 9")),
  ("llama", {"model_type": "mistral"}, ("'mistral'", "['LlamaForCausalLM']")),
  ("llama", {"architectures": ["Qwen2ForCausalLM"]}, ("'llama'", "['Qwen2ForCausalLM']")),
  ("llama", {"is_causal": False}, ("is_causal = False", "only True is supported")),
]
# What says the same twice, or is the default that Transformers writes beside every list.
AGREEING = [
  ("gemma3", {"sliding_window_pattern": 2, "hidden_act": "gelu_pytorch_tanh"}),
  ("gemma3", {"_sliding_window_pattern": 6}),
  ("qwen3_5", {"full_attention_interval": 4, "partial_rotary_factor": 0.25}),
  ("smollm3", {"no_rope_layer_interval": 2}),
  ("smollm3", {"no_rope_layer_interval": 4}),
  ("qwen3_moe-dense", {"mlp_only_layers": [0, 4]}),
  ("qwen3_moe", {"num_experts": 5, "num_local_experts": 5}),
  ("llama", {"n_layer": 2, "hidden_activation": "silu"}),
]


@pytest.mark.parametrize(("family", "changes", "parts"), CONFIGS, ids=lambda x: str(x)[:40])
def test_two_values_of_one_setting(family, changes, parts, tmp_path):
  folder = of_family(family, tmp_path)
  edit_json(folder / "config.json", **changes)
  line = rejection(folder)
  assert all(part in line for part in parts), line


@pytest.mark.parametrize(("family", "changes"), AGREEING, ids=str)
def test_one_setting_twice_in_agreement(family, changes, tmp_path):
  folder = of_family(family, tmp_path)
  edit_json(folder / "config.json", **changes)
  read_config(folder, "float32")


def test_sizes_beside_those_of_the_text_model(tmp_path):
  folder = of_family("gemma3", tmp_path)
  text = json.loads((folder / "config.json").read_text())
  whole = {"model_type": "gemma3", "text_config": text, "hidden_size": 32}
  (folder / "config.json").write_text(json.dumps(whole))
  assert read_config(folder, "float32").width == 32
  (folder / "config.json").write_text(json.dumps(whole | {"hidden_size": 64}))
  line = rejection(folder)
  assert "hidden_size = 64 and text_config.hidden_size = 32" in line


def test_a_key_twice(folder):
  file = folder / "config.json"
  text = file.read_text()
  file.write_text(text.rstrip().removesuffix("}") + ', "vocab_size": 65}')
  assert "has the key 'vocab_size' twice (64 and 65)" in rejection(folder)
  file.write_text(text.rstrip().removesuffix("}") + ', "x": {"a": [1], "a": [2]}}')
  assert "has the key 'a' twice ([1] and [2])" in rejection(folder)


def test_a_tensor_twice_in_the_index(shards):
  text = (shards / INDEX).read_text()
  entry = '"model.norm.weight": "model-00001-of-00009.safetensors"'
  (shards / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{{entry},'))
  assert "has the key 'model.norm.weight' twice" in rejection(shards)


def test_a_shard_with_a_tensor_that_the_index_lacks(shards):
  values = json.loads((shards / INDEX).read_text())
  name, file = next(iter(values["weight_map"].items()))
  del values["weight_map"][name]
  (shards / INDEX).write_text(json.dumps(values))
  assert rejection(shards) == f"{file} has the tensor {name}, but {INDEX} does not list it there"


def test_both_prefixes_of_the_text_model():
  names = ("language_model.model.norm.weight", "model.language_model.norm.weight")
  for both in (names, names[::-1], ("lm_head.weight", "language_model.lm_head.weight")):
    with pytest.raises(UserError, match="tensors of one parameter") as caught:
      split_names(both)
    assert all(name in str(caught.value) for name in both)
  assert len(split_names((names[0], "lm_head.weight", "vision_tower.x")).text) == 2


@pytest.mark.parametrize("value", [1e5, -7e4])
def test_weights_beyond_float16(value, folder):
  header, data = split_file(weights(folder))
  at = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0] + 40
  join_file(weights(folder), header, data[:at] + np.float32(value).tobytes() + data[at + 4 :])
  load(folder, "bfloat16")
  line = rejection(folder, lambda folder: load(folder, "float16"))
  assert f"as large as {abs(value):g}, in layers/up/kernel, but float16 ends at 65504" in line


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "other", "shard", INDEX])
def test_a_pipe_is_not_waited_for(name, shards):
  file = first_shard(shards) if name == "shard" else shards / name
  file.unlink(missing_ok=True)
  os.mkfifo(file)
  with pytest.raises(UserError, match="is not a regular file; copy its contents into one"):
    find(str(shards))
  if name != "other":
    with pytest.raises(UserError, match=r"is not a regular file|has model\.safetensors and"):
      load(shards, "float32")
  is_hf_folder(shards)


def test_a_pipe_among_the_files_of_the_tokenizer(tmp_path):
  folder = Path(shutil.copytree(TOKENIZER_DIR, tmp_path / "tokenizer"))
  (folder / "tokenizer_config.json").unlink()
  os.mkfifo(folder / "tokenizer_config.json")
  with pytest.raises(UserError, match="is not a regular file"):
    load_chat(folder)


SURROGATE = "\ud800"


def test_names_that_are_no_text(shards, capfd):
  edit_json(shards / "config.json", **{SURROGATE: 1})
  assert "\\ud800" in describe_unused_keys(shards)
  load(shards, "float32")
  assert "\\ud800" in capfd.readouterr().err
  values = json.loads((shards / INDEX).read_text())
  original = dict(values["weight_map"])
  values["weight_map"][SURROGATE] = next(iter(original.values()))
  (shards / INDEX).write_text(json.dumps(values))
  rejection(shards).encode()
  values["weight_map"] = original | {"model.norm.weight": f"{SURROGATE}.safetensors"}
  (shards / INDEX).write_text(json.dumps(values))
  rejection(shards).encode()
  with pytest.raises(UserError) as caught:
    find(f"/tmp/{SURROGATE}")
  str(caught.value).encode()


@pytest.mark.parametrize(
  "changes",
  [
    {"model_type": SURROGATE},
    {"hidden_act": SURROGATE},
    {"layer_types": [SURROGATE] * 2},
    {"rope_parameters": {"rope_type": "default", SURROGATE: 1}},
  ],
)
def test_values_that_are_no_text(changes, folder):
  edit_json(folder / "config.json", **changes)
  rejection(folder).encode()
