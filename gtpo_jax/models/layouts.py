"""How activations [n, g, s, d] are split over the mesh, between layers and within them.

Positions have two logical axes: between layers "sequence", split over the mesh axes context and
tensor, and within layers "position", split over context.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from gtpo_jax.runtime.mesh import constrain, divisible_axis


def residual_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Lays out the residual stream between layers.

  It is split over the batch. Positions are split over context and tensor if the product of the two
  divides their number, otherwise over context if that does.
  """
  positions = divisible_axis(mesh, x.shape[2], "sequence", "position")
  return constrain(x, mesh, "batch", None, positions, None)


def layer_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Lays out activations within a layer.

  They are split over the batch, and over positions if the context axis divides their number. All
  shards of the tensor axis have the same positions, because each computes them for its own heads
  and MLP features.
  """
  positions = divisible_axis(mesh, x.shape[2], "position")
  return constrain(x, mesh, "batch", None, positions, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def layer_layout_of_gradient(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns `x` unchanged and gives its gradient the layout of `layer_layout`.

  Otherwise the two operands of a matrix's gradient would be split differently: the activations over
  context only, and the gradient of the residual stream over context and tensor. The compiler would
  then gather the batch.
  """
  return x


layer_layout_of_gradient.defvjp(
  lambda x, mesh: (x, None), lambda mesh, _, d_out: (layer_layout(d_out, mesh),)
)
