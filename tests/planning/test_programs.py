"""The compiled update and sampler: what one device holds."""

import math
import re

import jax
import pytest
from plan_cases import needs_libtpu, small_config

from gtpo_jax.config import resolve_model
from gtpo_jax.planning.programs import (
  build_engine,
  build_model,
  build_optimizer,
  bytes_per_device,
  compile_programs,
)
from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.training.state import abstract_state


@pytest.mark.parametrize(("mesh", "kv_heads"), [((8, 1, 1), 2), ((2, 2, 2), 1), ((1, 1, 8), 2)])
def test_the_cache_by_hand(mesh, kv_heads):
  """Completions and prompts of one shard at their largest.

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
  caches = engine.programs.caches(
    config.batch.prompts, group=config.policy_completions, sampling_params=config.sampling_params
  )
  c = resolve_model(config).config
  shards = data * fsdp
  prompts = -(-config.batch.prompts // shards)
  slots = min(16 // shards, prompts * config.batch.group)
  cached_prompts = min(prompts, slots, 4 * -(-slots // min(config.batch.group, slots)))
  completion_length = config.sampling.max_tokens + 4
  positions = slots * completion_length + cached_prompts * config.data.max_prompt_tokens
  assert c.kv_heads == 2
  expected = 2 * c.layers * kv_heads * c.head_dim * 4 * positions
  assert bytes_per_device([cache.kv for cache in caches]) == expected


def test_offloaded_moments_take_no_device_memory():
  model = build_model(small_config(), topology_devices("cpu:8")[0])

  def moment_bytes(offload):
    optimizer = build_optimizer(small_config(**{"optimizer.offload": offload}))
    return bytes_per_device(abstract_state(model, optimizer).opt_state)

  assert moment_bytes(False) > 1000
  assert moment_bytes(True) < 100  # its counters stay


@pytest.mark.slow
@needs_libtpu
def test_offloaded_moments_are_arguments_in_host_memory():
  """The program takes both moments from host memory and returns them there.

  Also in a loop of two gradient updates.
  """
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
  _, program = next(compile_programs(config, model))
  analysis = program.memory_analysis()
  moments = 2 * 4 * 603_776 / 4
  assert analysis.host_argument_size_in_bytes == analysis.host_alias_size_in_bytes
  assert moments <= analysis.host_argument_size_in_bytes < 2 * moments  # tiles are padded
  assert analysis.argument_size_in_bytes < moments + 100_000 * 4


def compiled_shapes(config):
  """The shapes of all arrays in one device's update program."""
  _, program = next(compile_programs(config, build_model(config, jax.devices())))
  arrays = re.findall(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", program.as_text())
  return {tuple(map(int, dims.split(","))) for dims in arrays}


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
      "batch.head_chunk": 512,
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
