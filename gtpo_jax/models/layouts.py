"""How activations [n, g, s, d] are split over the mesh, between layers and within them."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from gtpo_jax.runtime.mesh import constrain, divisible_axis


def residual_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Lays out the residual stream between layers.

  It is split over the batch, and over positions if context times tensor (or else context) divides
  their number.
  """
  positions = divisible_axis(mesh, x.shape[2], "sequence", "position")
  return constrain(x, mesh, "batch", None, positions, None)


def layer_layout(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Lays out activations within a layer.

  They are split over the batch, and over positions if the context axis divides their number. Every
  shard of the tensor axis has the same positions, because it multiplies them with its own heads
  and MLP features.
  """
  positions = divisible_axis(mesh, x.shape[2], "position")
  return constrain(x, mesh, "batch", None, positions, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def layer_layout_of_gradient(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Returns `x` unchanged and gives its gradient the layout of `layer_layout`.

  Without it the compiler gathers the batch for the gradient of a matrix: one operand is split over
  context only, while the gradient of the residual stream is split over context and tensor.
  """
  return x


layer_layout_of_gradient.defvjp(
  lambda x, mesh: (x, None), lambda mesh, _, d_out: (layer_layout(d_out, mesh),)
)
