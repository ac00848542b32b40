"""Models that have other parts than text: the text loads, the rest comes back in exports."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from family_cases import FAMILY_CASES
from hf_folders import TINY, hf_folder, our_logits, padded_batch, raw_tensors, torch_logits

from gtpo_jax.models import load, save, save_adapter
from gtpo_jax.models.hf.config_json import describe_unused_keys
from gtpo_jax.models.hf.load import split_names, stored_tensors
from gtpo_jax.models.lora import add_lora

VISION_OF_QWEN = {
  "depth": 1,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_heads": 2,
  "patch_size": 4,
  "out_hidden_size": 32,
  "num_position_embeddings": 16,
}
VISION = {
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 28,
  "patch_size": 14,
}


@pytest.fixture(scope="module", params=["gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def source(request):
  """A folder with a vision tower, and the torch model."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  text = {key: value for key, value in FAMILY_CASES[request.param].items() if key != "model_type"}
  torch.manual_seed(0)
  if request.param == "gemma3":
    config = transformers.Gemma3Config(
      text_config=TINY | text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=63
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
  else:
    config = transformers.Qwen3_5Config(
      text_config=TINY | text, vision_config=VISION_OF_QWEN, image_token_id=63
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
  with torch.no_grad():
    for weights in model.parameters():
      weights.add_(0.15 * torch.randn(weights.shape))
  folder = Path(tempfile.mkdtemp(prefix="gtpo_hf_")) / "hf"
  model.save_pretrained(folder)
  (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
  if request.param == "qwen3_5":
    add_prediction_head(folder)
  return folder, model


def add_prediction_head(folder):
  """Adds what published folders have and Transformers ignores: the head for several tokens."""
  import safetensors.numpy

  head = {
    "mtp.fc.weight": np.ones((32, 64), np.float16),
    "mtp.norm.weight": np.ones(32, np.float16),
  }
  safetensors.numpy.save_file(head, folder / "mtp.safetensors")
  config = folder / "config.json"
  values = json.loads(config.read_text())
  values["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True}
  values["text_config"]["rope_parameters"]["mrope_interleaved"] = True
  config.write_text(json.dumps(values))


@pytest.mark.slow
def test_the_text_is_that_of_transformers(source):
  folder, reference = source
  tokens, mask = padded_batch(vocab=63, length=40)
  want = torch_logits(reference, tokens, mask)
  got = our_logits(*load(folder, "float32"), tokens, mask)
  np.testing.assert_allclose(got[mask], want[mask], rtol=0, atol=1e-5 * np.abs(want[mask]).max())
  assert describe_unused_keys(folder) == ""


def test_what_is_not_trained_is_carried_to_the_export_byte_for_byte(source, tmp_path):
  transformers = pytest.importorskip("transformers")
  folder, reference = source
  model, params = load(folder, "float32")
  trained = {**params, "embedding": params["embedding"] * 2}
  save(model, trained, None, tmp_path / "out", source=folder, dtype="bfloat16", shard_bytes=20_000)
  before, after = raw_tensors(folder), raw_tensors(tmp_path / "out")
  parts = split_names(before)
  assert len(parts.others) > 15
  assert any(name.startswith("mtp.") for name in before) == ("mtp.fc.weight" in parts.others)
  values, kept = (json.loads((x / "config.json").read_text()) for x in (tmp_path / "out", folder))
  for key in ("mtp_num_hidden_layers", "rope_parameters", "layer_types"):
    assert values["text_config"].get(key) == kept["text_config"].get(key)
  assert before.keys() == after.keys()
  for name in parts.others:
    assert before[name] == after[name]
  assert {after[name][0] for name in parts.text.values()} == {"BF16"}
  assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
  again, report = transformers.AutoModelForImageTextToText.from_pretrained(
    tmp_path / "out", dtype="float32", output_loading_info=True
  )
  assert type(again) is type(reference)
  assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  ours = our_logits(*load(tmp_path / "out", "float32"), *padded_batch(vocab=63))
  mask = padded_batch(vocab=63)[1]
  want = torch_logits(again.eval(), *padded_batch(vocab=63))
  np.testing.assert_allclose(ours[mask], want[mask], rtol=0, atol=1e-5 * np.abs(want[mask]).max())


@pytest.mark.slow
def test_both_ways_to_name_the_text_are_read(source, tmp_path):
  safetensors = pytest.importorskip("safetensors.numpy")
  folder, _ = source
  parts = split_names(stored_tensors(folder))
  tensors = safetensors.load_file(folder / "model.safetensors")
  for prefix in ("language_model.model.", "model.language_model."):
    inner = {name: stored for name, stored in parts.text.items() if name.startswith("model.")}
    renamed = {stored: prefix + name.removeprefix("model.") for name, stored in inner.items()}
    other = tmp_path / prefix
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    out = {renamed.get(name, name): x for name, x in tensors.items()}
    safetensors.save_file(out, other / "model.safetensors")
    _, params = load(other, "float32")
    np.testing.assert_array_equal(params["embedding"], load(folder, "float32")[1]["embedding"])


def test_without_its_source_the_text_model_is_saved(source, tmp_path):
  folder, _ = source
  save(*load(folder, "float32"), None, tmp_path / "out")
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  family = values["architectures"][0].removesuffix("ForCausalLM").lower()
  plain = raw_tensors(hf_folder(**FAMILY_CASES[family])[0])
  assert raw_tensors(tmp_path / "out").keys() == plain.keys()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_adapters_are_those_of_the_whole_model(source, tmp_path):
  import jax
  from adapters import with_lora
  from flax.traverse_util import flatten_dict, unflatten_dict

  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  folder, _ = source
  plain, params = load(folder, "float32")
  model = with_lora(plain)
  flat = flatten_dict(add_lora(model, params, jax.random.key(1)))
  flat = {path: x + 0.1 if path[-1] == "lora_b" else x for path, x in flat.items()}
  params = unflatten_dict(flat)
  tokens, mask = padded_batch(vocab=63)
  save_adapter(model, params, tmp_path / "out", str(folder), source=folder)
  base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
  loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
  want = our_logits(model, params, tokens, mask)[mask]
  np.testing.assert_allclose(torch_logits(loaded, tokens, mask)[mask], want, rtol=0, atol=2e-4)
