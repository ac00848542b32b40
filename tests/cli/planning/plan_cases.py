"""The small run that the planning tests compile."""

import importlib.util

import pytest
from toys import config_of

from gtpo_jax.cli.planning.collectives import collectives

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

HAS_CUDA_PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None
needs_cuda_plugin = pytest.mark.skipif(
  not HAS_CUDA_PLUGIN, reason="JAX's CUDA plugin is not installed"
)


def small_config(**changes):
  """The default config on fsdp 2 x tensor 2, with these values by dotted name."""
  return config_of(**{"mesh.fsdp": 2, "mesh.tensor": 2, **changes})


def collective_bytes(hlo):
  """The bytes that one device sends in one run of a program, by kind of collective."""
  total = {}
  for collective in collectives(hlo):
    total[collective.kind] = total.get(collective.kind, 0) + collective.sent
  return {kind: round(sent) for kind, sent in total.items()}
