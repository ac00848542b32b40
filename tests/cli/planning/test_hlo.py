"""What the compiled programs of two layers contain, on GPUs and TPUs that are not attached."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from plan_cases import collective_bytes, needs_cuda_plugin, needs_libtpu, small_config

from gtpo_jax.arrays import Packing
from gtpo_jax.cli.planning.run_programs import (
  RunPrograms,
  build_engine,
  build_model,
  compile_with_peak,
)
from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.config.updates import run_optimizer, run_update
from gtpo_jax.config.workloads import SAMPLING, run_workloads
from gtpo_jax.models import PRESETS
from gtpo_jax.rollout.batch import abstract_batches
from gtpo_jax.runtime.mesh import bytes_per_device
from gtpo_jax.training.head_logits import default_chunk
from gtpo_jax.training.state import abstract_state

PROMPT = 250
TOKENS = 510
LAYERS = 2
# (topology, mesh.fsdp, mesh.tensor), and the custom calls of each program.
TARGETS = {
  "h100 fsdp": ("h100:2", 2, 1),
  "h100 tensor": ("h100:2", 1, 2),
  "a100 fsdp": ("a100:2", 2, 1),
  "v5e fsdp": ("v5e:2x2", 4, 1),
  "v5e tensor": ("v5e:2x2", 2, 2),
}
KERNELS = {
  "gpu": {
    "update": {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"},
    "sampling: decode": {"__gpu$xla.gpu.triton"},
  },
  "tpu": {"update": {"tpu_custom_call"}, "sampling: decode": {"tpu_custom_call"}},
}
cases = pytest.mark.parametrize(
  "name",
  [
    # Compiling for a TPU takes minutes.
    pytest.param(
      name, marks=[needs_libtpu, pytest.mark.manual] if name.startswith("v") else needs_cuda_plugin
    )
    for name in TARGETS
  ],
)
pytestmark = pytest.mark.slow


@functools.cache
def compiled(name):
  """The config, the model and the update and decoding programs of 2 layers of the 0.5B shape."""
  topology, fsdp, tensor = TARGETS[name]
  PRESETS["two layers"] = dataclasses.replace(PRESETS["qwen2.5-0.5b"], layers=LAYERS)
  try:
    config = small_config(
      **{
        "model.preset": "two layers",
        "model.compute_dtype": "bfloat16",
        "mesh.data": 1,
        "mesh.fsdp": fsdp,
        "mesh.tensor": tensor,
        "data.max_prompt_tokens": PROMPT,
        "sampling.max_tokens": TOKENS,
        "batch.prompts": 16,
        "batch.group": 8,
      }
    )
    devices, _ = topology_devices(topology)
    model = build_model(config, devices)
    programs = {x.name: x.executable for x in RunPrograms(config, model).compile_largest()}
    return config, model, programs
  finally:
    del PRESETS["two layers"]


def shapes(program):
  arrays = re.findall(r"\b(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", program.as_text())
  return {tuple(map(int, dims.split(","))) for dims in arrays}


@cases
def test_attention_is_computed_by_the_intended_kernels_and_no_host_takes_part(name):
  _, model, programs = compiled(name)
  platform = model.mesh.devices.flat[0].platform
  for program, kernels in KERNELS[platform].items():
    text = programs[program].as_text()
    calls = set(re.findall(r'custom_call_target="([^"]+)"', text))
    assert kernels <= calls, calls
    assert not [call for call in calls if re.search("callback|python|host", call, re.I)]
    assert not re.search(r" (infeed|outfeed|send|recv)\(", text)


@cases
def test_nothing_holds_all_logits_or_all_scores(name):
  _, model, programs = compiled(name)
  c = model.config
  shards = model.mesh.shape["tensor"]
  shard = c.vocab_size // shards
  tokens = default_chunk(model.mesh, c.vocab_size)
  found = shapes(programs["update"])
  assert not [x for x in found if shards > 1 and c.vocab_size in x]
  per_token = {math.prod(x) // shard for x in found if shard in x}
  assert per_token and max(per_token) <= max(tokens, c.width)
  # Completions, and prompts with completions, as they are and as the kernels pad them.
  lengths = {TOKENS, 512, PROMPT + TOKENS - 1, 768}
  assert not [x for x in found if sum(size in lengths for size in x) > 1]


@cases
def test_no_loop_has_an_iteration_for_every_slot(name):
  config, model, programs = compiled(name)
  engine = build_engine(config, model)
  slots = engine.programs.sizes.slots
  for program in programs.values():
    trips = map(int, re.findall(r'known_trip_count":\{"n":"(\d+)"', program.as_text()))
    assert slots not in trips


@cases
def test_decoding_sends_only_what_tensor_parallelism_needs(name):
  config, model, programs = compiled(name)
  sent = collective_bytes(programs["sampling: decode"].as_text())
  sampler = build_engine(config, model).programs
  rows = sampler.sizes.slots
  if model.mesh.shape["tensor"] == 1:
    # A chunk's results are gathered for the host: a token, its mask and four numbers for each
    # position, and a verdict for each slot. No step sends anything.
    gathered = rows * sampler.shards * (sampler.chunk * (4 + 1 + 4 * 4) + 1)
    assert sum(sent.values()) <= gathered
    return
  c = model.config
  states = (2 * LAYERS + 1) * rows * c.width * 2 * 2  # two sums a layer, and the embedding
  logits = rows * c.vocab_size * 4
  assert sum(sent.values()) < 1.5 * (states + logits)


@cases
def test_donated_arrays_are_reused(name):
  config, model, programs = compiled(name)
  alias = lambda program: programs[program].memory_analysis().alias_size_in_bytes
  state = abstract_state(model, run_optimizer(config, model))
  assert alias("update") >= bytes_per_device(state)
  workload = run_workloads(config)[SAMPLING]
  state = build_engine(config, model).programs.abstract_state(workload)
  assert alias("sampling: decode") >= bytes_per_device(state.kv)


@needs_cuda_plugin
def test_a_packed_update_uses_the_kernels_too():
  """Eight completions of a prompt in four rows; odd and even lengths are padded alike."""
  config, model, _ = compiled("h100 fsdp")
  rollouts, rewards = abstract_batches(config, model.mesh)[-1]
  n, g, t = rollouts.tokens.shape
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rollouts.tokens.sharding)
  packing = Packing(array(n, g // 2, t), array(n, g // 2, t), array(n, g))
  optimizer = run_optimizer(config, model)
  update = run_update(config, model, optimizer)
  arguments = (abstract_state(model, optimizer), rollouts.replace(packing=packing), rewards)
  _, program = compile_with_peak(update.lower(*arguments), arguments)
  calls = re.findall(r'custom_call_target="([^"]+)"', program.as_text())
  assert KERNELS["gpu"]["update"] <= set(calls)
