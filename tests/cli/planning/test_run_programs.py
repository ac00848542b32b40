"""The compiled update and sampler: what one device holds."""

import dataclasses
import math
import re

import jax
import pytest
from plan_cases import needs_cuda_plugin, needs_libtpu, small_config

from gtpo_jax.cli.planning.plan import _try
from gtpo_jax.cli.planning.run_programs import RunPrograms, build_engine, build_model
from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.config import resolve_model
from gtpo_jax.config.updates import run_optimizer
from gtpo_jax.config.workloads import SAMPLING, run_workloads
from gtpo_jax.models.params import abstract_params
from gtpo_jax.models.presets import PRESETS
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.training.state import abstract_state


@pytest.mark.devices
@pytest.mark.parametrize(("mesh", "kv_heads"), [((8, 1, 1), 2), ((2, 2, 2), 1), ((2, 1, 4), 2)])
def test_the_cache_by_hand(mesh, kv_heads):
  """The caches have room for the longest completions and prompts of one shard.

  Two key/value heads that do not divide over the tensor axis are replicated on every device.
  """
  data, fsdp, tensor = mesh
  config = small_config(
    **{
      "sampling.slots": 16,
      "sampling.chunk": 4,
      "mesh.data": data,
      "mesh.fsdp": fsdp,
      "mesh.tensor": tensor,
    }
  )
  engine = build_engine(config, build_model(config, jax.devices()))
  state = engine.programs.abstract_state(run_workloads(config)[SAMPLING])
  c = resolve_model(config).config
  shards = data * fsdp
  prompts = -(-config.batch.prompts // shards)
  slots = min(16 // shards, prompts * config.batch.group)
  cached_prompts = min(prompts, slots, 4 * -(-slots // min(config.batch.group, slots)))
  completion_length = config.sampling.max_tokens + 4
  positions = slots * completion_length + cached_prompts * config.data.max_prompt_tokens
  assert c.kv_heads == 2
  expected = 2 * c.layers * kv_heads * c.head_dim * 4 * positions
  assert bytes_per_device(state.kv) == expected


@pytest.mark.devices
@pytest.mark.parametrize(("quantize", "bits"), [("", 32), ("int8", 8), ("int4", 4)])
def test_the_bytes_of_a_quantised_base(quantize, bits):
  """The tiny preset: three layers, 128 wide, 352 MLP features, 4 query and 2 KV heads of 32."""
  changes = {"mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1}
  config = small_config(**changes, **{"model.lora_rank": 2, "model.quantize": quantize})
  model = build_model(config, topology_devices("cpu:8")[0])
  layers = abstract_params(model)["layers"]
  modules = [layers[name] for name in ("q", "k", "v", "o", "gate", "up", "down")]
  matrices = 3 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 352)
  assert bytes_per_device([module["kernel"] for module in modules]) == matrices * bits // 8
  if quantize:  # groups of 128 inputs; of 32 for o, whose heads are 32 wide, and for down
    scales = 3 * (128 + 64 + 64 + 4 * 128 + 2 * 352 + 11 * 128)
    assert bytes_per_device([module["kernel_scale"] for module in modules]) == 4 * scales


@pytest.mark.devices
def test_offloaded_moments_take_no_device_memory():
  model = build_model(small_config(), topology_devices("cpu:8")[0])

  def moment_bytes(offload):
    optimizer = run_optimizer(small_config(**{"optimizer.offload": offload}), model)
    return bytes_per_device(abstract_state(model, optimizer).opt_state)

  assert moment_bytes(False) > 1000
  assert moment_bytes(True) < 100  # its counters stay


@pytest.mark.manual
@needs_libtpu
def test_offloaded_moments_are_arguments_in_host_memory():
  """A program of two gradient updates takes and returns both moments in host memory."""
  config = small_config(
    **{
      "batch.minibatches": 2,
      "optimizer.offload": True,
      "mesh.data": 1,
      "mesh.fsdp": 4,
      "mesh.tensor": 1,
    }
  )
  model = build_model(config, topology_devices("v5e:2x2")[0])
  program = RunPrograms(config, model).compile_update().executable
  analysis = program.memory_analysis()
  moments = 2 * 4 * 603_776 / 4
  assert analysis.host_argument_size_in_bytes == analysis.host_alias_size_in_bytes
  assert moments <= analysis.host_argument_size_in_bytes < 2 * moments  # tiles are padded
  assert analysis.argument_size_in_bytes < moments + 100_000 * 4


@pytest.mark.slow
def test_programs_that_a_search_compiled_are_not_compiled_again():
  """They keep the seconds of their only compilation, and are counted as if they were new."""
  config = small_config(**{"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1})
  model = build_model(config, jax.devices()[:1])
  tried = RunPrograms(config, model)
  first = {x.name: x for x in tried.compile_largest()}
  again = {x.name: x for x in tried.compile()}
  assert first.keys() <= again.keys()
  for name, program in first.items():
    assert again[name].executable is program.executable
    assert again[name].seconds == program.seconds > 0
  counts = {x.name: x.count for x in RunPrograms(config, model).compile()}
  assert {name: x.count for name, x in again.items()} == counts


@pytest.mark.slow
def test_a_change_fits_only_if_all_programs_do():
  """The warm start is the largest by far, and comes last."""
  values = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
  values |= {"warm_start.steps": 1, "warm_start.batch": 1024}
  config = small_config(**values)
  programs = RunPrograms(config, build_model(config, jax.devices()[:1]))
  largest = max(x.peak for x in programs.compile_largest())
  trial = _try({}, programs, 2 * largest)
  assert (trial.program, trial.fits) == ("warm start", False)
  assert _try({}, programs, trial.peak).fits


@pytest.mark.manual
@needs_cuda_plugin
def test_reading_prompts_needs_no_more_with_more_layers_of_experts(monkeypatch):
  """XLA must not write the zeros of every layer before it computes the first layer."""

  def temporary_bytes(layers):
    model = dataclasses.replace(PRESETS["olmoe-1b-7b"], layers=layers)
    monkeypatch.setitem(PRESETS, "few layers", model)
    values = {"model.preset": "few layers", "model.compute_dtype": "bfloat16"}
    values |= {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1, "data.max_prompt_tokens": 512}
    config = small_config(**values)
    programs = RunPrograms(config, build_model(config, topology_devices("h100:1")[0])).compile()
    prefill = next(x for x in programs if x.name == "sampling: prefill")
    return prefill.executable.memory_analysis().temp_size_in_bytes

  assert temporary_bytes(4) < 1.1 * temporary_bytes(2)


def compiled_shapes(config):
  """The shapes of all arrays in one device's update program."""
  program = RunPrograms(config, build_model(config, jax.devices())).compile_update().executable
  arrays = re.findall(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", program.as_text())
  return {tuple(map(int, dims.split(","))) for dims in arrays}


@pytest.mark.devices
@pytest.mark.slow
def test_on_a_context_mesh_no_layer_holds_all_positions():
  """fsdp 2 x context 4: MLP features appear only with a quarter of the rows' positions."""
  config = small_config(
    **{
      "mesh.data": 1,
      "mesh.context": 4,
      "mesh.tensor": 1,
      "sampling.max_tokens": 104,
      "batch.group": 2,
    }
  )
  features = resolve_model(config).config.mlp
  rows = 16 // 2 * 2
  positions = [
    math.prod(shape) // features for shape in compiled_shapes(config) if features in shape
  ]
  assert max(positions) == rows * 104 // 4


@pytest.mark.devices
@pytest.mark.slow
def test_the_compiled_update_holds_neither_all_logits_nor_all_scores():
  """The 0.5B shape on fsdp 4 x tensor 2: 8 completions of 2,048 tokens, two rows per device."""
  config = small_config(
    **{
      "model.preset": "qwen2.5-0.5b",
      "mesh.data": 1,
      "mesh.fsdp": 4,
      "batch.prompts": 4,
      "batch.group": 2,
      "data.max_prompt_tokens": 512,
      "sampling.max_tokens": 2048,
      "batch.head_chunk": 128,
    }
  )
  shapes = compiled_shapes(config)
  vocab_shard = 151_936 // 2
  assert not [shape for shape in shapes if 2 * vocab_shard in shape]
  per_token = {math.prod(shape) // vocab_shard for shape in shapes if vocab_shard in shape}
  # The logits of a chunk of 2 rows x 64 positions, and the table of width 896. Nothing has the
  # length of the batch.
  assert {128, 896} <= per_token
  assert max(per_token) < 2 * 2048 / 2
  lengths = {2048, 2048 + 511, 2048 + 512}
  assert not [shape for shape in shapes if sum(size in lengths for size in shape) > 1]
