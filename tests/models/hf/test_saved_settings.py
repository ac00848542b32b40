"""The tokenizer, config.json and generation_config.json of a saved folder suit other programs."""

import importlib.metadata
import json
import shutil

import pytest
from hf_folders import edit_json, random_model

from gtpo_jax.data.chat import TOKENIZER_DIR, load_chat
from gtpo_jax.models import PRESETS, save
from gtpo_jax.models.hf.save import LOADING_ARGUMENTS
from gtpo_jax.runtime.errors import UserError

EXTRA = [f"<|extra_{i}|>" for i in range(13)]
QWEN_GENERATION = {
  "bos_token_id": 60,
  "pad_token_id": 381,
  "do_sample": True,
  "eos_token_id": [383, 381],
  "repetition_penalty": 1.05,
  "temperature": 0.7,
  "top_p": 0.8,
  "top_k": 20,
  "transformers_version": "4.37.0",
}


@pytest.fixture
def source(tmp_path):
  """A folder with the settings of Qwen2.5-Instruct: special tokens without a role, and sampling."""
  folder = shutil.copytree(TOKENIZER_DIR, tmp_path / "source")
  edit_json(folder / "tokenizer_config.json", additional_special_tokens=EXTRA)
  (folder / "config.json").write_text('{"model_type": "qwen2", "bos_token_id": 61}')
  (folder / "generation_config.json").write_text(json.dumps(QWEN_GENERATION))
  return folder


def read(folder, name):
  return json.loads((folder / name).read_text(encoding="utf-8"))


def test_special_tokens_have_the_name_that_transformers_4_reads(source, tmp_path):
  chat = load_chat(source)
  save(*random_model(), chat.tokenizer, tmp_path / "out")
  values = read(tmp_path / "out", "tokenizer_config.json")
  assert values["additional_special_tokens"] == EXTRA
  assert not isinstance(values.get("extra_special_tokens"), list)  # Transformers 4 needs an object
  assert values.keys().isdisjoint({*LOADING_ARGUMENTS, "name_or_path"})
  again = load_chat(tmp_path / "out")
  assert set(EXTRA) <= set(again.control)
  assert again.control == chat.control
  assert again.tokenizer.all_special_tokens == chat.tokenizer.all_special_tokens
  assert again.tokenizer.get_vocab() == chat.tokenizer.get_vocab()
  save(*random_model(), again.tokenizer, tmp_path / "again")  # nothing changes from here on
  assert read(tmp_path / "again", "tokenizer_config.json") == values


def test_special_tokens_with_names_stay_an_object(tmp_path):
  source = shutil.copytree(TOKENIZER_DIR, tmp_path / "source")
  edit_json(source / "tokenizer_config.json", extra_special_tokens={"image_token": "<|image|>"})
  save(*random_model(), load_chat(source).tokenizer, tmp_path / "out")
  values = read(tmp_path / "out", "tokenizer_config.json")
  assert load_chat(tmp_path / "out").tokenizer.image_token == "<|image|>"
  assert "image_token" in values or values["extra_special_tokens"] == {"image_token": "<|image|>"}


def test_config_json_names_the_version_of_transformers(tmp_path):
  save(*random_model(), None, tmp_path / "out")
  version = importlib.metadata.version("transformers")
  assert read(tmp_path / "out", "config.json")["transformers_version"] == version


def test_the_sources_defaults_are_kept(source, tmp_path):
  chat = load_chat(source)
  save(*random_model(), chat.tokenizer, tmp_path / "out", stop=chat.stop, source=source)
  config = read(tmp_path / "out", "config.json")
  assert (config["bos_token_id"], config["eos_token_id"]) == (61, 383)
  generation = dict(QWEN_GENERATION)
  del generation["transformers_version"]
  assert read(tmp_path / "out", "generation_config.json") == generation | {
    "eos_token_id": [381, 383]
  }


def test_the_tokenizers_own_bos_token_precedes_the_sources(source, tmp_path):
  edit_json(source / "tokenizer_config.json", bos_token="<|im_start|>")
  save(*random_model(), load_chat(source).tokenizer, tmp_path / "out", source=source)
  assert read(tmp_path / "out", "config.json")["bos_token_id"] == 382
  assert read(tmp_path / "out", "generation_config.json")["bos_token_id"] == 382


def test_only_numbers_are_kept(source, tmp_path):
  edit_json(source / "config.json", bos_token_id=[1, 2])
  edit_json(source / "generation_config.json", bos_token_id=True, top_p={"a": 1}, top_k="20")
  save(*random_model(), None, tmp_path / "out", source=source)
  assert "bos_token_id" not in read(tmp_path / "out", "config.json")
  assert read(tmp_path / "out", "generation_config.json") == {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
  }


def test_a_damaged_source_is_named_before_anything_is_written(source, tmp_path):
  (source / "generation_config.json").write_text("{")
  with pytest.raises(UserError, match=r"generation_config\.json.*not valid JSON"):
    save(*random_model(), None, tmp_path / "out", source=source)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_the_vocabulary_has_a_size_of_its_own(name):
  """ONNX Runtime GenAI takes the matrix with as many outputs as the vocabulary for the head."""
  preset = PRESETS[name]
  others = {preset.mlp, preset.width, preset.heads * preset.head_dim}
  assert preset.vocab_size not in {*others, preset.kv_heads * preset.head_dim}
