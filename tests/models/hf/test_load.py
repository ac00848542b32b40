"""Folders that transformers saved: the same logits and greedy text as torch, on every mesh."""

import shutil

import jax
import numpy as np
import pytest
from hf_folders import hf_folder, our_greedy, our_logits, padded_batch, torch_greedy, torch_logits
from meshes import mesh_of

from gtpo_jax.models import PRESETS, Transformer, abstract_params, load
from gtpo_jax.models.hf.weights import hf_shapes
from gtpo_jax.runtime.mesh import single_device_mesh

SHARDED = "20KB"
SEVEN_ONE = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
SIX_TWO = {
  "hidden_size": 48,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "tie_word_embeddings": False,
}
WIDE_HEADS = {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": None, "rope_theta": 5e4}
PROMPTS = [[5, 9, 1], [2], [4, 4, 8, 30, 21], [40, 41]]


def mesh_for(shape):
  return mesh_of(*shape) if shape else single_device_mesh()


LAYOUTS = {  # by name: changes of the config, the size of a file, and the mesh
  "tied": ({}, "5GB", None),
  "tied-sharded-2x2x2": ({}, SHARDED, (2, 2, 1, 2)),
  "untied-sharded": ({"tie_word_embeddings": False}, SHARDED, None),
  "untied-2x2x2": ({"tie_word_embeddings": False}, "5GB", (2, 2, 1, 2)),
  "7/1": (SEVEN_ONE, "5GB", None),
  "7/1-sharded-2x4x1": (SEVEN_ONE, SHARDED, (2, 4, 1, 1)),
  "6/2-untied-2x2x2": (SIX_TWO, "5GB", (2, 2, 1, 2)),
  "head_dim": (WIDE_HEADS, "5GB", None),
  "head_dim-sharded-1x2x4": (WIDE_HEADS, SHARDED, (1, 2, 1, 4)),
}


@pytest.mark.devices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.some(1, slow=2)
def test_logits_equal_those_of_transformers(layout):
  changes, shard, shape = LAYOUTS[layout]
  folder, reference = hf_folder(shard=shard, **changes)
  assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == SHARDED)
  model, params = load(folder, dtype="float32", mesh=mesh_for(shape))
  tokens, mask = padded_batch()
  want = torch_logits(reference, tokens, mask)
  assert np.abs(want[mask]).max() > 2
  np.testing.assert_allclose(
    our_logits(model, params, tokens, mask)[mask], want[mask], rtol=0, atol=2e-4
  )


@pytest.mark.slow
def test_greedy_text_ends_where_that_of_generate_does():
  folder, reference = hf_folder()
  stop = [int(x) for x in torch_greedy(reference, PROMPTS, 64)[[0, 1], [5, 20]]]
  want = torch_greedy(reference, PROMPTS, 64, stop)
  assert not want[0, -1]  # the first row has ended
  np.testing.assert_array_equal(our_greedy(*load(folder, "float32"), PROMPTS, 64, stop), want)


@pytest.mark.devices
def test_a_sharded_folder_is_split_by_axes_and_equal_to_one_file():
  whole = hf_folder()[0]
  cut = hf_folder(shard=SHARDED)[0]
  _, plain = load(whole, "float32")
  model, placed = load(str(cut), "float32", mesh_of(2, 2, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(plain), jax.device_get(placed))
  jax.tree.map(
    lambda x, like: x.sharding == like.sharding or pytest.fail(f"{x.sharding} {like.sharding}"),
    placed,
    abstract_params(model),
  )
  assert placed["layers"]["up"]["kernel"].addressable_shards[0].data.shape == (2, 16, 24)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("requested", ["float32", "bfloat16"])
@pytest.mark.some(3)
def test_number_formats_are_converted_as_torch_does(stored, requested):
  torch = pytest.importorskip("torch")
  folder, reference = hf_folder(stored)
  model, params = load(folder, requested)
  assert {str(x.dtype) for x in jax.tree.leaves(params)} == {requested}
  assert (model.config.param_dtype, model.config.compute_dtype) == (requested, requested)
  want = reference.model.embed_tokens.weight.detach().to(getattr(torch, requested)).float().numpy()
  np.testing.assert_array_equal(np.asarray(params["embedding"].astype("float32")), want)


def test_generation_config_is_not_needed(tmp_path):
  folder = shutil.copytree(hf_folder()[0], tmp_path / "hf")
  (folder / "generation_config.json").unlink()
  load(folder)


def test_nothing_is_written_into_the_folder():
  folder = hf_folder(shard=SHARDED)[0]
  written = lambda: {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
  before = written()
  load(folder)
  assert written() == before


def test_the_seven_billion_model_by_its_published_names_and_shapes():
  shapes = hf_shapes(Transformer(PRESETS["qwen2.5-7b"], single_device_mesh()))
  assert len(shapes) == 339  # as in the index of Qwen/Qwen2.5-7B
  assert shapes["model.layers.27.self_attn.k_proj.weight"] == (512, 3584)
  assert shapes["model.layers.27.self_attn.k_proj.bias"] == (512,)
  assert shapes["model.layers.0.mlp.down_proj.weight"] == (3584, 18944)
  assert shapes["lm_head.weight"] == (152064, 3584)
  assert not any(name.endswith("o_proj.bias") for name in shapes)
