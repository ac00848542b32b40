"""Shardings of the activations [n, g, s, d], between layers and within them.

Between layers, the positions s are the logical axis "sequence", sharded over the mesh axes context
and tensor. Within layers they are the logical axis "position", sharded over context.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from gtpo_jax.runtime.mesh import constrain, divisible_axis


def residual_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Shards the residual stream between layers.

  The batch is sharded. Positions are sharded over context and tensor if their number is divisible
  by the product of the two axes, over context alone if it is divisible by that axis, and otherwise
  not at all.
  """
  positions = divisible_axis(mesh, x.shape[2], "sequence", "position")
  return constrain(x, mesh, "batch", None, positions, None)


def layer_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Shards the activations within a layer.

  The batch is sharded, and so are the positions if the context axis divides their number. All
  shards of the tensor axis have the same positions; each computes its own heads and MLP features
  for them.
  """
  positions = divisible_axis(mesh, x.shape[2], "position")
  return constrain(x, mesh, "batch", None, positions, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def layer_layout_of_gradient(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns `x` unchanged and gives its gradient the layout of `layer_layout`.

  The gradient of a weight matrix is the product of activations and the gradient of the residual
  stream. Without this function their positions would be sharded differently, the former over
  context only and the latter over context and tensor, and the compiler would gather the batch.
  """
  return x


layer_layout_of_gradient.defvjp(
  lambda x, mesh: (x, None), lambda mesh, _, d_out: (layer_layout(d_out, mesh),)
)
