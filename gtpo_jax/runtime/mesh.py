"""The device mesh, and how logical array axes lie on it.

Every parameter and activation names its axes with words ("embed", "heads", "batch"); `RULES` is the one place that says
which mesh axes each word is split over. One device is the 1 x 1 x 1 x 1 mesh and runs the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.startup import use_compile_cache

MESH_AXES = ("data", "fsdp", "context", "tensor")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
  "batch": ("data", "fsdp"),  # prompts (axis n) or plain rows (axis b)
  "position": "context",  # of a stream, within layers
  "sequence": ("context", "tensor"),  # of a stream, between layers and in the head
  "vocab": ("context", "tensor"),
  "vocab_embed": "fsdp",  # a word's features in the tables of embedding and head
  "embed": ("fsdp", "context"),
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "layer": None,
  "head_dim": None,
  "norm": None,
  "rank": None,
  None: None,
}


def make_mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
  context: int = 1,
) -> Mesh:
  """Builds the (data, fsdp, context, tensor) mesh; one size may be -1 and takes the devices that are left.

  From the first mesh of several CPU devices on, the process leaves JAX's compile cache alone.

  Args:
    data: replicas of the parameters; batches are split over them.
    fsdp: shards of the parameters, gathered when used; batches are split over them too.
    tensor: shards of heads, MLP and vocabulary, and of the positions between layers.
    devices: all local and remote devices unless given.
    context: shards of the positions, between layers and within; parameters and vocabulary are split over them too.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = dict(zip(MESH_AXES, (data, fsdp, context, tensor), strict=True))
  for name, size in sizes.items():
    if size < 1 and size != -1:
      raise UserError(
        f"mesh.{name} must be at least 1, or -1 for the devices that are left; got {size}"
      )
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise UserError(
      f"only one mesh axis may be -1, got {' and '.join(f'mesh.{name}' for name in free)}"
    )
  fixed = int(np.prod([size for size in sizes.values() if size != -1]))
  if free and len(devices) % fixed == 0:
    sizes[free[0]] = len(devices) // fixed
  if int(np.prod(list(sizes.values()))) != len(devices):
    shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
    raise UserError(
      f"a mesh of {shape} does not fit {len(devices)} device(s): the product must be {len(devices)}; "
      f"set one axis to -1 to fill it in"
    )
  if len(devices) > 1 and devices[0].platform == "cpu":
    # A program read back from the cache may stand still here, its devices waiting for one another in different collectives; freshly
    # compiled it does not (jaxlib 0.10.2). It seems to have lost the order in which XLA has devices take collectives up.
    use_compile_cache(False)
  return Mesh(
    np.asarray(devices).reshape(tuple(sizes.values())),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
  )


def single_device_mesh() -> Mesh:
  """The mesh of one device, the first."""
  return make_mesh(1, 1, 1, jax.devices()[:1])


def sampling_mesh(mesh: Mesh, *sizes: int) -> Mesh:
  """The same devices in the same order for sampling, where there are no positions to split.

  The context axis joins the tensor axis where all `sizes` divide over both, which cuts the weights that each token reads; else it joins the
  batch's axes. Not some of it each: from there to here XLA then holds whole matrices on every device.
  """
  data, fsdp, context, tensor = mesh.devices.shape
  more = 1 if any(size % (context * tensor) for size in sizes) else context
  return (
    mesh
    if context == 1
    else make_mesh(data, fsdp * context // more, tensor * more, mesh.devices.flat)
  )


def mesh_axes(logical: str | None) -> tuple[str, ...]:
  """The mesh axes that the axis called `logical` is split over, the outermost first."""
  names = RULES[logical]
  return (names,) if isinstance(names, str) else names or ()


def axis_size(mesh: Mesh, logical: str | None) -> int:
  """How many shards the axis called `logical` is cut into on `mesh`."""
  return int(np.prod([mesh.shape[name] for name in mesh_axes(logical)], dtype=int))


def where_even(mesh: Mesh, size: int, *names: str) -> str | None:
  """The first of the logical axes `names` over whose shards `size` divides, or None: a dimension of that size is then not split."""
  return next((name for name in names if size % axis_size(mesh, name) == 0), None)


def uneven(name: str, size: int, mesh: Mesh) -> UserError:
  """What is wrong with the model's axis called `name` on `mesh`."""
  return UserError(
    f"the model's {name} axis of {size} does not divide over {axis_size(mesh, name)} shards of mesh {dict(mesh.shape)}; "
    f"choose a mesh axis that divides {size}"
  )


def partition_spec(axes: Sequence[str | EllipsisType | None]) -> PartitionSpec:
  """Logical axis names, one a dimension, to the mesh axes they are split over; `...` leaves a dimension to the compiler."""
  return PartitionSpec(
    *(PartitionSpec.UNCONSTRAINED if axis is ... else RULES[axis] for axis in axes)
  )


def named_sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
  """The sharding of an array whose dimensions carry these logical names; missing ones are not split."""
  return NamedSharding(mesh, partition_spec(axes))


def constrain(x: jax.Array, mesh: Mesh, *axes: str | EllipsisType | None) -> jax.Array:
  """Asks the compiler to lay `x` out by its logical axes. The identity in value."""
  return jax.lax.with_sharding_constraint(x, named_sharding(mesh, *axes))


def gathered(x: jax.Array, logical: str, axis: int) -> jax.Array:
  """Within `shard_map`: what the shards of the axis called `logical` hold, one behind the other along `axis`; no copy of a single one."""
  names = mesh_axes(logical)
  return x if jax.lax.axis_size(names) == 1 else jax.lax.all_gather(x, names, axis=axis, tiled=True)


def scattered(x: jax.Array, logical: str, axis: int) -> jax.Array:
  """Within `shard_map`: the sum over the shards of the axis called `logical`, of which each keeps its part along `axis`."""
  names = mesh_axes(logical)
  return (
    x
    if jax.lax.axis_size(names) == 1
    else jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
  )


def shard_number(logical: str) -> jax.Array:
  """Within `shard_map`: which of the shards of the axis called `logical` this is, i32[]."""
  return jax.lax.axis_index(mesh_axes(logical))


def batch_shards(mesh: Mesh) -> int:
  """How many parts a batch is cut into: the product of the data and fsdp axes."""
  return axis_size(mesh, "batch")


def shard_batch(tree: Any, mesh: Mesh) -> Any:
  """Places host arrays [n, ...], the same on every process, on the mesh, split over their first axis."""
  sharding = named_sharding(mesh, "batch")
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(
      np.shape(x), sharding, lambda index: np.asarray(x)[index]
    ),
    tree,
  )
