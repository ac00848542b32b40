"""Every family: the same numbers, files and settings as in transformers."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import RANK, with_lora
from family_cases import FAMILY_CASES, LLAMA3, MIXTURES, NEWER
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import (
  edit_json,
  hf_folder,
  our_greedy,
  our_logits,
  padded_batch,
  per_expert,
  raw_tensors,
  split_file,
  torch_greedy,
  torch_logits,
)
from meshes import mesh_of

from gtpo_jax.models import PRESETS, Transformer, abstract_params, load, save, save_adapter
from gtpo_jax.models.attention.rope import Llama3Scaling
from gtpo_jax.models.config import LORA_TARGETS
from gtpo_jax.models.hf.config_json import read_config, to_hf_config
from gtpo_jax.models.hf.weights import hf_from_params, hf_shapes
from gtpo_jax.models.kinds import LayerKind
from gtpo_jax.models.lora import add_lora, merge_lora, without_lora
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.sampling.settings import EngineConfig

PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]
PUBLISHED = {  # numbers of parameters, as on the models' pages
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-1.5b": 1_543_714_304,
  "qwen2.5-3b": 3_085_938_688,
  "qwen2.5-7b": 7_615_616_512,
  "qwen2.5-14b": 14_770_033_664,
  "qwen2.5-32b": 32_763_876_352,
  "qwen2.5-72b": 72_706_203_648,
  "qwen3-0.6b": 596_049_920,
  "qwen3-1.7b": 1_720_574_976,
  "qwen3-4b": 4_022_468_096,
  "qwen3-8b": 8_190_735_360,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "llama-3-8b": 8_030_261_248,
  "llama-3-70b": 70_553_706_496,
  "llama-3.1-8b": 8_030_261_248,
  "llama-3.1-70b": 70_553_706_496,
  "llama-3.2-1b": 1_235_814_400,
  "llama-3.2-3b": 3_212_749_824,
  "llama-3.3-70b": 70_553_706_496,
  "mistral-7b-v0.2": 7_241_732_096,
  "mistral-7b-v0.3": 7_248_023_552,
  "r1-distill-qwen-1.5b": 1_777_088_000,
  "r1-distill-qwen-7b": 7_615_616_512,
  "r1-distill-llama-8b": 8_030_261_248,
  "gemma-3-270m": 268_098_176,
  "gemma-3-1b": 999_885_952,
  "gemma-3-4b": 3_880_263_168,  # without the vision tower
  "smollm3-3b": 3_075_098_624,
  "olmo-2-1b": 1_484_916_736,
  "olmo-2-7b": 7_298_617_344,
  "olmo-3-7b": 7_298_011_136,
  # Qwen3.5 without the vision tower and the head for several tokens
  "qwen3.5-0.8b": 752_393_024,
  "qwen3.5-2b": 1_881_825_088,
  "qwen3.5-4b": 4_205_751_296,
  "qwen3.5-9b": 8_953_803_264,
  "qwen3.5-27b": 26_895_998_464,
  "qwen3-30b-a3b": 30_532_122_624,
  "qwen3-235b-a22b": 235_093_634_560,
  "qwen1.5-moe-a2.7b": 14_315_784_192,
  "olmoe-1b-7b": 6_919_161_856,
}


@pytest.fixture(params=FAMILY_CASES)
def case(request):
  """The settings of one of the small models."""
  return FAMILY_CASES[request.param]


@pytest.mark.parametrize(
  "shape",
  [None, pytest.param((2, 2, 1, 2), marks=[pytest.mark.slow, pytest.mark.devices])],
  ids=["one", "2x2x2"],
)
@pytest.mark.some(2, slow=4)
def test_logits_equal_those_of_transformers(case, shape):
  folder, reference = hf_folder(**case)
  tokens, mask = padded_batch(length=100)
  want = torch_logits(reference, tokens, mask)
  assert np.abs(want[mask]).max() > 2
  mesh = mesh_of(*shape) if shape else None
  got = our_logits(*load(folder, "float32", mesh), tokens, mask)
  np.testing.assert_allclose(got[mask], want[mask], rtol=0, atol=1e-5 * np.abs(want[mask]).max())


@pytest.mark.some(1, slow=1)
def test_bfloat16_logits_are_near(case):
  folder, reference = hf_folder("bfloat16", **case)
  tokens, mask = padded_batch()
  got = our_logits(*load(folder), tokens, mask)[mask]
  want = torch_logits(reference.float(), tokens, mask)[mask]
  reference.bfloat16()
  assert np.abs(got - want).mean() < 0.02 * np.abs(want).mean()


@pytest.mark.parametrize(
  ("name", "attention"),
  [
    *((name, "xla") for name in ("qwen2", "qwen3", *NEWER)),
    *((name, "triton") for name in ("gemma3", "qwen3_5")),
    *((name, "xla") for name in ("qwen2_moe", "olmoe")),
    ("qwen3_moe", "triton"),
    *(pytest.param(name, "xla", marks=pytest.mark.manual) for name in MIXTURES[:2]),
    *(pytest.param(name, "triton", marks=pytest.mark.manual) for name in MIXTURES[1:]),
    *(pytest.param(name, "pallas", marks=pytest.mark.manual) for name in MIXTURES),
    *(pytest.param(name, "xla", marks=pytest.mark.manual) for name in ("llama", "mistral")),
    *(pytest.param(name, "triton", marks=pytest.mark.manual) for name in NEWER[:-2]),
    *(pytest.param(name, "pallas", marks=pytest.mark.manual) for name in NEWER),
  ],
)
@pytest.mark.slow
def test_sixty_four_greedy_tokens_equal_generate(name, attention):
  folder, reference = hf_folder(**FAMILY_CASES[name])
  want = torch_greedy(reference, PROMPTS, 64)
  assert len(np.unique(want)) > 5  # the text is not one repeated token
  config = EngineConfig(attention=attention, **({} if attention == "xla" else {"page_size": 16}))
  got = our_greedy(*load(folder, "float32"), PROMPTS, 64, config=config)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NEWER + MIXTURES)
@pytest.mark.slow
def test_gradients_equal_those_of_torch(name):
  torch = pytest.importorskip("torch")
  folder, reference = hf_folder(**FAMILY_CASES[name])
  tokens, _ = padded_batch(length=40)
  model, params = load(folder, "float32")

  def loss(params):
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens))
    return -jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], -1).mean()

  got = dict(hf_from_params(model, jax.jit(jax.grad(loss))(params)))
  reference.zero_grad()
  log_probs = torch.log_softmax(reference(torch.from_numpy(tokens)).logits, -1)
  torch_tokens = torch.from_numpy(tokens)[:, 1:, None]
  (-log_probs[:, :-1].gather(-1, torch_tokens).mean()).backward()
  want = per_expert({name: x.grad.numpy() for name, x in reference.named_parameters()})
  reference.zero_grad()
  assert want.keys() >= got.keys()
  for name, x in got.items():
    np.testing.assert_allclose(x, want[name], rtol=0, atol=1e-5 * np.abs(want[name]).max() + 1e-7)


def test_loaded_and_saved_again_every_tensor_is_byte_identical(case, tmp_path):
  source, _ = hf_folder("bfloat16", **case)
  model, params = load(source, "bfloat16")
  save(model, params, None, tmp_path / "out")
  assert raw_tensors(tmp_path / "out") == raw_tensors(source)
  assert read_config(tmp_path / "out", "bfloat16") == model.config
  header, _ = split_file(source / "model.safetensors")
  header.pop("__metadata__", None)
  assert {name: tuple(entry["shape"]) for name, entry in header.items()} == hf_shapes(model)


@pytest.mark.some(3, slow=2)
def test_transformers_reads_what_we_save(case, tmp_path):
  transformers = pytest.importorskip("transformers")
  source, reference = hf_folder(**case)
  save(*load(source, "float32"), None, tmp_path / "out")
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", attn_implementation="eager", output_loading_info=True
  )
  assert type(again) is type(reference)
  assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  tokens, mask = padded_batch(length=100)
  want = torch_logits(reference, tokens, mask)
  np.testing.assert_array_equal(torch_logits(again.eval(), tokens, mask), want)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT about transformers
@pytest.mark.filterwarnings("ignore:.*pattern keys did not match")  # for fused experts
@pytest.mark.parametrize(
  "name",
  [
    *("qwen3", "gemma3", "qwen3_5"),
    *(
      pytest.param(x, marks=pytest.mark.manual)
      for x in ("llama-untied", "qwen3_moe", "qwen2_moe", "olmoe", *NEWER[:-2])
    ),
  ],
)
@pytest.mark.slow
def test_adapters_equal_those_of_peft_and_merge(name, tmp_path):
  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  folder, _ = hf_folder(**FAMILY_CASES[name])
  plain, params = load(folder, "float32")
  targets = ("q", "o", "experts") if name in ("qwen3_moe", "olmoe") else LORA_TARGETS
  model = with_lora(plain, targets=targets)
  flat = flatten_dict(add_lora(model, params, jax.random.key(1)))
  flat |= {
    path: 0.2 * jax.random.normal(jax.random.key(i), x.shape)
    for i, (path, x) in enumerate(flat.items())
    if path[-1] == "lora_b"
  }
  params = unflatten_dict(flat)
  tokens, mask = padded_batch()
  want = our_logits(model, params, tokens, mask)[mask]
  merged = our_logits(without_lora(model), merge_lora(model, params), tokens, mask)[mask]
  np.testing.assert_allclose(merged, want, rtol=0, atol=1e-4)
  save_adapter(model, params, tmp_path / "out", str(folder))
  base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
  loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
  np.testing.assert_allclose(torch_logits(loaded, tokens, mask)[mask], want, rtol=0, atol=2e-4)
  assert (
    np.abs(want - torch_logits(hf_folder(**FAMILY_CASES[name])[1], tokens, mask)[mask]).max() > 0.5
  )
  assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == RANK


def test_llama3_scaling_in_both_spellings(tmp_path):
  source, _ = hf_folder(**FAMILY_CASES["llama"])
  newer = read_config(source, "float32")
  assert newer.rope_scaling == Llama3Scaling(8.0, 64, 1.0, 4.0)
  assert (newer.rope_theta, newer.max_length) == (100.0, 128)
  older = shutil.copytree(source, tmp_path / "older")
  edit_json(older / "config.json", rope_parameters=None, rope_theta=100.0, rope_scaling=LLAMA3)
  assert read_config(older, "float32") == newer
  written = to_hf_config(newer, "float32")
  assert (written["rope_scaling"], written["rope_theta"]) == (LLAMA3, 100.0)


def test_llama3_scaling_by_hand():
  scaling = Llama3Scaling(factor=8.0, original=100, low_freq_factor=1.0, high_freq_factor=4.0)
  rotations = np.array([5.0, 4.0, 2.5, 1.0, 0.5])  # over 100 positions
  scaled, factor = scaling.scale(rotations * 2 * np.pi / 100, 1e4)
  want = [5.0, 4.0, 0.5 * 2.5 + 0.5 * 2.5 / 8, 1 / 8, 0.5 / 8]
  np.testing.assert_allclose(scaled * 100 / (2 * np.pi), want, rtol=1e-12)
  assert factor == 1.0


def test_rotary_frequencies_in_a_folder_are_ignored(tmp_path):
  """Folders of early Llamas store them, although they follow from the config."""
  safetensors = pytest.importorskip("safetensors.numpy")
  source, _ = hf_folder(**FAMILY_CASES["llama"])
  folder = shutil.copytree(source, tmp_path / "hf")
  tensors = safetensors.load_file(folder / "model.safetensors")
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  safetensors.save_file(tensors, folder / "model.safetensors")
  both = [jax.device_get(load(place, "float32")[1]) for place in (folder, source)]
  jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "gpt2"}, "unknown model_type 'gpt2'.*supported are qwen2, qwen3, llama"),
    ({"model_type": "qwen3"}, "qwen3 models have biases in q, k, v, o; got q, k, v"),
    ({"biases": ()}, "qwen2 models have biases in q, k, v; got none"),
    ({"model_type": "mistral"}, "mistral models have biases in no matrix; got q, k, v"),
    ({"model_type": "llama"}, "in q, k, v, o and/or gate, up, down; got q, k, v"),
    ({"query_scalar": 8.0}, "qwen2 models have no query_scalar, got 8.0"),
    ({"kinds": (LayerKind(5),)}, "qwen2 models have no layers of such kinds"),
    ({"kinds": (LayerKind(rotates=False),)}, "qwen2 models have no layers of such kinds"),
  ],
)
def test_a_family_cannot_have_features_of_another(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(PRESETS["tiny"], **changes)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_tensors(preset):
  model = Transformer(PRESETS[preset], single_device_mesh())
  shapes = hf_shapes(model)
  assert sum(int(np.prod(shape)) for shape in shapes.values()) == PUBLISHED[preset]
  assert sum(x.size for x in jax.tree.leaves(abstract_params(model))) == PUBLISHED[preset]
  norms = any(name.endswith("self_attn.q_norm.weight") for name in shapes)
  assert norms == preset.startswith(("qwen3", "gemma", "olmo"))
