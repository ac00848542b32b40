"""The mixture of experts of a layer, in place of its MLP.

Outside this module, the mesh axis `expert` splits the batch. Here it splits the experts: each of
its shards gathers the tokens of all of them, computes what its own experts add, and the sums are
scattered back. With k experts per token this moves no more than an exchange in which each token is
sent to its experts, as long as there are at most k shards, and no shape depends on the routes.
Many tokens are computed in parts, whose backward pass computes them again.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.models.config import DTYPES, EXPERTS, ModelConfig
from gtpo_jax.models.declaration import AxisRoles, declare
from gtpo_jax.models.experts.products import experts_output, plan_rows
from gtpo_jax.models.experts.routing import Routing, route
from gtpo_jax.models.layers import MATRIX_INIT, Activation, Dense, Matrix, declare_matrix, gated
from gtpo_jax.models.number_formats import einsum
from gtpo_jax.runtime.mesh import (
  all_gather_axis,
  axis_size,
  constrain,
  divisible_axis,
  indivisible_error,
  partition_spec,
  reduce_scatter_axis,
  shard_index,
  sum_shards,
)

# The bytes of the rows of a part: k copies of each of its tokens, from all shards of the experts.
PART_BYTES = 2**29


class Gate(nn.Module):
  """A linear map [d] -> [outputs] with float32 results, which is neither quantised nor adapted."""

  config: ModelConfig
  outputs: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `x` [..., d] to f32[..., outputs]."""
    c = self.config
    shape = (c.width, self.outputs)
    stored = DTYPES[c.matrix_dtype]
    kernel = declare(self, "kernel", MATRIX_INIT, shape, ("embed", "choice"), stored, AxisRoles(1))
    return einsum("...d,de->...e", x, kernel.astype(x.dtype), c.matmul_precision)


class ExpertMatrix(nn.Module):
  """The matrices of one kind of all experts, [experts, inputs, outputs]."""

  config: ModelConfig
  shape: tuple[int, int]
  axes: tuple[str, str]

  @nn.compact
  def __call__(self) -> tuple[Matrix, Matrix]:
    """Returns the parameters and their logical axes."""
    c = self.config
    shape = (c.mixture.experts, *self.shape)
    axes = ("expert", *self.axes)
    return declare_matrix(self, c, shape, axes, AxisRoles(1, 1), EXPERTS in c.lora.targets)


