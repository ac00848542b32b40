"""A frozen base whose layers are apart: the same numbers, one copy, the same checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hf_folders import hf_folder, padded_batch
from meshes import mesh_of

from gtpo_jax.checkpoint.checkpoints import Checkpoints, digest_base
from gtpo_jax.config import Config, default_config, freeze
from gtpo_jax.config.updates import fit_update, frozen_bytes
from gtpo_jax.models import PRESETS, Transformer, abstract_params, init_params
from gtpo_jax.models.config import Lora
from gtpo_jax.models.decode import params_bytes
from gtpo_jax.models.hf.config_json import read_config
from gtpo_jax.models.hf.load import read_params
from gtpo_jax.models.lora import combine, partition, split_adapters
from gtpo_jax.models.params import stack_layers, stacked, unstack_layers
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import bytes_per_device, single_device_mesh
from gtpo_jax.sampling.engine import Engine
from gtpo_jax.sampling.programs import ProgramSettings
from gtpo_jax.sampling.settings import EngineConfig, SamplingParams
from gtpo_jax.training.state import OptimizerConfig, init_state, make_optimizer

SMALL = {"width": 32, "mlp": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
OPTIMIZER = make_optimizer(OptimizerConfig(), 10)


@functools.cache
def models(preset="tiny", **changes):
  """Returns (stacked model, its parameters with adapters that change the outputs, apart model)."""
  sizes = SMALL if preset == "tiny" else {}
  config = dataclasses.replace(PRESETS[preset], lora=Lora(2), **sizes, **changes)
  model = Transformer(config, single_device_mesh())
  trained, frozen = partition(model, init_params(model, jax.random.key(0)))
  trained = jax.tree.map(lambda x: x + 0.02, trained)
  apart = Transformer(dataclasses.replace(config, apart=True), model.mesh)
  return model, combine(trained, frozen), apart


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize(
  "preset", ["tiny", "tiny-moe", pytest.param("tiny-delta", marks=pytest.mark.slow)]
)
def test_parameters_are_declared_as_they_are_unstacked_and_come_back(preset):
  model, params, apart = models(preset)
  split = unstack_layers(apart, params)
  declared = flatten_dict(abstract_params(apart))
  assert {path: (x.shape, x.dtype) for path, x in flatten_dict(split).items()} == {
    path: (x.shape, x.dtype) for path, x in declared.items()
  }
  assert_equal(stack_layers(apart, split), params)
  assert_equal(
    init_params(apart, jax.random.key(5)),
    unstack_layers(apart, init_params(model, jax.random.key(5))),
  )
  assert unstack_layers(model, params) is params and stack_layers(model, params) is params


@pytest.mark.parametrize(
  ("preset", "changes"),
  [
    ("tiny", {}),
    ("tiny", {"remat": "none"}),
    ("tiny", {"remat": "attention"}),
    ("tiny", {"quantize": "int8"}),
    ("tiny", {"quantize": "int4"}),
    pytest.param("tiny-moe", {}, marks=pytest.mark.slow),
    pytest.param("tiny-delta", {}, marks=pytest.mark.slow),
  ],
)
def test_logits_and_gradients_are_those_of_stacked_layers(preset, changes):
  model, params, apart = models(preset, **changes)
  tokens, mask = padded_batch()

  def loss(model, trained, frozen):
    logits = model.apply({"params": combine(trained, frozen)}, tokens, mask)
    return jax.nn.logsumexp(logits).sum()

  def values(model, params):
    step = jax.jit(jax.value_and_grad(functools.partial(loss, model)))
    return step(*partition(model, params))

  value, gradient = values(model, params)
  own_value, own_gradient = values(apart, unstack_layers(apart, params))
  np.testing.assert_allclose(own_value, value, rtol=1e-6)
  own = flatten_dict(stack_layers(apart, own_gradient))
  for path, x in flatten_dict(gradient).items():
    largest = float(jnp.abs(x).max())
    np.testing.assert_allclose(own[path], x, atol=1e-6 * largest, err_msg=str(path))


def engine_of(model, merge="auto", **config):
  config = EngineConfig(chunk=4, merge_adapters=merge, **config)
  return Engine(ProgramSettings(model, (7,), 3, 8, 12, config=config))


@pytest.mark.parametrize(
  ("merge", "changes", "copied"),
  [
    ("never", {}, set()),
    ("always", {}, {"kernel"}),
    ("auto", {"quantize": "int8"}, set()),
    ("never", {"compute_dtype": "bfloat16"}, {"embedding", "lora_a", "lora_b", "bias"}),
  ],
)
def test_the_sampler_reads_the_arrays_of_the_update(merge, changes, copied):
  _, params, apart = models(**changes)
  params = unstack_layers(apart, params)
  engine = engine_of(apart, merge)
  layout = engine.layout(params)
  own = flatten_dict(params)
  theirs = flatten_dict({**layout.outer, **{f"layer_{i}": x for i, x in enumerate(layout.layers)}})
  place = lambda x: x.unsafe_buffer_pointer()
  others = {path for path, x in theirs.items() if path not in own or place(x) != place(own[path])}
  assert {path[-1] for path in others} == copied
  expected = sum(theirs[path].nbytes for path in others)
  assert params_bytes(engine.model, apart) == (expected, bytes_per_device(theirs) - expected)


@pytest.mark.parametrize(
  "changes", [{}, pytest.param({"quantize": "int8"}, marks=pytest.mark.slow), {"quantize": "int4"}]
)
def test_sampled_tokens_are_those_of_stacked_layers(changes):
  model, params, apart = models(**changes)
  prompts = [[5, 9, 1], [2], [4, 4, 8, 30, 21]]

  def tokens(model, params, merge):
    engine = engine_of(model, merge)
    return engine.sample(
      engine.layout(params), prompts, jax.random.key(4), group=3, sampling_params=SamplingParams()
    )

  expected = tokens(model, params, "auto")
  for merge in ("never",) if changes else ("never", "always"):
    found = tokens(apart, unstack_layers(apart, params), merge)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    apart_by = np.abs(found.sampler_log_probs - expected.sampler_log_probs).max()
    assert apart_by <= (0 if changes else 2e-6)


def test_a_copy_in_int8_has_the_adapters_beside_it():
  """Where a second copy is short of space, sampling.weights_dtype makes one of integers alone."""
  _, params, apart = models()
  params = unstack_layers(apart, params)
  engine = engine_of(apart, "never", weights_dtype="int8")
  layout = engine.layout(params)
  found = flatten_dict(layout.layers[0])
  assert found["q", "kernel"].dtype == jnp.int8 and found["q", "lora_a"].dtype == jnp.float32
  rollouts = engine.sample(
    layout, [[5, 9, 1]], jax.random.key(4), group=3, sampling_params=SamplingParams()
  )
  exact = engine_of(apart, "never")
  own = exact.sample(
    exact.layout(params), [[5, 9, 1]], jax.random.key(4), group=3, sampling_params=SamplingParams()
  )
  first = (rollouts.sampler_log_probs[..., 0], own.sampler_log_probs[..., 0])
  same = rollouts.tokens[..., 0] == own.tokens[..., 0]
  np.testing.assert_allclose(*(x[same] for x in first), atol=0.02)
  assert same.any()


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8"}])
def test_a_checkpoint_is_the_same_on_disk_and_restores_in_both_forms(changes, tmp_path):
  model, params, apart = models(**changes)
  # The state is donated, and other tests share the parameters.
  state = init_state(jax.tree.map(jnp.copy, params), OPTIMIZER, model)
  state = state.replace(step=state.step + 3)
  own = init_state(unstack_layers(apart, params), OPTIMIZER, apart)
  own = own.replace(step=own.step + 3)
  assert digest_base(split_adapters(own.params)[1], apart) == digest_base(
    split_adapters(state.params)[1]
  )
  for name, saved, saver in (("stacked", state, None), ("apart", own, apart)):
    checkpoints = Checkpoints(tmp_path / name, keep=2)
    checkpoints.save(saved, model=saver)
    checkpoints.close()
    for reader, like in ((model, state), (apart, own)):
      base = lambda like=like: split_adapters(like.params)[1]
      found = Checkpoints(tmp_path / name).restore(reader, OPTIMIZER, base=base)
      assert_equal(found.state, like)


@pytest.mark.parametrize(
  "changes", [{}, {"quantize": "int8"}, {"compute_dtype": "bfloat16"}], ids=str
)
def test_a_folder_is_read_layer_by_layer_into_place(changes):
  folder, _ = hf_folder()
  config = dataclasses.replace(read_config(folder, "float32"), lora=Lora(2), **changes)
  model = Transformer(config, single_device_mesh())
  apart = Transformer(dataclasses.replace(config, apart=True), model.mesh)
  assert_equal(read_params(apart, folder), unstack_layers(apart, read_params(model, folder)))


def lora_config(**fields):
  values = default_config()
  values.model.lora_rank = 4
  for name, value in fields.items():
    section, _, field = name.partition("__")
    values[section][field] = value
  return freeze(values)


@pytest.mark.parametrize(
  ("fields", "memory", "layout", "merges"),
  [
    ({}, None, "stacked", "always"),
    ({}, 2**40, "stacked", "always"),
    ({}, 2**20, "apart", "never"),
    ({"model__quantize": "int8"}, 2**20, "apart", "auto"),
    ({"model__base_layout": "stacked"}, 2**20, "stacked", "never"),
    ({"model__base_layout": "apart"}, 2**40, "apart", "always"),
    ({"sampling__merge_adapters": "always"}, 2**20, "apart", "always"),
  ],
)
def test_layout_and_merging_follow_the_memory(fields, memory, layout, merges):
  config = fit_update(lora_config(**fields), jax.devices()[:1], None, memory)
  assert (config.model.base_layout, config.sampling.merge_adapters) == (layout, merges)


def test_without_adapters_nothing_is_chosen_and_nothing_may_be_set():
  config = fit_update(Config(), jax.devices()[:1], None, 2**20)
  assert (config.model.base_layout, config.sampling.merge_adapters) == ("auto", "auto")
  values = default_config()
  values.model.base_layout = "apart"
  with pytest.raises(UserError, match=r"model\.base_layout = 'apart' .*model\.lora_rank above 0"):
    freeze(values)
  values = default_config()
  values.model.lora_rank = 4
  values.model.quantize = "int8"
  values.sampling.merge_adapters = "always"
  with pytest.raises(UserError, match=r"sampling\.merge_adapters = 'always'.*not quantised"):
    freeze(values)


@pytest.mark.devices
def test_a_base_that_the_mesh_divides_stays_stacked():
  small = lora_config(mesh__fsdp=2)
  config = fit_update(small, jax.devices()[:2], None, 2**20)
  assert config.model.base_layout == "stacked"
  with pytest.raises(UserError, match=r"base_layout = 'apart', but .* among 2 devices"):
    fit_update(
      lora_config(mesh__fsdp=2, model__base_layout="apart"), jax.devices()[:2], None, 2**20
    )
  _, _, apart = models()
  wide = Transformer(apart.config, mesh_of(1, 1, 1, 2))
  assert params_bytes(wide, wide).copied == 0 < params_bytes(wide, wide).shared


def test_a_reference_that_is_the_base_takes_the_memory_of_its_adapters():
  model, params, apart = models()
  config = lora_config(algorithm__name="grpo", algorithm__kl_weight=0.1)
  adapters = bytes_per_device(split_adapters(params)[0])
  assert frozen_bytes(config, model, None) == frozen_bytes(config, apart, None) == adapters
  assert stacked(apart).config == model.config
