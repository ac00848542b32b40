"""The modules of a layer: RMSNorm, and linear maps with optional adapters."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.declaration import declare
from gtpo_jax.models.formats.products import multiply_on_cpu
from gtpo_jax.models.formats.quantize import (
  FORMATS,
  dequantize,
  init_integers,
  init_scale,
  scale_shape,
)

MATRIX_DEVIATION = 0.02  # `initializer_range` of the published models
MATRIX_INIT = nn.initializers.normal(MATRIX_DEVIATION)


class RMSNorm(nn.Module):
  """RMSNorm over the last axes, computed in float32.

  Attributes:
    features: the sizes of these axes.
    axes: their logical names.
    factor: the result is multiplied by it.
  """

  config: ModelConfig
  features: tuple[int, ...]
  axes: tuple[str, ...] = ("norm",)
  factor: float = 1.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises and scales `x` [..., *features]; the result has x's dtype."""
    dtype = DTYPES[self.config.param_dtype]
    is_centred = self.config.family.centred_norms
    init = nn.initializers.zeros if is_centred else nn.initializers.ones
    scale = declare(self, "scale", init, self.features, self.axes, dtype)
    if is_centred:
      scale = 1.0 + scale.astype(jnp.float32)
    if self.factor != 1.0:
      scale = scale * self.factor
    h = x.astype(jnp.float32)
    last = tuple(range(-len(self.features), 0))
    h = h * jax.lax.rsqrt(jnp.square(h).mean(last, keepdims=True) + self.config.norm_eps)
    return (h * scale).astype(x.dtype)


def normalised(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
  """Applies a norm, if the family has it."""
  return x if norm is None else norm(x)


class Dense(nn.Module):
  """A linear map from the trailing `inputs` axes to `outputs` axes, with an optional adapter.

  Attributes:
    inputs: sizes of the contracted axes.
    outputs: sizes of the resulting axes.
    axes: logical names of the inputs and outputs.
    bias: whether to add a bias of shape `outputs`.
  """

  config: ModelConfig
  mesh: Mesh
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  axes: tuple[str, ...]
  bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `x` [..., *inputs] to [..., *outputs] in x's dtype."""
    dtype = DTYPES[self.config.param_dtype]
    split = len(self.inputs)
    kernel = self._quantized_kernel(x.dtype) if self.config.quantize else self._kernel(x.dtype)
    y = self._product(x, kernel, split)
    if self.name in self.config.lora.targets and self.config.lora.rank:
      y = y + self._adapter(x)
    if self.bias:
      zeros = nn.initializers.zeros
      bias = declare(self, "bias", zeros, self.outputs, self.axes[split:], dtype)
      y = y + bias.astype(x.dtype)
    return y

  def _kernel(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    shape = self.inputs + self.outputs
    stored = DTYPES[self.config.param_dtype]
    split = len(self.inputs)
    return declare(self, "kernel", MATRIX_INIT, shape, self.axes, stored, split).astype(dtype)

  def _quantized_kernel(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    c = self.config
    shape = self.inputs + self.outputs
    split = len(self.inputs)
    integers = init_integers(c.quantize)
    kernel = declare(self, "kernel", integers, shape, self.axes, FORMATS[c.quantize], split)
    scale = declare(
      self,
      "kernel_scale",
      init_scale(c.quantize, MATRIX_DEVIATION),
      scale_shape(shape, split - 1),
      (*self.axes[: split - 1], "group", *self.axes[split:]),
      DTYPES[c.param_dtype],
    )
    return dequantize(kernel, scale, dtype)

  def _adapter(self, x: jax.Array) -> jax.Array:
    """Returns the low-rank product x A B (alpha / rank). A and B are stored as float32."""
    lora = self.config.lora
    split = len(self.inputs)
    a = declare(
      self,
      "lora_a",
      _lora_a_init(self.inputs),
      (*self.inputs, lora.rank),
      (*self.axes[:split], "rank"),
      jnp.float32,
      inputs=split,
    )
    b = declare(
      self,
      "lora_b",
      nn.initializers.zeros,
      (lora.rank, *self.outputs),
      ("rank", *self.axes[split:]),
      jnp.float32,
      inputs=1,
    )
    low_rank = self._product(x, a.astype(x.dtype), split)
    return self._product(low_rank, b.astype(x.dtype), 1) * (lora.alpha / lora.rank)

  def _product(self, x: jax.Array, kernel: jax.Array, axes: int) -> jax.Array:
    """Contracts the last `axes` axes of x with the first `axes` axes of the kernel."""
    on_cpu = self.mesh.devices.flat[0].platform == "cpu"
    own_gradient = self.mesh.size == 1 or (on_cpu and x.dtype == jnp.bfloat16)
    multiply = _multiply_with_gradient if own_gradient else _multiply
    return multiply(x, kernel, axes, self.config.matmul_precision, on_cpu)


def _lora_a_init(inputs: tuple[int, ...]) -> nn.initializers.Initializer:
  """Returns the initializer of A, uniform within +-1 / sqrt(fan in) as in PEFT.

  B is initialised to zero, so a new adapter adds zero.
  """
  bound = math.prod(inputs) ** -0.5
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _multiply(
  x: jax.Array, kernel: jax.Array, axes: int, precision: str, on_cpu: bool
) -> jax.Array:
  return _contract(x, kernel, range(x.ndim - axes, x.ndim), range(axes), precision, on_cpu)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _multiply_with_gradient(
  x: jax.Array, kernel: jax.Array, axes: int, precision: str, on_cpu: bool
) -> jax.Array:
  """`_multiply` with a kernel gradient that is computed in the kernel's axis order.

  JAX computes this gradient with the kernel's axes reversed, from a transposed incoming gradient.
  On CPU, XLA then recomputes the incoming gradient column by column, together with everything fused
  into it, which takes three tenths of an update. This was measured on one device only, so several
  devices use JAX's gradient, except on CPUs in bfloat16: there, JAX would multiply the float32
  gradient of a product before rounding.
  """
  return _multiply(x, kernel, axes, precision, on_cpu)


def _forward(
  x: jax.Array, kernel: jax.Array, axes: int, precision: str, on_cpu: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _multiply(x, kernel, axes, precision, on_cpu), (x, kernel)


def _backward(
  axes: int, precision: str, on_cpu: bool, saved: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, kernel = saved
  leading = range(x.ndim - axes)
  outputs = range(len(leading), d_out.ndim)
  d_x = _contract(d_out, kernel, outputs, range(axes, kernel.ndim), precision, on_cpu)
  return d_x, _contract(x, d_out, leading, leading, precision, on_cpu)


_multiply_with_gradient.defvjp(_forward, _backward)


def _contract(
  x: jax.Array, y: jax.Array, x_axes: range, y_axes: range, precision: str, on_cpu: bool
) -> jax.Array:
  dimensions = ((tuple(x_axes), tuple(y_axes)), ((), ()))
  multiply = functools.partial(
    jax.lax.dot_general, dimension_numbers=dimensions, precision=precision
  )
  return multiply_on_cpu(multiply, x, y, x.dtype) if on_cpu else multiply(x, y)
