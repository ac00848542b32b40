"""The small run that the planning tests compile."""

import importlib.util

import pytest
from toys import config_of

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
