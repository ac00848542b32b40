"""The meshes and settings that `gtpo plan` tries for a run that does not fit."""

import math

import pytest
from plan_cases import small_config

from gtpo_jax.planning.search import candidates, changed, with_overrides
from gtpo_jax.runtime.chips import CHIPS

ALL = 1 << 60  # bytes: everything fits


def search(config, devices=8, memory=ALL, chip="v5e", gpus_per_node=8):
  nodes = [i // gpus_per_node for i in range(devices)]
  limits = {"update_memory": memory, "sampling_memory": memory}
  return candidates(config, devices, CHIPS[chip], nodes, **limits)


def meshes(found):
  return [
    tuple(x.override[f"mesh.{axis}"] for axis in ("data", "fsdp", "context", "tensor"))
    for x in found
  ]


def test_every_mesh_divides_the_model_the_batch_and_the_positions():
  """The tiny model: 4 heads, 352 MLP features, a vocabulary of 384, 128 wide; 40 positions."""
  found = search(small_config(**{"batch.prompts": 8}))
  assert {math.prod(mesh) for mesh in meshes(found)} == {8}
  assert {tensor for *_, tensor in meshes(found)} == {1, 2, 4}
  assert (1, 2, 4, 1) in meshes(found)
  assert (1, 1, 8, 1) in meshes(found)
  assert (1, 1, 1, 8) not in meshes(found)  # 8 shards of 4 heads
  odd = search(small_config(**{"batch.prompts": 8, "sampling.max_tokens": 41}))
  assert {context for _, _, context, _ in meshes(odd)} == {1}
  few = search(small_config(**{"batch.prompts": 2}))
  assert {data * fsdp for data, fsdp, *_ in meshes(few)} == {1, 2}


def test_the_fastest_comes_first():
  found = search(small_config(**{"batch.prompts": 32}))
  seconds = [candidate.seconds for candidate in found]
  assert seconds == pytest.approx(sorted(seconds), rel=0.02)
  assert found[0].override["batch.micro_batches"] == 1
  assert not found[0].override["optimizer.offload"]
  # Replicas sum their gradients once; shards also gather the weights twice.
  by_mesh = dict(zip(meshes(found[::-1]), seconds[::-1], strict=True))
  assert by_mesh[8, 1, 1, 1] < by_mesh[2, 4, 1, 1] < by_mesh[1, 8, 1, 1]


def test_less_memory_means_more_micro_batches_then_offloading():
  config = small_config(**{"batch.prompts": 32, "sampling.max_tokens": 2048})
  most = max(max(candidate.update, candidate.sampling) for candidate in search(config))
  halves = [search(config, memory=most / 2**i) for i in range(1, 12)]
  found = [x for x in halves if x]
  parts = [x[0].override["batch.micro_batches"] for x in found]
  assert parts[0] < max(parts)
  assert all(
    max(y.update, y.sampling) <= most / 2 ** (i + 1) for i, x in enumerate(halves) for y in x
  )
  assert not halves[-1]  # nothing fits in the end


def test_a_base_under_adapters_is_quantised_only_if_nothing_else_fits():
  changes = {"model.preset": "qwen2.5-7b", "batch.prompts": 8}
  changes |= {"model.param_dtype": "bfloat16", "model.compute_dtype": "bfloat16"}
  adapters = small_config(**changes, **{"model.lora_rank": 16})
  formats = lambda config, memory: list(
    dict.fromkeys(x.override["model.quantize"] for x in search(config, 1, memory * 2**30))
  )
  assert formats(adapters, 95) == ["", "int8", "int4"]
  assert formats(adapters, 26) == ["int8", "int4"]  # 13 GiB in bfloat16, held twice
  assert formats(adapters, 12) == ["int4"]
  assert formats(adapters, 7) == []
  assert formats(small_config(**changes), 95) == [""]  # all weights learn
  int8 = with_overrides(adapters, {"model.quantize": "int8"})
  assert formats(int8, 95) == ["int8"]
  sampled_as = {"sampling.weights_dtype": "int8", "algorithm.tis_cap": 2.0}
  sampling = with_overrides(adapters, sampled_as)
  assert formats(sampling, 95) == [""] and formats(sampling, 24) == [""]


def test_a_network_between_nodes_slows_a_step():
  config = small_config(
    **{
      "batch.prompts": 16,
      "model.preset": "qwen2.5-7b",
      "model.compute_dtype": "bfloat16",
      "sampling.max_tokens": 1024,
    }
  )
  one, two = (search(config, 16, 75 * 2**30, "h100", gpus) for gpus in (16, 8))
  in_one = {str(x.override): x.seconds for x in one}
  slower = [x.seconds - in_one[str(x.override)] for x in two]
  assert max(slower) > 0


def test_only_what_differs_is_named():
  config = small_config()
  override = {"mesh.fsdp": 2, "batch.micro_batches": 4}
  assert changed(config, override) == {"batch.micro_batches": 4}
  assert with_overrides(config, override).batch.micro_batches == 4
