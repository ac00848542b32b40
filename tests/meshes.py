"""Meshes of the first devices."""

import math

import jax

from gtpo_jax.runtime.mesh import make_mesh


def mesh_of(data, fsdp, context, tensor):
  """Returns the mesh of the first data x fsdp x context x tensor devices."""
  devices = jax.devices()[: math.prod((data, fsdp, context, tensor))]
  return make_mesh(data=data, fsdp=fsdp, context=context, tensor=tensor, devices=devices)
