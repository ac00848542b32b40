"""The matrix products of experts: each row with the matrix of its expert, and no token dropped.

There are two forms.

- *Grouped*, on TPUs: the rows are sorted by expert, and `jax.lax.ragged_dot` multiplies each range
  of rows with a matrix.
- *Blocks*, on CPUs and GPUs, where XLA computes a ragged product with every matrix (E times the
  work, in jax 0.10.2 compiled for an H100 too), and everywhere for few tokens: the rows of an
  expert are padded to whole blocks, and each block is multiplied with a copy of its matrix. With
  few tokens a block is one row, and only the matrices of the chosen experts are read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.own_rows import move
from gtpo_jax.models.formats.products import einsum
from gtpo_jax.models.layers import Matrix

# There are about so many blocks for each expert: more would copy the matrices more often, and
# fewer would have more padding.
BLOCKS_PER_EXPERT = 4


class Rows(NamedTuple):
  """How the choices of tokens [t] are computed, k choices for each token.

  Attributes:
    to_rows: i32[1, r], the choice in [t k] that a row computes; -1 for padding.
    from_rows: i32[1, t k], the row that computes a choice; -1 if its expert is not here.
    sizes: i32[experts], the rows of each expert, for the grouped form; else None.
    block_experts: i32[blocks], the expert of each block of rows, for the other form; else None.
  """

  to_rows: jax.Array
  from_rows: jax.Array
  sizes: jax.Array | None = None
  block_experts: jax.Array | None = None

  def gather(self, x: jax.Array) -> jax.Array:
    """Returns the rows [r, d] of tokens x [t, d]."""
    t, d = x.shape
    choices = jnp.broadcast_to(x[:, None], (t, self.from_rows.size // t, d)).reshape(1, -1, d)
    return move(choices, self.to_rows, self.from_rows)[0]

  def collect(self, rows: jax.Array, t: int) -> jax.Array:
    """Returns the results [t, k, d] of rows [r, d]; 0 for experts that are not here."""
    return move(rows[None], self.from_rows, self.to_rows).reshape(t, -1, rows.shape[1])

  def multiply(self, x: jax.Array, matrix: Matrix, precision: str) -> jax.Array:
    """Returns the products [r, c] of rows x [r, a] with matrices [experts, a, c] of their experts.

    Adapters are not included.
    """
    if self.sizes is not None:
      return _grouped(x, matrix.dense(x.dtype), self.sizes, precision)
    copies = jax.tree.map(lambda w: w[self.block_experts], matrix).dense(x.dtype)
    blocks = x.reshape(len(copies), -1, x.shape[1])
    products = einsum("nba,nac->nbc", blocks, copies, precision, x.dtype)
    return products.reshape(len(x), -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x: jax.Array, kernels: jax.Array, sizes: jax.Array, precision: str) -> jax.Array:
  """Returns the products [r, c] of ranges of rows [r, a] with kernels [experts, a, c].

  The gradient of JAX for the kernels multiplies all rows for each expert (jax 0.10.2, also on
  TPUs). Here the rows of an expert are padded to blocks, and the products of its blocks are added.
  """
  return jax.lax.ragged_dot(x, kernels, sizes, precision=precision)


def _grouped_forward(
  x: jax.Array, kernels: jax.Array, sizes: jax.Array, precision: str
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _grouped(x, kernels, sizes, precision), (x, kernels, sizes)


def _grouped_backward(
  precision: str, saved: tuple[jax.Array, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x, kernels, sizes = saved
  d_x = jax.lax.ragged_dot(d_out, jnp.swapaxes(kernels, 1, 2), sizes, precision=precision)
  experts = len(kernels)
  block = 1 << (len(x) // experts).bit_length() - 1
  padding = _Padding.of(sizes, len(x), block)
  place = padding.places - padding.shift[padding.block_experts][:, None]
  end = jnp.cumsum(sizes)[padding.block_experts][:, None]
  rows = lambda y: jnp.where((place < end)[..., None], y[jnp.minimum(place, len(x) - 1)], 0)
  products = einsum("nba,nbc->nac", rows(x), rows(d_out), precision)
  d_kernels = jax.ops.segment_sum(products, padding.block_experts, experts, True)
  return d_x, d_kernels.astype(kernels.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


class _Padding(NamedTuple):
  """Where sorted rows are after the rows of each expert are padded to whole blocks.

  Attributes:
    shift: i32[experts], by how much the rows of an expert move.
    places: i32[blocks, block], the places of each block.
    block_experts: i32[blocks].
  """

  shift: jax.Array
  places: jax.Array
  block_experts: jax.Array

  @classmethod
  def of(cls, sizes: jax.Array, count: int, block: int) -> _Padding:
    """Returns that of up to `count` rows, `sizes` i32[experts] of each expert."""
    experts = len(sizes)
    blocks = (count + experts * (block - 1)) // block
    padded = -(-sizes // block) * block
    ends = jnp.cumsum(padded)
    places = jnp.arange(blocks * block).reshape(blocks, block)
    of_block = jnp.searchsorted(ends, places[:, 0], side="right", method="compare_all")
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)
    return cls(shift, places, jnp.minimum(of_block, experts - 1).astype(jnp.int32))


def plan_rows(ids: jax.Array, experts: int, platform: str) -> Rows:
  """Returns how choices are computed by the experts of this device.

  Args:
    ids: i32[t, k], the chosen experts; those from 0 to `experts` - 1 are here.
    experts: the number of experts of this device.
    platform: "cpu", "gpu" or "tpu".
  """
  count = ids.size
  flat = ids.reshape(-1)
  is_here = (flat >= 0) & (flat < experts)
  if count <= experts:
    number = jnp.arange(count)
    index = jnp.where(is_here, number, -1)[None]
    return Rows(index, index, block_experts=jnp.where(is_here, flat, 0))
  key = jnp.where(is_here, flat, experts)
  order = jnp.argsort(key)
  sizes = jnp.zeros(experts, jnp.int32).at[flat].add(is_here.astype(jnp.int32), mode="drop")
  if platform != "tpu":
    return _blocks(flat, order, is_here, sizes, _block_size(count, experts))
  inverse = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count))
  used = jnp.arange(count) < sizes.sum()
  return Rows(jnp.where(used, order, -1)[None], jnp.where(is_here, inverse, -1)[None], sizes)


def _block_size(count: int, experts: int) -> int:
  """Returns the rows of a block, a power of two."""
  return 1 << max(count // (BLOCKS_PER_EXPERT * experts), 1).bit_length() - 1


def _blocks(
  flat: jax.Array, order: jax.Array, is_here: jax.Array, sizes: jax.Array, block: int
) -> Rows:
  """Pads the rows of each expert to whole blocks; `order` sorts the choices by expert."""
  count = flat.size
  padding = _Padding.of(sizes, count, block)
  place = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count))
  row = place + padding.shift[jnp.clip(flat, 0, len(sizes) - 1)]
  from_rows = jnp.where(is_here, row, -1)
  beyond = padding.places.size
  to_rows = jnp.full(beyond, -1, jnp.int32)
  to_rows = to_rows.at[jnp.where(is_here, row, beyond)].set(jnp.arange(count), mode="drop")
  return Rows(to_rows[None], from_rows[None], block_experts=padding.block_experts)


def experts_output(
  x: jax.Array,
  weights: jax.Array,
  rows: Rows,
  matrices: tuple[Matrix, Matrix, Matrix],
  activation: functools.partial,
  precision: str,
  lora_scale: float,
) -> jax.Array:
  """Returns the weighted sum of the experts' outputs, [t, d], of those that are here.

  Args:
    x: [t, d].
    weights: f32[t, k].
    rows: from `plan_rows`.
    matrices: gate and up [experts, d, f], and down [experts, f, d].
    activation: of the gate.
    precision: of the products.
    lora_scale: what the products of adapters are multiplied by.
  """

  def product(rows_in: jax.Array, matrix: Matrix) -> jax.Array:
    out = rows.multiply(rows_in, Matrix(matrix.kernel, matrix.scale), precision)
    if matrix.lora_a is None:
      return out
    low_rank = rows.multiply(rows_in, Matrix(matrix.lora_a), precision)
    return out + rows.multiply(low_rank, Matrix(matrix.lora_b), precision) * lora_scale

  gate, up, down = matrices
  rows_in = rows.gather(x)
  hidden = activation(product(rows_in, gate)) * product(rows_in, up)
  outputs = rows.collect(product(hidden, down), len(x))
  return (outputs.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)
