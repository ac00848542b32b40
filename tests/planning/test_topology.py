"""Topologies by name."""

import pytest

from gtpo_jax.planning.topology import topology_devices
from gtpo_jax.runtime.errors import UserError


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("v5x:4x4", "unknown topology 'v5x:4x4', did you mean 'v5p'"),
    ("cpu:3", "8 CPU device.*JAX_NUM_CPU_DEVICES=3"),
    ("v5p:4x4", "v5p has 3 dimensions, for example v5p:4x4x4"),
    ("v5e:4xx4", "v5e has 2 dimensions, for example v5e:4x4"),
    ("v6e", "for example v6e:4x4"),
  ],
)
def test_unknown_topologies_are_rejected(topology, message):
  with pytest.raises(UserError, match=message):
    topology_devices(topology)
