"""The tokens whose logits a device has in memory by default."""

import types

import numpy as np
import pytest

from gtpo_jax.runtime.mesh import MESH_AXES, single_device_mesh
from gtpo_jax.training.head_logits import default_chunk

VOCAB = 151_936


def mesh_of(kind, tensor=1, memory=None):
  """Stands for a mesh of devices that are not attached, or of which only the memory is known."""
  device = types.SimpleNamespace(
    platform="gpu", device_kind=kind, memory_stats=lambda: memory and {"bytes_limit": memory}
  )
  shape = dict.fromkeys(MESH_AXES, 1) | {"tensor": tensor}
  return types.SimpleNamespace(devices=np.asarray([device], object), shape=shape)


@pytest.mark.parametrize(
  ("kind", "tensor", "expected"),
  [
    # 4 x 989e12 / 3.35e12 = 1,181 tokens; 5 GiB holds the logits of 5,800.
    ("NVIDIA H100 80GB HBM3", 1, 2048),
    # 4 x 197e12 / 819e9 = 962 tokens; 1 GiB holds 1,177, or 294 of four vocabularies.
    ("TPU v5 lite", 1, 1024),
    ("TPU v5 lite", 4, 1024),
    # 4 x 121e12 / 300e9 = 1,613 tokens; 1.37 GiB holds 1,616.
    ("NVIDIA L4", 1, 1024),
    ("NVIDIA L4", 2, 2048),
  ],
)
def test_by_hand(kind, tensor, expected):
  assert default_chunk(mesh_of(kind, tensor), VOCAB) == expected


def test_a_device_that_is_not_in_the_table_says_how_much_memory_it_has():
  assert default_chunk(mesh_of("NVIDIA H100 NVL", memory=90 * 2**30), VOCAB) == 4096
  assert default_chunk(mesh_of("NVIDIA GeForce", memory=4 * 2**30), VOCAB) == 256
  assert default_chunk(mesh_of("NVIDIA GeForce"), VOCAB) == 1024


@pytest.mark.parametrize(
  ("vocab", "chunk"), [(384, 4096), (10_000, 4096), (49_152, 512), (VOCAB, 256)]
)
def test_the_cpu(vocab, chunk):
  """At most 256 MiB of logits."""
  assert default_chunk(single_device_mesh(), vocab) == chunk
