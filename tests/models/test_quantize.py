"""A quantised base under adapters: its numbers, its shape on a mesh, its exports, its training."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import RANK, with_lora
from family_cases import FAMILY_CASES
from flax.traverse_util import flatten_dict, unflatten_dict
from hf_folders import hf_folder, our_greedy, our_logits, padded_batch
from meshes import mesh_of
from toys import config_of

from gtpo_jax.models import PRESETS, abstract_params, init_params, load, save
from gtpo_jax.models.config import Lora
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import add_lora, merge_lora, without_lora
from gtpo_jax.models.number_formats import dequantize, quantize, scale_shape
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import single_device_mesh

CASE = FAMILY_CASES["qwen3"]


@functools.cache
def quantised(dtype, mesh=None):
  """The small Qwen3 on a quantised base, with adapters in which both A and B are random."""
  folder, _ = hf_folder(**CASE)
  model = with_lora(load(folder, "float32", mesh)[0], mesh, quantize=dtype)
  flat = flatten_dict(add_lora(model, read_params(model, folder), jax.random.key(1)))
  keys = dict(zip(sorted(flat), jax.random.split(jax.random.key(2), len(flat)), strict=True))
  random = {
    path: jax.device_put(0.2 * jax.random.normal(keys[path], x.shape), x.sharding)
    for path, x in flat.items()
    if path[-1] == "lora_b"
  }
  return model, unflatten_dict(flat | random)


@pytest.mark.parametrize(
  ("dtype", "bound", "want"),
  [
    ("int8", 127.5, [[0, 64], [-64, 127], [127, 19], [-32, 0]]),
    ("int4", 7.5, [[0, 4], [-4, 7], [7, 1], [-2, 0]]),
  ],
)
def test_rounding_by_hand(dtype, bound, want):
  kernel = jnp.asarray([[0.0, 1.0], [-0.5, 2.0], [1.0, 0.3], [-0.25, 0.0]])  # [inputs, outputs]
  integers, scale = quantize(kernel, 0, dtype)
  assert integers.dtype == dtype
  np.testing.assert_allclose(scale, [[1.0 / bound, 2.0 / bound]], rtol=1e-6)
  np.testing.assert_array_equal(integers.astype("int32"), want)
  again = dequantize(integers, scale, jnp.float32)
  np.testing.assert_allclose(again, want * np.asarray(scale), rtol=1e-6)
  assert np.abs(again - kernel).max() <= np.asarray(scale).max() / 2 * 1.001


@pytest.mark.parametrize("axis", [0, 1])
def test_a_group_has_at_most_128_inputs(axis):
  shape = (256, 384) if axis else (384, 256)
  kernel = np.random.default_rng(0).normal(size=(*shape, 3)).astype(np.float32)
  integers, scale = quantize(jnp.asarray(kernel), axis, "int8")
  assert scale.shape == scale_shape(kernel.shape, axis)
  assert scale.shape[axis] == 3
  largest = np.abs(np.moveaxis(kernel, axis, 0).reshape(3, 128, 256, 3)).max(1)
  np.testing.assert_allclose(np.moveaxis(scale, axis, 0), largest / 127.5, rtol=1e-6)
  error = np.abs(dequantize(integers, scale, jnp.float32) - kernel)
  assert error.max() <= np.asarray(scale).max() / 2 * 1.001


def test_zeros_stay_zeros_and_odd_sizes_have_smaller_groups():
  integers, scale = quantize(jnp.zeros((6, 4)), 0, "int4")
  np.testing.assert_array_equal(dequantize(integers, scale, jnp.float32), np.zeros((6, 4)))
  assert scale_shape((352, 4), 0) == (11, 4)  # groups of 32
  assert scale_shape((7, 4), 0) == (7, 4)
  kernel = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
  np.testing.assert_allclose(
    dequantize(*quantize(kernel, 0, "int8"), jnp.float32), kernel, rtol=0.5 / 127
  )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_qwix_quantises_to_the_same(dtype):
  qwix = pytest.importorskip("qwix")
  kernel = jnp.asarray(np.random.default_rng(0).normal(size=(256, 48)), jnp.float32)
  integers, scale = quantize(kernel, 0, dtype)
  want = qwix.quantize(kernel, dtype, channelwise_axes=(1,), tiled_axes={0: 128})
  np.testing.assert_array_equal(scale, want.scale)
  np.testing.assert_array_equal(integers.astype("int8"), want.qvalue.astype("int8"))


@pytest.mark.parametrize(
  ("dtype", "tolerance"), [pytest.param("int8", 0.02, marks=pytest.mark.slow), ("int4", 0.35)]
)
def test_the_logits_are_those_of_the_dequantised_matrices(dtype, tolerance):
  model, params = quantised(dtype)
  tokens, mask = padded_batch()
  got = our_logits(model, params, tokens, mask)[mask]
  merged = jax.jit(merge_lora, static_argnums=0)(model, params)
  plain = without_lora(model)
  assert jax.tree.structure(merged) == jax.tree.structure(abstract_params(plain))
  np.testing.assert_allclose(our_logits(plain, merged, tokens, mask)[mask], got, rtol=0, atol=1e-4)
  # Beside the exact base, with the same adapters.
  exact = dataclasses.replace(model.config, quantize="")
  base = load(hf_folder(**CASE)[0], "float32")[1]
  flat = flatten_dict(params)
  with_exact = flatten_dict(base) | {path: x for path, x in flat.items() if "lora" in path[-1]}
  want = our_logits(Transformer(exact, model.mesh), unflatten_dict(with_exact), tokens, mask)[mask]
  assert 1e-4 < np.abs(got - want).mean() < tolerance * np.abs(want).mean()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_parameters_are_stored_as_declared(dtype):
  model, params = quantised(dtype)
  flat = flatten_dict(params)
  matrices = {path for path in flat if path[-1] == "kernel"}
  assert len(matrices) == 7
  assert {flat[path].dtype for path in matrices} == {jnp.dtype(dtype)}
  like = flatten_dict(abstract_params(model))
  assert {path: (x.shape, x.dtype) for path, x in flat.items()} == {
    path: (x.shape, x.dtype) for path, x in like.items()
  }


@pytest.mark.devices
@pytest.mark.slow
def test_a_mesh_computes_the_same():
  tokens, mask = padded_batch()
  want = our_logits(*quantised("int8"), tokens, mask)[mask]
  model, params = quantised("int8", mesh_of(2, 2, 1, 2))
  for path, x in flatten_dict(abstract_params(model)).items():
    assert flatten_dict(params)[path].sharding.is_equivalent_to(x.sharding, x.ndim), path
  np.testing.assert_allclose(our_logits(model, params, tokens, mask)[mask], want, atol=2e-4)


@pytest.mark.slow
def test_sampling_keeps_the_base_quantised_and_equals_the_merged_model():
  model, params = quantised("int4")
  prompts = [[5, 9, 1], [2], [4, 4, 8, 30, 21]]
  want = our_greedy(without_lora(model), merge_lora(model, params), prompts, 24)
  np.testing.assert_array_equal(our_greedy(model, params, prompts, 24), want)


def test_an_export_is_the_merged_model(tmp_path):
  model, params = quantised("int4")
  save(model, params, None, tmp_path / "out")
  again, read = load(tmp_path / "out", "float32")
  assert again.config == without_lora(model).config
  want = merge_lora(model, params)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), read, want)
  assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_random_weights_of_a_preset():
  config = dataclasses.replace(PRESETS["tiny"], lora=Lora(RANK), quantize="int4")
  model = Transformer(config, single_device_mesh())
  params = init_params(model, jax.random.key(0))
  up = params["layers"]["up"]
  assert up["kernel"].dtype == jnp.int4
  assert np.std(dequantize(up["kernel"], up["kernel_scale"], jnp.float32)) == pytest.approx(
    0.02, 0.1
  )


def test_an_unknown_format_is_rejected():
  with pytest.raises(UserError, match=r"model.quantize must be one of int8, int4; got 'int5'"):
    dataclasses.replace(PRESETS["tiny"], quantize="int5", lora=Lora(2))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model.quantize": "int8"}, "model.quantize = 'int8' only has an effect with adapters"),
    (
      {"model.quantize": "int8", "model.lora_rank": 2, "sampling.weights_dtype": "int8"}
      | {"algorithm.tis_cap": 2.0},
      "sampling.weights_dtype = 'int8' only has an effect with an empty model.quantize",
    ),
    ({"sampling.weights_dtype": "int8"}, "must be corrected for: set algorithm.tis_cap"),
    ({"sampling.weights_dtype": "int4"}, "weights_dtype must be int8, or empty.*got 'int4'"),
  ],
)
def test_impossible_settings_are_rejected(changes, message):
  with pytest.raises(UserError, match=message):
    config_of(**changes)
