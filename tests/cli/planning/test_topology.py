"""Topologies by name."""

import types

import pytest
from plan_cases import HAS_CUDA_PLUGIN, needs_cuda_plugin

from gtpo_jax.cli.planning.topology import topology_devices
from gtpo_jax.runtime.chips import CHIPS, chip_of, compute_capability
from gtpo_jax.runtime.errors import UserError


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("v5x:4x4", "unknown topology 'v5x:4x4', did you mean 'v5p'"),
    ("cpu:3", "8 CPU device.*JAX_NUM_CPU_DEVICES=3"),
    ("v5p:4x4", "v5p has 3 dimensions, for example v5p:4x4x4"),
    ("v5e:4xx4", "v5e has 2 dimensions, for example v5e:4x4"),
    ("v6e", "for example v6e:4x4"),
    ("h100", "number of GPUs in one node, for example h100:8, or .* h100:4x8"),
    ("a100:1x2x4", "for example a100:8"),
    ("h10:8", "did you mean 'h100'"),
  ],
)
def test_unknown_topologies_are_rejected(topology, message):
  with pytest.raises(UserError, match=message):
    topology_devices(topology)


@pytest.mark.skipif(HAS_CUDA_PLUGIN, reason="the plugin is installed")
def test_without_the_plugin_one_line_says_how_to_get_it():
  with pytest.raises(UserError, match=r"'h100:4x8' cannot be described .*CUDA plugin.*pip install"):
    topology_devices("h100:4x8")


@needs_cuda_plugin
def test_gpus_in_nodes():
  devices, chip = topology_devices("h100:4x8")
  nodes = [device.process_index for device in devices]
  assert nodes == [node for node in range(4) for _ in range(8)]
  assert compute_capability(devices[0]) == (9, 0)
  assert chip_of(devices[0]) is chip
  assert compute_capability(topology_devices("t4:1")[0][0]) == (7, 5)


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("NVIDIA A100-SXM4-40GB", "a100-40"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H100 NVL", None),
    ("cpu", None),
  ],
)
def test_the_chip_of_a_device(kind, name):
  assert chip_of(types.SimpleNamespace(device_kind=kind)) is CHIPS.get(name)
