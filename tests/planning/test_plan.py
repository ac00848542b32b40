"""`gtpo plan`: the programs of a run, compiled for hardware that is not here."""

import importlib.util
import math
import re
import time
from pathlib import Path

import jax
import pytest

from gtpo_jax.config import default_config, freeze, load
from gtpo_jax.planning.plan import (
  changed,
  laid_out,
  levers,
  optimizer,
  plan,
  programs,
  sampling_engine,
  shard_bytes,
  table,
)
from gtpo_jax.planning.roofline import sample_seconds, update_flops, update_seconds
from gtpo_jax.planning.topology import CHIPS, topology_devices
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.training.state import abstract_state


def config(**changes):
  base = default_config()
  with base.unlocked():
    base.update_from_flattened_dict({"mesh.fsdp": 2, "mesh.tensor": 2, **changes})
  return freeze(base)


def check(result, devices):
  assert result["devices"] == devices and result["params"] == 640_640 and result["fits"]
  state = result["params.bytes"] + result["optimizer.bytes"]
  assert (
    0 < state <= result["update.peak_bytes"] <= result["hbm_bytes"] and result["override"] == ""
  )
  assert 0 < result["sample.peak_bytes"] <= result["hbm_bytes"]
  assert (
    state < 3 * 4 * result["params"]
  )  # parameters and two moments are split over fsdp and tensor
  text = table(result)
  assert "fits" in text and "yes" in text and f"{devices} device(s)" in text
  assert (
    result["update.sent_bytes"] > 2 * result["params.bytes"]
  )  # gathered twice at least, and reduced


def test_virtual_devices():
  result = plan(config(), "cpu:8")
  check(result, 8)
  assert result["update.seconds"] is result["sample.seconds"] is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_that_is_not_here():
  for _ in range(
    2
  ):  # the second must not read what the first left in the compile cache: no program of an absent TPU can be
    result = plan(config(), "v5e:2x4")
    check(result, 8)
    assert 0 < result["update.seconds"] < 1 and 0 < result["sample.seconds"] < 1
    assert (
      0 < result["update.activation_bytes"] < result["update.peak_bytes"]
      and result["cache.bytes"] < result["sample.peak_bytes"]
    )


def test_model_flops_of_one_token_by_hand():
  # 3 (2 N + 2 layers heads head_dim S) with N the matrix parameters, head included once.
  n = 3 * (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 384) + 384 * 128
  tokens = 16 * 32 + 16 * 16 * 40
  length = 32 + 40
  assert update_flops(config()) == 3 * tokens * (2 * n + 2 * 3 * 4 * 32 * length)


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("v5x:4x4", "unknown topology 'v5x:4x4', did you mean 'v5p'"),
    ("cpu:3", "8 CPU device.*JAX_NUM_CPU_DEVICES=3"),
    ("v5p:4x4", "v5p has 3 dimensions, as v5p:4x4x4"),
    ("v5e:4xx4", "v5e has 2 dimensions, as v5e:4x4"),
    ("v6e", "as v6e:4x4"),
  ],
)
def test_unknown_topologies_are_refused(topology, message):
  with pytest.raises(UserError, match=message):
    topology_devices(topology)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mesh.data": 3}, r"data 3 x fsdp 2 x context 1 x tensor 2 does not fit 8 device\(s\)"),
    (
      {"mesh.context": 2, "sampling.max_tokens": 41},
      "sampling.max_tokens = 41 does not divide over mesh.context x mesh.tensor = 4",
    ),
    ({"batch.prompts": 6}, r"batch.prompts = 6 does not divide .* multiple of 4"),
    (
      {"batch.minibatches": 4, "batch.micro_batches": 2},
      r"batch.prompts = 16 does not divide into 8 part\(s\) over 4 .* multiple of 32",
    ),
    ({"mesh.fsdp": 1, "mesh.tensor": 8}, "heads axis of 4 does not divide over 8 shards"),
    ({"sampling.max_tokens": 40_000}, "over the model's context of 32768"),
  ],
)
def test_what_cannot_work_is_refused_at_once(changes, message):
  began = time.process_time()
  with pytest.raises(UserError, match=message):
    plan(config(**changes), "cpu:8")
  assert time.process_time() - began < 2  # of this process, whatever else the machine does


