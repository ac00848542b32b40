"""The matrix products of experts: each row with the matrix of its expert, and no token dropped.

There are two forms.

- *Grouped*, on TPUs: the rows are sorted by expert, and `jax.lax.ragged_dot` multiplies each range
  of rows with a matrix.
- *Blocks*, on CPUs and GPUs, where XLA computes a ragged product with every matrix (E times the
  work, in jax 0.10.2 compiled for an H100 too), and everywhere for few tokens: the rows of an
  expert are padded to whole blocks, and each block is multiplied with a copy of its matrix. With
  few tokens a block is one row, and only the matrices of the chosen experts are read.

No shape depends on the routes: there are as many rows as if all chosen experts were on this device.
Loops over blocks end after the last one that has rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.models.attention.own_rows import move
from gtpo_jax.models.layers import Activation, Matrix, gated
from gtpo_jax.models.number_formats import einsum

# About so many blocks of an expert have rows: more would copy the matrices more often, and fewer
# would have more padding.
BLOCKS_PER_EXPERT = 4
# So many blocks are multiplied at a time, each with a copy of its matrix.
BLOCKS_AT_A_TIME = 64


class Blocks(NamedTuple):
  """Blocks of rows, each of one expert. Those without rows come last."""

  experts: jax.Array  # i32[blocks], the expert of each
  used: jax.Array  # i32[], how many have rows
  # i32[blocks, size], the row at each place, -1 for none; None if the rows lie in blocks
  rows: jax.Array | None = None

  def take(self, x: jax.Array, i: jax.Array) -> jax.Array:
    """Returns the rows [blocks, size, a] of the `i`-th part of the blocks, from rows x [r, a]."""
    if self.rows is None:
      return self._part(x.reshape(len(self.experts), -1, x.shape[1]), i)
    rows = self._part(self.rows, i)
    return jnp.where((rows < 0)[..., None], jnp.zeros((), x.dtype), x[jnp.maximum(rows, 0)])

  def multiply(self, axes: str, x: jax.Array, matrix: Matrix, c: int, precision: str) -> jax.Array:
    """Returns products [r, c], `axes`, of rows x that lie in blocks with copies of matrices."""
    blocks = len(self.experts)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
      experts = self._part(self.experts, i)
      copies = jax.tree.map(lambda w: w[experts], matrix).dense(x.dtype)
      products = einsum(axes, self.take(x, i), copies, precision, x.dtype)
      return jax.lax.dynamic_update_slice_in_dim(out, products, i * self._step, 0)

    return self._loop(add, x, (blocks, len(x) // blocks, c), x.dtype).reshape(-1, c)

  def outer(self, x: jax.Array, y: jax.Array, experts: int, precision: str) -> jax.Array:
    """Returns f32[experts, a, c], the sums over rows of x [r, a] times y [r, c]."""

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
      products = einsum("nba,nbc->nac", self.take(x, i), self.take(y, i), precision)
      return sums.at[self._part(self.experts, i)].add(products, indices_are_sorted=True)

    return self._loop(add, x, (experts, x.shape[1], y.shape[1]), jnp.float32)

  @property
  def _step(self) -> int:
    return len(self.experts) // _parts(len(self.experts))

  def _part(self, x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * self._step, self._step)

  def _loop(
    self,
    add: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
  ) -> jax.Array:
    """Returns zeros of this shape to which all parts with rows were added; `add` reads `x`."""
    zero = jnp.zeros((), dtype)
    if len(self.experts) == self._step:
      return add(jnp.zeros((), jnp.int32), jnp.broadcast_to(zero, shape))
    # Without the barrier, XLA writes the zeros of every layer before it computes the first layer.
    zero, _ = jax.lax.optimization_barrier((zero, x))
    return jax.lax.fori_loop(0, -(-self.used // self._step), add, jnp.broadcast_to(zero, shape))


class Rows(NamedTuple):
  """How the choices of tokens [t] are computed, k choices for each token."""

  to_rows: jax.Array  # i32[1, r], the choice in [t k] that a row computes; -1 for padding
  from_rows: jax.Array  # i32[1, t k], the row that computes a choice; -1 if its expert is not here
  blocks: Blocks  # the rows in blocks
  # i32[experts], the rows of each expert, for the grouped form; else None
  sizes: jax.Array | None = None

  def gather(self, x: jax.Array) -> jax.Array:
    """Returns the rows [r, d] of tokens x [t, d]."""
    t, d = x.shape
    choices = jnp.broadcast_to(x[:, None], (t, self.from_rows.size // t, d)).reshape(1, -1, d)
    return move(choices, self.to_rows, self.from_rows)[0]

  def collect(self, rows: jax.Array, t: int) -> jax.Array:
    """Returns the results [t, k, d] of rows [r, d]; 0 for experts that are not here."""
    return move(rows[None], self.from_rows, self.to_rows).reshape(t, -1, rows.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply(x: jax.Array, matrix: Matrix, rows: Rows, precision: str) -> jax.Array:
  """Returns the products [r, c] of rows x [r, a] with matrices [experts, a, c] of their experts.

  Adapters are not included. Quantised matrices have no gradient. The gradient of `ragged_dot` in
  JAX for the matrices multiplies all rows for each expert (jax 0.10.2, also on TPUs); here it is
  computed in blocks.
  """
  if rows.sizes is None:
    return rows.blocks.multiply("nba,nac->nbc", x, matrix, matrix.kernel.shape[2], precision)
  return jax.lax.ragged_dot(x, matrix.dense(x.dtype), rows.sizes, precision=precision)


def _forward(
  x: jax.Array, matrix: Matrix, rows: Rows, precision: str
) -> tuple[jax.Array, tuple[jax.Array, Matrix, Rows]]:
  return multiply(x, matrix, rows, precision), (x, matrix, rows)


def _backward(
  precision: str, saved: tuple[jax.Array, Matrix, Rows], d_out: jax.Array
) -> tuple[jax.Array, Matrix | None, None]:
  x, matrix, rows = saved
  if rows.sizes is None:
    d_x = rows.blocks.multiply("nbc,nac->nba", d_out, matrix, x.shape[1], precision)
  else:
    transposed = jnp.swapaxes(matrix.dense(x.dtype), 1, 2)
    d_x = jax.lax.ragged_dot(d_out, transposed, rows.sizes, precision=precision)
  kernel = matrix.kernel
  if matrix.scale is not None:
    return d_x, None, None
  d_kernel = rows.blocks.outer(x, d_out, len(kernel), precision)
  return d_x, Matrix(d_kernel.astype(kernel.dtype)), None


multiply.defvjp(_forward, _backward)


def plan_rows(ids: jax.Array, experts: int, platform: str, shards: int = 1) -> Rows:
  """Returns how choices are computed by the experts of this device.

  Args:
    ids: i32[t, k], the chosen experts; those from 0 to `experts` - 1 are here.
    experts: the number of experts of this device.
    platform: "cpu", "gpu" or "tpu".
    shards: the number of devices that share the experts.
  """
  count = ids.size
  flat = ids.reshape(-1)
  is_here = (flat >= 0) & (flat < experts)
  if count <= experts:
    number = jnp.arange(_whole_parts(count))
    chosen = jnp.where(is_here, flat, 0)
    is_row = jnp.pad(is_here, (0, len(number) - count))
    blocks = Blocks(jnp.pad(chosen, (0, len(number) - count)), jnp.asarray(count))
    return Rows(
      jnp.where(is_row, number, -1)[None], jnp.where(is_here, number[:count], -1)[None], blocks
    )
  order = jnp.argsort(jnp.where(is_here, flat, experts))
  sizes = jnp.zeros(experts, jnp.int32).at[flat].add(is_here.astype(jnp.int32), mode="drop")
  row = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count))
  # The rows of each expert are padded to whole blocks.
  block = 1 << max(count // (BLOCKS_PER_EXPERT * experts * shards), 1).bit_length() - 1
  needed = -(-sizes // block)
  ends = jnp.cumsum(needed)
  number = jnp.arange(_whole_parts((count + experts * (block - 1)) // block))
  of_block = jnp.searchsorted(ends, number, side="right", method="compare_all")
  of_block = jnp.minimum(of_block, experts - 1).astype(jnp.int32)
  shift = (ends - needed) * block - (jnp.cumsum(sizes) - sizes)
  if platform == "tpu":
    place = number[:, None] * block + jnp.arange(block) - shift[of_block][:, None]
    is_row = place < jnp.cumsum(sizes)[of_block][:, None]
    blocks = Blocks(of_block, ends[-1], jnp.where(is_row, place, -1))
    to_rows = jnp.where(jnp.arange(count) < sizes.sum(), order, -1)
    return Rows(to_rows[None], jnp.where(is_here, row, -1)[None], blocks, sizes)
  row += shift[jnp.clip(flat, 0, experts - 1)]
  beyond = len(number) * block
  to_rows = jnp.full(beyond, -1, jnp.int32)
  to_rows = to_rows.at[jnp.where(is_here, row, beyond)].set(jnp.arange(count), mode="drop")
  from_rows = jnp.where(is_here, row, -1)
  return Rows(to_rows[None], from_rows[None], Blocks(of_block, ends[-1]))


def _parts(blocks: int) -> int:
  """Returns in how many parts so many blocks are multiplied."""
  return -(-blocks // BLOCKS_AT_A_TIME)


def _whole_parts(blocks: int) -> int:
  """Returns the next number of blocks that divides into its parts."""
  return _parts(blocks) * -(-blocks // _parts(blocks))


def experts_output(
  x: jax.Array,
  weights: jax.Array,
  rows: Rows,
  matrices: tuple[Matrix, Matrix, Matrix],
  activation: Activation,
  precision: str,
  lora_scale: float,
) -> jax.Array:
  """Returns the weighted sum of the outputs, [t, d], of the experts that are here.

  Args:
    x: [t, d].
    weights: f32[t, k].
    rows: from `plan_rows`.
    matrices: gate and up [experts, d, f], and down [experts, f, d].
    activation: of the gate.
    precision: of the products.
    lora_scale: the factor of the products of adapters.
  """

  def product(rows_in: jax.Array, matrix: Matrix) -> jax.Array:
    out = multiply(rows_in, Matrix(matrix.kernel, matrix.scale), rows, precision)
    if matrix.lora_a is None:
      return out
    low_rank = multiply(rows_in, Matrix(matrix.lora_a), rows, precision)
    return out + multiply(low_rank, Matrix(matrix.lora_b), rows, precision) * lora_scale

  gate, up, down = matrices
  rows_in = rows.gather(x)
  hidden = gated(activation, product(rows_in, gate), product(rows_in, up))
  outputs = rows.collect(product(hidden, down), len(x))
  return (outputs.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)
