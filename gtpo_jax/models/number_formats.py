"""Number formats: the compute dtype of a device, products of matrices, and quantised matrices.

**The compute dtype**, if it is left to "auto":

| device | format |
|---|---|
| a TPU | bfloat16 |
| a GPU with compute capability 8.0 or above, or with none (not NVIDIA) | bfloat16 |
| a GPU with compute capability 7.0 to 7.5, such as a T4 | float16 |
| an older GPU | float32 |
| a CPU with units for bfloat16, and a model of width 512 or above | bfloat16 |
| any other CPU | float32 |

On two cores with `avx512_bf16`, a step takes 0.81 times as long in bfloat16 as in float32 at width
128, 0.91 at 256, 0.71 at 512, 0.67 at 768, and 0.6 for SmolLM2-135M (576 wide, 30 layers, a
vocabulary of 49,152). Below 512 the models learn from random weights; they stay in float32, so that
their runs are the same on every CPU.

**Products** have a form for which every platform's compiler has a fast kernel. XLA's library for
CPUs has fast kernels for products of bfloat16 matrices with a float32 result, for processors with
such units (twice as fast as float32 there), and no others in bfloat16:

- A product whose result is bfloat16 is computed from operands that are converted to float32 first.
  So on CPUs the result is float32, and rounded afterwards, as the units of TPUs and GPUs do.
- XLA checks early that the library has a kernel, and moves transposes into the product later. If
  both operands end up transposed there is none, and the program fails when it runs: "Unsupported
  element type for DotThunk::Execute: BF16 x BF16 = F32". A barrier keeps the transposes out.

**Quantised** are the base matrices under adapters, to int8 or int4. A group of up to 128 inputs
shares a scale for each output. A matrix is stored as integers and converted back to the compute
dtype, one layer at a time, where a product uses it. The embedding, the head, norms and biases keep
their dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.runtime.chips import AMPERE, VOLTA, compute_capability, cpu_bfloat16_units
from gtpo_jax.runtime.fields import AUTO

MIN_CPU_WIDTH = 512  # of models that CPUs compute in bfloat16


class ComputeDtype(NamedTuple):
  """A format and the reason for it."""

  name: str  # "float32", "bfloat16" or "float16"
  reason: str  # completes "computing in NAME, because ..."


def compute_dtype_for(requested: str, device: Any, width: int) -> ComputeDtype:
  """Returns the format in which a device computes a model.

  Args:
    requested: `model.compute_dtype`; anything but "auto" is used as it is.
    device: a JAX device, which need not be attached.
    width: the model's features.
  """
  if requested != AUTO:
    return ComputeDtype(requested, f"model.compute_dtype is {requested}")
  name = device.device_kind
  if device.platform == "cpu":
    units = cpu_bfloat16_units()
    if not units:
      return ComputeDtype("float32", "this CPU has no bfloat16 units")
    if width < MIN_CPU_WIDTH:
      return ComputeDtype(
        "float32", f"on CPUs, models below width {MIN_CPU_WIDTH} gain little from bfloat16"
      )
    return ComputeDtype("bfloat16", f"this CPU has units for it ({units})")
  capability = compute_capability(device) or AMPERE
  if capability >= AMPERE:
    return ComputeDtype("bfloat16", f"{name} has units for it")
  if capability >= VOLTA:
    return ComputeDtype("float16", f"{name} has no bfloat16 units")
  return ComputeDtype("float32", f"{name} has no units for 16-bit formats")


def usable_compute_dtype(recorded: str, device: Any) -> str:
  """Returns the format that a run recorded, or "auto" if this device cannot compute in it."""
  is_old_gpu = (compute_capability(device) or AMPERE) < AMPERE
  return AUTO if is_old_gpu and recorded == "bfloat16" else recorded


# (x, y, preferred_element_type) -> their product
Multiply = Callable[..., jax.Array]


def matmul_float32(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
  """Returns `x @ y` as f32[..., a, c], for x [..., a, b] and y [..., b, c]."""
  return _product(functools.partial(jnp.matmul, precision=precision), x, y, jnp.float32)


def einsum(
  axes: str, x: jax.Array, y: jax.Array, precision: str, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the `jnp.einsum` of two arrays along `axes`, such as "td,vd->tv", as `dtype`."""
  return _product(functools.partial(jnp.einsum, axes, precision=precision), x, y, dtype)


def multiply_on_cpu(
  multiply: Multiply, x: jax.Array, y: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns the product of two arrays as `dtype`, in the form for CPUs.

  Args:
    multiply: the product, a function with an argument `preferred_element_type`.
    x, y: the arrays.
    dtype: of the result.
  """
  if not x.dtype == y.dtype == jnp.bfloat16:
    return multiply(x, y, preferred_element_type=dtype)
  exact = jax.lax.optimization_barrier(multiply(x, y, preferred_element_type=jnp.float32))
  return exact.astype(dtype)


def _product(
  multiply: Multiply, x: jax.Array, y: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns the product as `dtype`, in the form for the platform that it is compiled for."""
  if not x.dtype == y.dtype == jnp.bfloat16:
    return multiply(x, y, preferred_element_type=dtype)
  return jax.lax.platform_dependent(
    x,
    y,
    cpu=lambda x, y: multiply_on_cpu(multiply, x, y, dtype),
    default=functools.partial(multiply, preferred_element_type=dtype),
  )


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
