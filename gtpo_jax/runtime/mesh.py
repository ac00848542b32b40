"""The device mesh, and how logical array axes are split over it.

Every parameter and activation names its axes ("embed", "heads", "batch"); `RULES` is the only table
that maps those names to mesh axes. A single device is the 1 x 1 x 1 x 1 x 1 mesh and runs the same
code. This file defines, in this order: mesh construction, logical axes, shardings, collectives.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.startup import reads_compile_cache

# Mesh construction.

MESH_AXES = ("data", "expert", "fsdp", "context", "tensor")


def make_mesh(
  *,
  data: int = -1,
  expert: int = 1,
  fsdp: int = 1,
  context: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Builds the (data, expert, fsdp, context, tensor) mesh. One size may be -1, for all others.

  Args:
    data: replicas of the parameters; batches are split over them.
    expert: shards of the experts, in the layers that have them; elsewhere they are like fsdp.
    fsdp: shards of the parameters, gathered when used; batches are split over them too.
    context: shards of positions, between and within layers; parameters and vocabulary are split
      over them too.
    tensor: shards of heads, MLP and vocabulary, and of positions between layers.
    devices: the devices to use; default: all devices of all processes.

  Raises:
    UserError: the product of the sizes is not the number of devices.
    RuntimeError: there are several CPU devices, but `prepare_devices` was not called.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = dict(zip(MESH_AXES, (data, expert, fsdp, context, tensor), strict=True))
  for name, size in sizes.items():
    if size < 1 and size != -1:
      raise UserError(
        f"mesh.{name} must be at least 1, or -1 for all remaining devices; got {size}"
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
    # From the last axis to the second, each keeps the largest factor of its size that divides the
    # number of unused devices; data gets the rest.
    fitting = dict.fromkeys(MESH_AXES, len(devices))
    for name in reversed(MESH_AXES[1:]):
      fitting[name] = math.gcd(max(sizes[name], 1), fitting[MESH_AXES[0]])
      fitting[MESH_AXES[0]] //= fitting[name]
    raise UserError(
      f"a mesh of {shape} does not fit {len(devices)} device(s): the product must be "
      f"{len(devices)}; set one axis to -1 to use all devices, or use "
      f"{' '.join(f'--config.mesh.{name}={size}' for name, size in fitting.items())}"
    )
  if len(devices) > 1 and devices[0].platform == "cpu" and reads_compile_cache():
    raise RuntimeError(
      "programs of several CPU devices that are read from JAX's compile cache can deadlock; call "
      "gtpo_jax.runtime.startup.prepare_devices() first"
    )
  return _mesh_of(_arrange(devices, tuple(sizes.values())))


def _mesh_of(devices: np.ndarray) -> Mesh:
  """Returns the mesh of devices [data, expert, fsdp, context, tensor]."""
  return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _arrange(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
  """Returns the devices as an array of `shape` in which neighbours have fast connections.

  Within a TPU slice, the last axes of `shape` get the rings of the torus. If there are several TPU
  slices or GPU nodes, the first axes are divided over them, because their network is slower.
  """
  grid = np.asarray(devices).reshape(shape)
  if devices[0].platform == "cpu":
    return grid
  islands = collections.Counter(island_of(device) for device in devices)
  if len(set(islands.values())) > 1:  # of different sizes
    return grid
  outer = []  # how many islands each axis spans; the first axes span as many as they can
  for size in shape:
    outer.append(math.gcd(size, len(islands) // math.prod(outer)))
  inner = tuple(size // part for size, part in zip(shape, outer, strict=True))
  blocks = np.empty(outer, object)
  for index, island in zip(np.ndindex(*outer), sorted(islands), strict=True):
    members = [device for device in devices if island_of(device) == island]
    blocks[index] = _arrange_island(members, inner)
  return np.block(blocks.tolist())


def _arrange_island(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
  """Returns the devices of one TPU slice or GPU node as an array of `shape`."""
  for split in (False, True):  # splitting an axis of the torus makes rings that share links
    try:
      return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    except (NotImplementedError, ValueError, AssertionError):
      continue  # the shape does not follow the torus
  return np.asarray(devices).reshape(shape)


def island_of(device: jax.Device) -> int:
  """Returns the index of the device's island.

  An island is a group of devices with a fast network: a TPU slice, a GPU node or an NVLink domain.
  """
  own_process = device.process_index if device.platform == "gpu" else 0
  return getattr(device, "slice_index", own_process)


def single_device_mesh() -> Mesh:
  """Returns the mesh of the first device."""
  return make_mesh(devices=jax.devices()[:1])


def sampling_mesh(mesh: Mesh, *sizes: int) -> Mesh:
  """Returns a mesh for sampling: the same devices in the same order, with context size 1.

  Decoding has no positions to split. If every one of `sizes` (such as the number of heads) is
  divisible by context x tensor, the context axis is merged into the tensor axis, so that each
  device reads fewer weights for a token; else it is merged into fsdp. It is never split between
  the two: XLA would then hold complete matrices on every device while it moves the weights.
  """
  data, expert, fsdp, context, tensor = mesh.devices.shape
  if context == 1:
    return mesh
  if all(size % (context * tensor) == 0 for size in sizes):
    return _mesh_of(mesh.devices.reshape(data, expert, fsdp, 1, tensor * context))
  return _mesh_of(mesh.devices.reshape(data, expert, fsdp * context, 1, tensor))


# Logical axes.

RULES: dict[str | None, str | tuple[str, ...] | None] = {
  "batch": ("data", "expert", "fsdp"),  # prompts (axis n) or plain rows (axis b)
  "position": "context",  # of a stream, within layers
  "sequence": ("context", "tensor"),  # of a stream, between layers and in the head
  "vocab": ("context", "tensor"),
  "vocab_embed": ("expert", "fsdp"),  # features in the embedding and head tables
  "embed": ("expert", "fsdp", "context"),
  "expert": "expert",
  "expert_embed": ("fsdp", "context"),  # features of the residual stream in experts' matrices
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "layer": None,
  "head_dim": None,
  "norm": None,
  "tap": None,  # of a convolution
  "rank": None,
  "choice": None,  # the outputs of a router
  "group": None,  # of inputs that share a scale
  None: None,
}


def mesh_axes(logical: str | None) -> tuple[str, ...]:
  """Returns the mesh axes that the axis `logical` is split over, outermost first."""
  names = RULES[logical]
  return (names,) if isinstance(names, str) else names or ()


def axis_size(mesh: Mesh, logical: str | None) -> int:
  """Returns the number of shards of the axis `logical` on `mesh`."""
  return int(np.prod([mesh.shape[name] for name in mesh_axes(logical)], dtype=int))


def batch_shards(mesh: Mesh) -> int:
  """Returns the number of shards of a batch: the product of the data and fsdp axes."""
  return axis_size(mesh, "batch")


def divisible_axis(mesh: Mesh, size: int, *names: str) -> str | None:
  """Returns the first of the logical axes `names` with a number of shards that divides `size`.

  None if there is none: a dimension of that size is then not split.
  """
  return next((name for name in names if size % axis_size(mesh, name) == 0), None)


def indivisible_error(name: str, size: int, mesh: Mesh) -> UserError:
  """Returns the error for a model axis `name` with a size that its shards do not divide."""
  return UserError(
    f"the model's {name} axis of {size} does not divide over {axis_size(mesh, name)} shards of "
    f"mesh {dict(mesh.shape)}; choose a mesh axis that divides {size}"
  )


# Shardings.


def partition_spec(axes: Sequence[str | EllipsisType | None]) -> PartitionSpec:
  """Maps logical axis names, one per dimension, to a PartitionSpec.

  None leaves a dimension unsplit; `...` leaves the choice to the compiler.
  """
  return PartitionSpec(
    *(PartitionSpec.UNCONSTRAINED if axis is ... else RULES[axis] for axis in axes)
  )


def named_sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
  """Returns the sharding of an array with these logical axes; dimensions not named are unsplit."""
  return NamedSharding(mesh, partition_spec(axes))


def constrain(x: jax.Array, mesh: Mesh, *axes: str | EllipsisType | None) -> jax.Array:
  """Constrains the sharding of `x` to its logical axes. The value does not change."""
  return jax.lax.with_sharding_constraint(x, named_sharding(mesh, *axes))


def shard_batch(tree: Any, mesh: Mesh) -> Any:
  """Places host arrays [n, ...] on the mesh, split over their first axis.

  Every process passes the same arrays.
  """
  sharding = named_sharding(mesh, "batch")
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(
      np.shape(x), sharding, lambda index: np.asarray(x)[index]
    ),
    tree,
  )


# Collectives, for use within `shard_map`.


def all_gather_axis(x: jax.Array, logical: str, axis: int) -> jax.Array:
  """Concatenates `x` along `axis` from all shards of the axis `logical`.

  Returns `x` itself, not a copy, if there is only one shard.
  """
  names = mesh_axes(logical)
  if jax.lax.axis_size(names) == 1:
    return x
  return jax.lax.all_gather(x, names, axis=axis, tiled=True)


def sum_shards(x: Any, names: str | tuple[str, ...]) -> Any:
  """Sums the arrays of a pytree over the shards of mesh axes.

  Returns `x` itself if there is only one shard. XLA would copy it, and would keep several such
  arrays in memory to sum them together.
  """
  return x if jax.lax.axis_size(names) == 1 else jax.lax.psum(x, names)


def reduce_scatter_axis(x: jax.Array, logical: str, axis: int) -> jax.Array:
  """Sums `x` over the shards of the axis `logical`; each shard keeps its own part along `axis`."""
  names = mesh_axes(logical)
  if jax.lax.axis_size(names) == 1:
    return x
  return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)


def shard_index(logical: str) -> jax.Array:
  """Returns the index of this shard on the axis `logical`, i32[]."""
  return jax.lax.axis_index(mesh_axes(logical))


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes of `tree` on one device; arrays in host memory do not count."""
  on_device = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
  bits = lambda x: 4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * bits(x) // 8 for x in on_device)
