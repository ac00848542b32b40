"""Weight decay, Hugging Face shapes and counts follow from the declarations of parameters."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gtpo_jax.models import PRESETS, Transformer, abstract_params
from gtpo_jax.models.config import LORA_TARGETS, Lora
from gtpo_jax.models.declaration import KINDS, AxisRoles, Declaration, Kind, declare, is_decayed
from gtpo_jax.models.hf import weights
from gtpo_jax.models.hf.weights import hf_shapes, hf_tensors
from gtpo_jax.models.params import declared_params, matmul_params
from gtpo_jax.runtime.mesh import single_device_mesh
from gtpo_jax.training.state import OptimizerConfig, make_optimizer

DECAYED = {"embedding", "head", *(f"layers/{module}/kernel" for module in LORA_TARGETS)}
NORMS = {"norm/scale", "layers/attention_norm/scale", "layers/mlp_norm/scale"}
NOT_DECAYED = {
  "qwen2": NORMS | {"layers/q/bias", "layers/k/bias", "layers/v/bias"},
  "qwen3": NORMS | {"layers/q_norm/scale", "layers/k_norm/scale"},
  "llama": NORMS,
  "mistral": NORMS,
}
# One of every family; the tests of their sizes are elsewhere.
PRESET_NAMES = ("tiny", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b", "mistral-7b-v0.3")
ADAPTERS = {f"layers/{module}/{leaf}" for module in LORA_TARGETS for leaf in ("lora_a", "lora_b")}


def model_of(preset, **changes):
  return Transformer(dataclasses.replace(PRESETS[preset], **changes), single_device_mesh())


def leaves_of(model):
  return flatten_dict(declared_params(model))


def test_the_declarations_of_equal_models_are_traced_once(monkeypatch):
  """The dictionaries belong to the caller."""
  traced = []
  plain = Transformer.__call__
  count = lambda *args: (traced.append(1), plain(*args))[1]
  monkeypatch.setattr(Transformer, "__call__", count)
  first = declared_params(model_of("tiny", vocab_size=100))
  assert len(traced) == 1
  assert first.pop("norm")
  assert "norm" in declared_params(model_of("tiny", vocab_size=100))
  assert len(traced) == 1
  declared_params(model_of("tiny", vocab_size=104))
  assert len(traced) == 2


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_matrices_are_decayed_and_biases_and_scales_are_not(preset, rank):
  model = model_of(preset, lora=Lora(rank))
  decayed = DECAYED - ({"head"} if model.config.tied else set()) | (ADAPTERS if rank else set())
  not_decayed = NOT_DECAYED[model.config.model_type]
  expected = dict.fromkeys(decayed, True) | dict.fromkeys(not_decayed, False)
  assert {"/".join(path): is_decayed(path) for path in leaves_of(model)} == expected


def test_every_leaf_is_declared_with_its_axes_and_inputs():
  for path, leaf in leaves_of(model_of("tiny", tied=False, lora=Lora(4))).items():
    assert isinstance(leaf, Declaration), path
    assert len(leaf.names) == leaf.value.ndim, path
    assert (leaf.names[0] == "layer") == (path[0] == "layers"), path
    assert (leaf.inputs > 0) == (KINDS[path[-1]] is Kind.MATRIX), path


def test_adapters_fit_every_matrix_of_a_layer():
  layers = declared_params(model_of("tiny"))["layers"]
  assert {module for module, leaves in layers.items() if "kernel" in leaves} == set(LORA_TARGETS)


class Gate(nn.Module):
  """A new module, which is not in the package."""

  leaf: str = "kernel"
  inputs: int = 1

  @nn.compact
  def __call__(self, x):
    ones = nn.initializers.ones
    roles = AxisRoles(self.inputs)
    kernel = declare(self, self.leaf, ones, (3, 4), ("embed", "mlp"), jnp.float32, roles)
    return x @ kernel + declare(self, "bias", ones, (4,), ("mlp",), jnp.float32)


def test_a_new_matrix_is_decayed_and_a_new_bias_is_not():
  params = {"gate": nn.unbox(Gate().init(jax.random.key(0), jnp.ones(3))["params"])}
  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  changes, _ = optimizer.update(zeros, optimizer.init(params), params)
  np.testing.assert_allclose(changes["gate"]["kernel"], -0.05, rtol=1e-6)
  np.testing.assert_array_equal(changes["gate"]["bias"], 0)


def test_a_parameter_without_a_kind_is_rejected():
  with pytest.raises(ValueError, match="parameter 'weights' has no kind; use one of kernel, "):
    Gate("weights").init(jax.random.key(0), jnp.ones(3))
  optimizer = make_optimizer(OptimizerConfig(), 5)
  with pytest.raises(KeyError, match="weights"):
    optimizer.init({"gate": {"weights": jnp.ones((3, 4))}})


@pytest.mark.parametrize(("leaf", "inputs"), [("kernel", 0), ("kernel", 2), ("scale", 1)])
def test_inputs_must_fit_the_kind(leaf, inputs):
  with pytest.raises(
    ValueError, match=rf"'{leaf}' of shape \(3, 4\) is a .* got inputs = {inputs}"
  ):
    Gate(leaf, inputs).init(jax.random.key(0), jnp.ones(3))


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_hugging_face_tensors_hold_every_parameter_once(preset):
  model = model_of(preset, lora=Lora(4))
  base = flatten_dict(abstract_params(model_of(preset)))
  sizes = dict.fromkeys(base, 0)
  for tensor in hf_tensors(model):
    sizes[tensor.path] += int(np.prod(tensor.shape))
  assert sizes == {path: x.size for path, x in base.items()}
  c = model.config
  shapes = hf_shapes(model)
  last = f"model.layers.{c.layers - 1}."
  assert shapes[last + "self_attn.q_proj.weight"] == (c.heads * c.head_dim, c.width)
  biases = {
    name: shape for name, shape in shapes.items() if name.endswith("0.self_attn.q_proj.bias")
  }
  assert set(biases.values()) == ({(c.heads * c.head_dim,)} if c.biases else set())
  assert shapes[last + "self_attn.o_proj.weight"] == (c.width, c.heads * c.head_dim)
  assert shapes[last + "mlp.down_proj.weight"] == (c.width, c.mlp)
  assert shapes["model.embed_tokens.weight"] == (c.vocab_size, c.width)


def test_a_parameter_without_a_hugging_face_name_is_rejected(monkeypatch):
  names = {module: name for module, name in weights.LAYER_MODULES.items() if module != "up"}
  monkeypatch.setattr(weights, "LAYER_MODULES", names)
  with pytest.raises(ValueError, match="no Hugging Face name for layers/up/kernel; add it to"):
    hf_shapes(model_of("tiny"))


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_matmul_params_count_matrices_and_the_head_once(preset):
  c = PRESETS[preset]
  attention = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
  matrices = c.layers * (attention + 3 * c.width * c.mlp)
  assert matmul_params(c) == matrices + c.vocab_size * c.width
  assert matmul_params(dataclasses.replace(c, lora=Lora(4))) == matmul_params(c)
