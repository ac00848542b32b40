"""The modules of a layer: RMSNorm, linear maps with optional adapters, and activations' shardings.

Activations are [n, g, s, d]. Between layers, the positions s are the logical axis "sequence",
sharded over the mesh axes context and tensor. Within layers they are the logical axis "position",
sharded over context.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.config import DTYPES, ModelConfig
from gtpo_jax.models.declaration import AxisRoles, declare
from gtpo_jax.models.number_formats import (
  FORMATS,
  dequantize,
  init_integers,
  init_scale,
  multiply_on_cpu,
  scale_shape,
)
from gtpo_jax.runtime.mesh import constrain, divisible_axis

MATRIX_DEVIATION = 0.02  # `initializer_range` of the published models
MATRIX_INIT = nn.initializers.normal(MATRIX_DEVIATION)


class RMSNorm(nn.Module):
  """RMSNorm over the last axes, computed in float32."""

  config: ModelConfig
  features: tuple[int, ...]  # the sizes of these axes
  axes: tuple[str, ...] = ("norm",)  # their logical names
  factor: float = 1.0  # the result is multiplied by it
  # whether the scale is stored without the 1 that it is added to; None if the family says it
  is_centred: bool | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises and scales `x` [..., *features]; the result has x's dtype."""
    dtype = DTYPES[self.config.param_dtype]
    is_centred = self.is_centred
    if is_centred is None:
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


# The function that a gated MLP applies to its gate.
Activation = Callable[[jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns `activation(gate) * up`, the hidden features of a gated MLP (2002.05202).

  The backward pass keeps the two arrays and nothing else.
  """
  return activation(gate) * up


def _gated_backward(
  activation: Activation, kept: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
  # With the barrier, XLA's compiler for GPUs computes both gradients in one pass over the arrays.
  kept = jax.lax.platform_dependent(
    *kept, cuda=lambda *x: jax.lax.optimization_barrier(x), default=lambda *x: x
  )
  _, gradients = jax.vjp(lambda gate, up: activation(gate) * up, *kept)
  return gradients(d_out)


gated.defvjp(lambda activation, *kept: (gated(activation, *kept), kept), _gated_backward)


class Matrix(NamedTuple):
  """The parameters of a linear map without its bias, or the logical axes of each of them."""

  kernel: Any  # [*numbered, *inputs, *outputs]
  scale: Any = None  # of a quantised kernel, see `quantize.scale_shape`
  lora_a: Any = None  # [*numbered, *inputs, rank], float32
  lora_b: Any = None  # [*numbered, rank, *outputs], float32

  def dense(self, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the kernel in `dtype`."""
    if self.scale is None:
      return self.kernel.astype(dtype)
    return dequantize(self.kernel, self.scale, dtype)


def declare_matrix(
  module: nn.Module,
  config: ModelConfig,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  roles: AxisRoles,
  adapted: bool = False,
) -> tuple[Matrix, Matrix]:
  """Declares the parameters of a linear map; returns them, and their logical axes.

  Args:
    module: a bound module.
    config: says whether the kernel is quantised, and the rank of an adapter.
    shape, axes: of the kernel.
    roles: as in `declare`; `parts` are those of the last axis.
    adapted: whether the map has an adapter, if the model has any.
  """
  stored = DTYPES[config.matrix_dtype]
  first, split = roles.numbered, roles.numbered + roles.inputs
  values = {}
  names = {"kernel": axes}
  if config.quantize:
    integers = init_integers(config.quantize)
    values["kernel"] = declare(
      module, "kernel", integers, shape, axes, FORMATS[config.quantize], roles
    )
    init = init_scale(config.quantize, MATRIX_DEVIATION)
    names["scale"] = (*axes[: split - 1], "group", *axes[split:])
    scales = scale_shape(shape, split - 1)
    values["scale"] = declare(module, "kernel_scale", init, scales, names["scale"], stored)
  else:
    values["kernel"] = declare(module, "kernel", MATRIX_INIT, shape, axes, stored, roles)
  if adapted and (rank := config.lora.rank):
    names["lora_a"] = (*axes[:split], "rank")
    a = (*shape[:split], rank)
    # Uniform within +-1 / sqrt(fan in) as in PEFT; B is 0, so a new adapter adds 0.
    bound = math.prod(shape[first:split]) ** -0.5
    init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
    of_a = roles._replace(parts=())
    values["lora_a"] = declare(module, "lora_a", init, a, names["lora_a"], jnp.float32, of_a)
    names["lora_b"] = (*axes[:first], "rank", *axes[split:])
    b = (*shape[:first], rank, *shape[split:])
    zeros = nn.initializers.zeros
    of_b = roles._replace(inputs=1)
    values["lora_b"] = declare(module, "lora_b", zeros, b, names["lora_b"], jnp.float32, of_b)
  return Matrix(**values), Matrix(**names)


class Dense(nn.Module):
  """A linear map from the trailing `inputs` axes to `outputs` axes, with an optional adapter."""

  config: ModelConfig
  mesh: Mesh
  inputs: tuple[int, ...]  # sizes of the contracted axes
  outputs: tuple[int, ...]  # sizes of the resulting axes
  axes: tuple[str, ...]  # logical names of the inputs and outputs
  bias: bool = False  # whether to add a bias of shape `outputs`
  target: str = ""  # its name in `Lora.targets`; "" for its own name
  parts: tuple[int, ...] = ()  # of the last output axis, as in `AxisRoles`

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `x` [..., *inputs] to [..., *outputs] in x's dtype."""
    lora = self.config.lora
    split = len(self.inputs)
    adapted = (self.target or self.name) in lora.targets
    shape = self.inputs + self.outputs
    roles = AxisRoles(split, parts=self.parts)
    matrix, _ = declare_matrix(self, self.config, shape, self.axes, roles, adapted)
    y = self._product(x, matrix.dense(x.dtype), split)
    if matrix.lora_a is not None:  # the low-rank product x A B (alpha / rank)
      low_rank = self._product(x, matrix.lora_a.astype(x.dtype), split)
      y = y + self._product(low_rank, matrix.lora_b.astype(x.dtype), 1) * lora.scale
    if self.bias:
      zeros = nn.initializers.zeros
      stored = DTYPES[self.config.param_dtype]
      bias = declare(self, "bias", zeros, self.outputs, self.axes[split:], stored)
      y = y + bias.astype(x.dtype)
    return y

  def _product(self, x: jax.Array, kernel: jax.Array, axes: int) -> jax.Array:
    """Contracts the last `axes` axes of x with the first `axes` axes of the kernel."""
    on_cpu = self.mesh.devices.flat[0].platform == "cpu"
    own_gradient = self.mesh.size == 1 or (on_cpu and x.dtype == jnp.bfloat16)
    multiply = _multiply_with_gradient if own_gradient else _multiply
    return multiply(x, kernel, axes, self.config.matmul_precision, on_cpu)


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