class Experts(nn.Module):
  """A router, its experts, and the shared expert if there is one."""

  config: ModelConfig
  mesh: Mesh
  activation: Activation

  def setup(self):
    """Declares the parameters."""
    c = self.config
    m = c.mixture
    self.router = Gate(c, m.experts)
    inward = ((c.width, m.mlp), ("expert_embed", "mlp"))
    self.gate = ExpertMatrix(c, *inward)
    self.up = ExpertMatrix(c, *inward)
    self.down = ExpertMatrix(c, inward[0][::-1], inward[1][::-1])
    if m.shared:
      dense = lambda inputs, outputs, axes, name: Dense(
        c, self.mesh, (inputs,), (outputs,), axes, target=name
      )
      self.shared_gate = dense(c.width, m.shared, ("embed", "mlp"), "gate")
      self.shared_up = dense(c.width, m.shared, ("embed", "mlp"), "up")
      self.shared_down = dense(m.shared, c.width, ("mlp", "embed"), "down")
      self.shared_weight = Gate(c, 1)

  def __call__(
    self, h: jax.Array, recorded: jax.Array | None = None, shares: jax.Array | None = None
  ) -> tuple[jax.Array, Routing]:
    """Maps h [n, g, s, d] to the same shape; also returns the routing.

    Args:
      h: the tokens.
      recorded, shares: as in `route`.
    """
    c = self.config
    routing = route(self.router(h), c.mixture, recorded, shares, c.router_replay)
    output = self._routed(h, routing)
    if c.mixture.shared:
      hidden = gated(self.activation, self.shared_gate(h), self.shared_up(h))
      positions = divisible_axis(self.mesh, h.shape[2], "position")
      hidden = constrain(hidden, self.mesh, "batch", None, positions, "mlp")
      weight = jax.nn.sigmoid(self.shared_weight(h))
      output += (self.shared_down(hidden) * weight).astype(h.dtype)
    return output, routing

  def _routed(self, h: jax.Array, routing: Routing) -> jax.Array:
    """Returns the weighted sum of the outputs of the chosen experts."""
    mesh = self.mesh
    declared = [matrix() for matrix in (self.gate, self.up, self.down)]
    for matrix, names in declared:
      for name, size in zip(names.kernel, matrix.kernel.shape, strict=True):
        if size % axis_size(mesh, name):
          raise indivisible_error(name, size, mesh)
    matrices, axes = zip(*map(self._splittable, declared), strict=True)
    batch = divisible_axis(mesh, h.shape[0], "batch")
    tokens = partition_spec((batch, None, divisible_axis(mesh, h.shape[2], "position"), None))
    is_axes = lambda x: isinstance(x, tuple) and bool(x) and isinstance(x[0], str)
    specs = jax.tree.map(partition_spec, axes, is_leaf=is_axes)
    computed = jax.shard_map(
      lambda h, ids, weights, matrices: self._local(h, ids, weights, matrices, axes, bool(batch)),
      mesh=mesh,
      in_specs=(tokens, tokens, tokens, specs),
      out_specs=tokens,
      check_vma=False,
    )
    return computed(h, routing.ids, routing.weights, matrices)

  def _splittable(self, declared: tuple[Matrix, Matrix]) -> tuple[Matrix, Matrix]:
    """Returns matrices whose scales are split like their inputs, dequantised where they cannot."""
    matrix, axes = declared
    if matrix.scale is None:
      return declared
    name = axes.kernel[1]
    if name == "expert_embed":  # gathered in `_local`, before the scales are applied
      return declared
    if matrix.scale.shape[1] % axis_size(self.mesh, name) == 0:
      return matrix, axes._replace(scale=axes.kernel)
    dense = matrix.dense(DTYPES[self.config.compute_dtype])
    return matrix._replace(kernel=dense, scale=None), axes._replace(scale=None)

  def _local(
    self,
    h: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[Matrix, ...],
    axes: tuple[Matrix, ...],
    is_split: bool,
  ) -> jax.Array:
    """Returns the output for the tokens of one device, from the experts of all devices.

    Args:
      h, ids, weights: [n, g, s, ...] of this device.
      matrices: the shards of this device.
      axes: their logical axes.
      is_split: whether the batch is split over devices.
    """
    flat = lambda x: x.reshape(-1, x.shape[-1])
    x, ids, weights = map(flat, (h, ids, weights))
    t, d = x.shape
    shards = self.mesh.shape["expert"] if is_split else 1
    parts = -(-t * ids.shape[1] * d * x.dtype.itemsize * shards // PART_BYTES)
    matrices = tuple(self._gathered(m, a, h.dtype) for m, a in zip(matrices, axes, strict=True))
    if parts == 1:
      return self._part(x, ids, weights, matrices, is_split).reshape(h.shape)
    matrices = tuple(map(self._in_float32, matrices))
    size = -(-t // parts)

    def split(x: jax.Array, padding: int = 0) -> jax.Array:
      padded = jnp.pad(x, ((0, parts * size - t), (0, 0)), constant_values=padding)
      return padded.reshape(parts, size, -1)

    compute = jax.checkpoint(lambda part: self._part(*part, matrices, is_split), prevent_cse=False)
    out = jax.lax.map(compute, (split(x), split(ids, -1), split(weights)))
    return out.reshape(-1, d)[:t].reshape(h.shape)

  def _part(
    self,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: tuple[Matrix, ...],
    is_split: bool,
  ) -> jax.Array:
    """Returns the output [t, d] for some tokens of `_local`; ids of -1 are no experts."""
    c = self.config
    gather = lambda x: all_gather_axis(x, "expert", 0) if is_split else x
    x, ids, weights = map(gather, (x, ids, weights))
    here = len(matrices[0].kernel)
    ids = jnp.where(ids < 0, -1, ids - shard_index("expert") * here)
    rows = plan_rows(ids, here, self.mesh.devices.flat[0].platform, c.mixture.experts // here)
    scale = c.lora.scale if c.lora.rank else 0.0
    precision = c.matmul_precision
    out = experts_output(x, weights, rows, matrices, self.activation, precision, scale)
    out = reduce_scatter_axis(out, "expert", 0) if is_split else sum_shards(out, "expert")
    return sum_shards(out, "tensor")

  def _in_float32(self, matrix: Matrix) -> Matrix:
    """Returns a matrix whose trained arrays are float32, in which gradients of parts are summed."""
    exact = lambda x: None if x is None else x.astype(jnp.float32)
    if self.config.lora.rank:
      return matrix._replace(lora_a=exact(matrix.lora_a), lora_b=exact(matrix.lora_b))
    return matrix if matrix.scale is not None else matrix._replace(kernel=exact(matrix.kernel))

  def _gathered(self, matrix: Matrix, axes: Matrix, dtype: Any) -> Matrix:
    """Returns a device's matrices with all features of the residual stream, as `dtype`."""

    def gather(x: jax.Array | None, names: tuple[str, ...] | None) -> jax.Array | None:
      if x is None:
        return None
      x = x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(dtype)
      if "expert_embed" not in names:
        return x
      return all_gather_axis(x, "expert_embed", names.index("expert_embed"))

    return Matrix(*map(gather, matrix, axes))
