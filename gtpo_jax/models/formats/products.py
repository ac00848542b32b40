"""Matrix products, in a form for which every platform's compiler has a fast kernel.

CPUs are the exception that needs care. XLA's library for CPUs has fast kernels for products of
bfloat16 matrices with a float32 result, for processors with such units (twice as fast as float32
there), and no others in bfloat16:

- A product whose result is bfloat16 is computed from operands that are converted to float32 first.
  So on CPUs the result is float32, and rounded afterwards, as the units of TPUs and GPUs do.
- XLA checks early that the library has a kernel, and moves transposes into the product later. If
  both operands end up transposed there is none, and the program fails when it runs: "Unsupported
  element type for DotThunk::Execute: BF16 x BF16 = F32". A barrier keeps the transposes out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

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