def test_the_roofline_by_hand():
  """7B on 32 chips: bounds that the arithmetic of the published shape gives."""
  chip = CHIPS["v5p"]
  mesh = {"data": 1, "fsdp": 32, "tensor": 1}
  run = load(str(Path(__file__).parents[2] / "configs" / "qwen2_5_7b_gtpo.py"))
  n = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 152064 * 3584
  tokens = 128 * 2048 + 128 * 16 * 4096
  flops = 3 * tokens * (2 * n + 2 * 28 * 28 * 128 * 6144)
  assert update_flops(run) == flops
  assert update_seconds(run, chip, 32, 0) == pytest.approx(flops * 4 / 3 / 32 / 459e12)
  assert update_seconds(run, chip, 32, 10**15) == pytest.approx(10**15 / 540e9)  # the links decide
  kv = 2 * 28 * 4 * 128 * 2
  read = 2 * n + kv * (64 * 4096 / 2 + 4 * 2048)
  prefill = 2 * n * 128 * 2048 / 32 / 459e12
  assert sample_seconds(run, chip, mesh, 8192) == pytest.approx(
    4096 * read / 2765e9 + prefill
  )  # all 64 completions of a chip at once
  read = 2 * n + kv * (16 * 4096 / 2 + 2048)
  assert sample_seconds(run, chip, mesh, 512) == pytest.approx(4 * 4096 * read / 2765e9 + prefill)


