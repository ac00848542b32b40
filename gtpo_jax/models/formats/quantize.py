"""Weight-only quantisation of the base matrices under adapters, to int8 or int4.

A group of up to 128 inputs shares a scale for each output. A matrix is stored as integers and
converted back to the compute dtype, one layer at a time, where a product uses it. The embedding,
the head, norms and biases keep their dtype.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

FORMATS = {"int8": jnp.int8, "int4": jnp.int4}
MAX_GROUP = 128  # inputs; their scale, in 16 bits, adds an eighth of a bit per weight


def scale_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
  """Returns the shape of the scales of a matrix that is grouped along `axis`."""
  groups = shape[axis] // math.gcd(shape[axis], MAX_GROUP)
  return (*shape[:axis], groups, *shape[axis + 1 :])


def quantize(kernel: jax.Array, axis: int, dtype: str) -> tuple[jax.Array, jax.Array]:
  """Quantises a matrix symmetrically.

  Args:
    kernel: a matrix, of any number of axes.
    axis: the axis of inputs that is divided into groups.
    dtype: "int8" or "int4".

  Returns:
    Integers of the kernel's shape, and scales of shape `scale_shape` in the kernel's dtype. The
    scale of a group is its largest magnitude divided by 127.5 or 7.5, so that rounding uses the
    largest integer as often as the others.
  """
  groups = scale_shape(kernel.shape, axis)[axis]
  grouped = _grouped(kernel, axis, groups).astype(jnp.float32)
  largest = jnp.abs(grouped).max(axis + 1, keepdims=True)
  limit = jnp.iinfo(FORMATS[dtype]).max
  scale = jnp.where(largest > 0, largest / (limit + 0.5), 1.0).astype(kernel.dtype)
  integers = jnp.clip(jnp.round(grouped / scale.astype(jnp.float32)), -limit - 1, limit)
  return integers.astype(FORMATS[dtype]).reshape(kernel.shape), jnp.squeeze(scale, axis + 1)


def dequantize(kernel: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns the matrix in `dtype`: integers times their group's scale."""
  # The grouped axis is the only one where the shapes differ, unless a group has one input.
  pairs = enumerate(zip(kernel.shape, scale.shape, strict=True))
  axis = next((axis for axis, (size, groups) in pairs if size != groups), 0)
  grouped = _grouped(kernel, axis, scale.shape[axis]).astype(dtype)
  return (grouped * jnp.expand_dims(scale, axis + 1).astype(dtype)).reshape(kernel.shape)


def init_integers(dtype: str) -> jax.nn.initializers.Initializer:
  """Returns an initializer of random integers; with `init_scale` they are like random weights."""
  limit = int(jnp.iinfo(FORMATS[dtype]).max)

  def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    normal = jax.random.normal(key, shape) * (limit / 3)
    return jnp.clip(jnp.round(normal), -limit, limit).astype(dtype)

  return init


def init_scale(dtype: str, deviation: float) -> jax.nn.initializers.Initializer:
  """Returns an initializer of scales for weights of this standard deviation."""
  return jax.nn.initializers.constant(3 * deviation / int(jnp.iinfo(FORMATS[dtype]).max))


def _grouped(kernel: jax.Array, axis: int, groups: int) -> jax.Array:
  """Splits an axis of a matrix in two: the groups, and the inputs of a group."""
  size = kernel.shape[axis] // groups
  return kernel.reshape(*kernel.shape[:axis], groups, size, *kernel.shape[axis + 1 :])
