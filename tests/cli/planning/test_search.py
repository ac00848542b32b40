"""The meshes and settings that `gtpo plan` tries for a run that does not fit."""

import collections
import itertools
import math
import random

import pytest
from plan_cases import needs_libtpu, small_config

from gtpo_jax.cli.planning.plan import plan
from gtpo_jax.cli.planning.run_programs import RunPrograms, build_model
from gtpo_jax.cli.planning.search import Search, changed, with_overrides
from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.runtime.chips import CHIPS
from gtpo_jax.runtime.mesh import MESH_AXES

ALL = 1 << 60  # bytes: everything fits


def search(config, devices=8, memory=ALL, chip="v5e", gpus_per_node=8):
  nodes = [i // gpus_per_node for i in range(devices)]
  return Search(config, devices, CHIPS[chip], nodes).candidates(memory, memory)


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
  assert formats(adapters, 20) == ["", "int8", "int4"]  # 14 GiB in bfloat16, held once
  assert formats(adapters, 16) == ["int8", "int4"]
  assert formats(adapters, 10) == ["int4"]
  twice = with_overrides(adapters, {"model.base_layout": "stacked"})
  assert formats(twice, 26) == ["int8", "int4"]
  assert formats(twice, 12) == ["int4"]
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


# 40 runs: sizes, lengths, chips with their number, and adapters. Some fit as they are, some after a
# change, and some on none of these meshes.
POINTS = [
  (preset, tokens, chip, devices, lora)
  for i, (preset, tokens, (chip, devices)) in enumerate(
    itertools.product(
      ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b"),
      (1024, 18432),
      (("t4", 1), ("v5e", 4), ("v5e", 16), ("h100", 8), ("v5p", 64)),
    )
  )
  for lora in ((0, 16)[i % 2],)
]


def run_of(preset, tokens, lora):
  prompts = {"batch.prompts": 64, "batch.group": 4, "data.max_prompt_tokens": 2048}
  changes = {"model.preset": preset, "model.compute_dtype": "bfloat16", "model.lora_rank": lora}
  return small_config(**prompts, **changes, **{"sampling.max_tokens": tokens})


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.some(2, slow=10)
def test_the_search_agrees_with_brute_force(point):
  """Every combination of the levers is tried with the same model of memory."""
  preset, tokens, chip, devices, lora = point
  search = Search(run_of(preset, tokens, lora), devices, CHIPS[chip], [0] * devices)
  memory = CHIPS[chip].usable_memory
  most_frugal = ALL
  fitting = {}
  for base in search.bases():
    for parts, slots in itertools.product(search.micro_batches(base), search.slots(base)):
      update = search.memory.update_bytes(base, parts)
      sampling = search.memory.sampling_bytes(base, slots)
      most_frugal = min(most_frugal, max(update, sampling))
      if update <= memory and sampling <= memory:
        key = (*base.mesh.values(), base.offload, base.quantize)
        fewest, most = fitting.get(key, (parts, slots))
        fitting[key] = min(fewest, parts), max(most, slots)
  found = search.candidates(memory, memory)
  assert len(found) == len(fitting)
  for candidate in found:
    values = candidate.override
    key = (*(values[f"mesh.{axis}"] for axis in MESH_AXES), values["optimizer.offload"])
    parts, slots = fitting[*key, values["model.quantize"]]
    assert values["batch.micro_batches"] == parts
    assert values.get("sampling.slots", slots) == slots
  smallest = search.by_memory()[0]
  assert max(smallest.update, smallest.sampling) == most_frugal
  assert (most_frugal <= memory) == bool(found)


@pytest.mark.slow
def test_the_points_of_brute_force_are_of_all_kinds():
  def kind(point):
    preset, tokens, chip, devices, lora = point
    search = Search(run_of(preset, tokens, lora), devices, CHIPS[chip], [0] * devices)
    memory = CHIPS[chip].usable_memory
    found = search.candidates(memory, memory)
    if not found:
      return "none"
    return "changed" if found[0].override["batch.micro_batches"] > 1 else "as it is"

  kinds = collections.Counter(map(kind, POINTS[::3]))
  assert set(kinds) == {"none", "changed", "as it is"}


@pytest.mark.parametrize("point", POINTS[4::4])
@pytest.mark.manual
@needs_libtpu
def test_what_the_search_says_is_true_of_the_compiled_programs(point):
  """What it finds fits; and if it finds nothing, neither do ten other combinations."""
  preset, tokens, _, _, lora = point
  config = run_of(preset, tokens, lora)
  result = plan(config, "v5e:2x2")
  if result["fits"] or result["override"]:
    assert result["fits"] or result["tried"][-1]["fits"]
    return
  assert result["tried"] and not any(trial["fits"] for trial in result["tried"])
  devices, chip = topology_devices("v5e:2x2")
  search = Search(config, 4, chip, [0] * 4)
  bases = [base for base in search.bases() if base.offload]
  for base in random.Random(0).sample(bases, min(len(bases), 3)):
    least = search.candidate(base, search.micro_batches(base)[-1], search.slots(base)[-1], 0)
    changed_config = with_overrides(config, least.override)
    programs = RunPrograms(changed_config, build_model(changed_config, devices)).compile_largest()
    assert any(program.peak > chip.usable_memory for program in programs)