@pytest.mark.parametrize(("mesh", "heads"), [((8, 1, 1), 2), ((2, 2, 2), 1), ((1, 1, 8), 2)])
def test_the_cache_by_hand(mesh, heads):
  """Completions and prompts of one shard at their largest, with heads that are fewer than the axis on every device."""
  run = config(
    **{
      "sampling.slots": 16,
      "sampling.chunk": 4,
      **dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True)),
    }
  )
  engine = sampling_engine(run, laid_out(run, jax.devices()))
  caches = engine.caches(
    run.batch.prompts, group=run.policy_completions, sampling_params=run.sampling_params
  )
  c = run.model_config
  shards = mesh[0] * mesh[1]
  slots = min(16 // shards, -(-run.batch.prompts // shards) * run.batch.group)
  prompt_cache = min(
    -(-run.batch.prompts // shards), slots, 4 * -(-slots // min(run.batch.group, slots))
  )
  positions = slots * (run.sampling.max_tokens + 4) + prompt_cache * run.data.max_prompt_tokens
  assert c.kv_heads == 2
  assert (
    shard_bytes([cache.kv for cache in caches]) == 2 * c.layers * heads * c.head_dim * 4 * positions
  )


def test_minibatches_and_epochs_in_the_plan():
  assert update_flops(config(**{"batch.minibatches": 4})) == update_flops(config())
  assert update_flops(config(**{"batch.epochs": 3})) == 3 * update_flops(config())


def test_levers_by_hand():
  run = config(**{"batch.prompts": 32, "mesh.data": 1, "mesh.fsdp": 4})
  mesh = {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
  half = {"batch.micro_batches": 16, "optimizer.offload": True, "mesh.data": 1, "mesh.fsdp": 2}
  assert levers(run, mesh) == [
    {"batch.micro_batches": 8},
    {"batch.micro_batches": 8, "optimizer.offload": True},
    half | {"mesh.context": 2},
    half | {"mesh.tensor": 4},
  ]
  assert changed(run, levers(run, mesh)[1]).batch.micro_batches == 8
  wide = changed(run, levers(run, mesh)[3])
  mesh = {"data": 1, "fsdp": 2, "context": 1, "tensor": 4}
  last = half | {"mesh.fsdp": 1, "batch.micro_batches": 32}
  del last["optimizer.offload"]
  assert levers(wide, mesh) == [last | {"mesh.context": 2}]  # heads do not divide over 8
  odd = changed(wide, {"sampling.max_tokens": 41})
  assert levers(odd, mesh) == []


def test_what_rests_on_the_host_takes_no_device_memory():
  model = laid_out(config(), topology_devices("cpu:8")[0])
  here, there = (
    shard_bytes(abstract_state(model, optimizer(config(**{"optimizer.offload": on}))).opt_state)
    for on in (False, True)
  )
  assert here > 1000 and there < 100  # its counters stay


TPU = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.mark.slow
@TPU
def test_a_run_that_does_not_fit_is_told_what_does():
  """1,024 rows of 8,192 positions take 6 GiB a device for every array of a layer's MLP; 64 rows of them do not."""
  result = plan(
    config(
      **{
        "model.compute_dtype": "bfloat16",
        "data.max_prompt_tokens": 16,
        "sampling.max_tokens": 8192,
        "batch.group": 64,
        "batch.prompts": 64,
        "mesh.data": 1,
        "mesh.fsdp": 4,
        "mesh.tensor": 1,
      }
    ),
    "v5e:2x2",
  )
  assert (
    not result["fits"]
    and result["update.peak_bytes"] > result["hbm_bytes"]
    and result["update.sent_bytes"] is None
  )
  assert result["override"] == "--config.batch.micro_batches=16"
  assert "with --config.batch.micro_batches=16 it does (tried)" in table(result)


@pytest.mark.slow
@TPU
def test_moments_on_the_host_are_arguments_there():
  """In a loop of two gradient updates too: what the program takes from the host's memory is both moments, and it gives them back there."""
  run = config(
    **{
      "batch.minibatches": 2,
      "optimizer.offload": True,
      "mesh.data": 1,
      "mesh.fsdp": 4,
      "mesh.tensor": 1,
    }
  )
  model = laid_out(run, topology_devices("v5e:2x2")[0])
  _, program = next(programs(run, model))
  found = program.memory_analysis()
  moments = 2 * 4 * 640_640 / 4
  assert (
    moments <= found.host_argument_size_in_bytes == found.host_alias_size_in_bytes < 2 * moments
  )  # tiles are padded
  assert found.argument_size_in_bytes < moments + 100_000 * 4


def shapes_of(program):
  return {
    tuple(map(int, dims.split(",")))
    for dims in re.findall(r"\b(?:f32|bf16|s32|pred)\[([\d,]+)\]", program.as_text())
  }


def test_on_a_context_mesh_no_layer_holds_all_positions():
  """fsdp 2 x context 4: of one device's program, the MLP's features stand beside a quarter of the positions of its rows."""
  run = config(
    **{
      "mesh.data": 1,
      "mesh.context": 4,
      "mesh.tensor": 1,
      "sampling.max_tokens": 104,
      "batch.group": 2,
    }
  )
  _, program = next(programs(run, laid_out(run, jax.devices())))
  rows = 16 // 2 * 2
  features = run.model_config.mlp
  assert (
    max(math.prod(shape) // features for shape in shapes_of(program) if features in shape)
    == rows * 104 // 4
  )


@pytest.mark.slow
def test_the_compiled_update_holds_neither_all_logits_nor_all_scores():
  """The 0.5B shape, 8 completions of 2,048 tokens on fsdp 4 x tensor 2: of one device's program, every array's shape."""
  run = config(
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
  _, program = next(programs(run, laid_out(run, jax.devices())))
  shapes = shapes_of(program)
  words = 151_936 // 2
  tokens = 2 * 2048
  beside = {math.prod(shape) // words for shape in shapes if words in shape}
  assert not [shape for shape in shapes if 2 * words in shape]
  assert {128, 896} <= beside and max(
    beside
  ) < tokens / 2  # a chunk of two rows x 64 positions, the table, nothing as long as the batch
  lengths = {2048, 2048 + 511, 2048 + 512}
  assert not [shape for shape in shapes if sum(size in lengths for size in shape) > 1]
