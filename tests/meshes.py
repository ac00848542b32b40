"""Meshes of the first devices."""

import math

import jax

from gtpo_jax.runtime.mesh import make_mesh


def mesh_of(data, fsdp, context, tensor, expert=1):
  """Returns the mesh of the first data x fsdp x context x tensor x expert devices."""
  sizes = {"data": data, "expert": expert, "fsdp": fsdp, "context": context, "tensor": tensor}
  return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
