"""The device mesh: its construction, logical axes and shardings."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from gtpo_jax.cli.planning.topology import LIBTPU_ENVIRONMENT
from gtpo_jax.runtime.distributed import fetch
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import (
  MESH_AXES,
  axis_size,
  batch_shards,
  constrain,
  make_mesh,
  named_sharding,
  partition_spec,
  sampling_mesh,
  shard_batch,
  single_device_mesh,
)
from gtpo_jax.runtime.startup import prepare_devices, use_compile_cache

pytestmark = pytest.mark.devices


def mesh_of(data, fsdp, context, tensor, devices=None):
  return make_mesh(data=data, fsdp=fsdp, context=context, tensor=tensor, devices=devices)


def test_there_are_eight_devices():
  assert jax.device_count() == 8


@pytest.mark.parametrize(
  ("sizes", "shape"),
  [
    ((-1, 1, 1, 1), (8, 1, 1, 1)),
    ((-1, 2, 1, 1), (4, 2, 1, 1)),
    ((1, -1, 1, 2), (1, 4, 1, 2)),
    ((2, 2, 1, -1), (2, 2, 1, 2)),
    ((-1, 8, 1, 1), (1, 8, 1, 1)),
    ((8, 1, 1, 1), (8, 1, 1, 1)),
    ((1, 4, 1, 2), (1, 4, 1, 2)),
    ((1, -1, 4, 1), (1, 2, 4, 1)),
    ((2, 1, -1, 2), (2, 1, 2, 2)),
  ],
)
def test_a_mesh_uses_every_device(sizes, shape):
  mesh = mesh_of(*sizes)
  names = ("data", "fsdp", "context", "tensor")
  assert dict(mesh.shape) == dict(zip(names, shape, strict=True)) | {"expert": 1}
  assert set(mesh.devices.ravel()) == set(jax.devices())


def test_a_mesh_of_some_devices():
  mesh = mesh_of(-1, 2, 1, 1, jax.devices()[:4])
  assert dict(mesh.shape) == {"data": 2, "expert": 1, "fsdp": 2, "context": 1, "tensor": 1}
  assert mesh.devices.ravel().tolist() == jax.devices()[:4]
  assert single_device_mesh().size == 1


@pytest.mark.parametrize(
  ("sizes", "parts"),
  [
    ((3, 1, 1, 1), ["data 3 x expert 1 x fsdp 1 x context 1 x tensor 1", "8 device(s)"]),
    ((-1, 3, 1, 1), ["fsdp 3", "8 device(s)"]),
    ((4, 4, 1, 1), ["data 4 x expert 1 x fsdp 4", "8 device(s)"]),
    ((1, 1, 1, 1), ["8 device(s)", "-1"]),
    ((-1, 16, 1, 1), ["fsdp 16", "8 device(s)"]),
    ((-1, -1, 1, 1), ["only one mesh axis may be -1", "mesh.data", "mesh.fsdp"]),
    ((-1, -1, 1, -1), ["only one mesh axis may be -1"]),
    ((0, 1, 1, 8), ["mesh.data must be at least 1", "got 0"]),
    ((1, -2, 1, 8), ["mesh.fsdp must be at least 1", "got -2"]),
    ((-1, 1, -1, 1), ["only one mesh axis may be -1", "mesh.data and mesh.context"]),
    ((1, 1, 0, 1), ["mesh.context must be at least 1", "got 0"]),
  ],
)
def test_an_impossible_mesh_is_an_error(sizes, parts):
  with pytest.raises(UserError) as error:
    mesh_of(*sizes)
  assert "\n" not in str(error.value)
  for part in parts:
    assert part in str(error.value)


@pytest.mark.parametrize(
  ("sizes", "fitting"),
  [
    ((3, 1, 1, 1), (8, 1, 1, 1)),
    ((1, 16, 1, 4), (1, 2, 1, 4)),
    ((2, 3, 1, 3), (8, 1, 1, 1)),
    ((1, 4, 2, 4), (1, 1, 2, 4)),
  ],
)
def test_the_error_proposes_a_mesh_that_fits(sizes, fitting):
  data, *others = fitting
  proposal = dict(zip(MESH_AXES, (data, 1, *others), strict=True))
  with pytest.raises(UserError) as error:
    mesh_of(*sizes)
  assert str(error.value).endswith(
    "or use " + " ".join(f"--config.mesh.{name}={size}" for name, size in proposal.items())
  )
  assert dict(make_mesh(**proposal).shape) == proposal


def test_logical_axes_by_hand():
  mesh = mesh_of(2, 2, 1, 2)
  assert partition_spec(("batch", None, "heads")) == PartitionSpec(
    ("data", "expert", "fsdp"), None, "tensor"
  )
  assert partition_spec(("vocab", "vocab_embed")) == PartitionSpec(
    ("context", "tensor"), ("expert", "fsdp")
  )
  assert partition_spec(("embed", "position", "sequence")) == PartitionSpec(
    ("expert", "fsdp", "context"), "context", ("context", "tensor")
  )
  assert partition_spec(("expert", "expert_embed", "mlp")) == PartitionSpec(
    "expert", ("fsdp", "context"), "tensor"
  )
  assert [axis_size(mesh, name) for name in ("batch", "embed", "mlp", "layer", None)] == [
    4,
    2,
    2,
    1,
    1,
  ]
  wide = mesh_of(1, 2, 2, 2)
  names = ("batch", "position", "sequence", "vocab", "vocab_embed", "embed", "heads")
  assert [axis_size(wide, name) for name in names] == [2, 2, 4, 4, 2, 4, 2]
  assert (
    batch_shards(mesh) == 4
    and batch_shards(make_mesh()) == 8
    and batch_shards(single_device_mesh()) == 1
  )


@pytest.mark.parametrize(
  ("sizes", "heads", "fsdp", "tensor"),
  [
    ((1, 2, 4, 1), 4, 2, 4),
    ((1, 2, 4, 1), 2, 8, 1),
    ((1, 2, 2, 2), 2, 4, 2),
    ((1, 1, 2, 4), 2, 2, 4),
  ],
)
def test_sampling_splits_heads_or_rows_instead_of_positions(sizes, heads, fsdp, tensor):
  mesh = mesh_of(*sizes)
  sampling = sampling_mesh(mesh, heads, 64)
  sizes = (1, 1, fsdp, 1, tensor)
  assert dict(sampling.shape) == dict(zip(MESH_AXES, sizes, strict=True))
  assert sampling.devices.ravel().tolist() == mesh.devices.ravel().tolist()
  assert sampling_mesh(mesh_of(2, 2, 1, 2), heads, 64) == mesh_of(2, 2, 1, 2)


def test_an_unknown_logical_axis_is_an_error():
  with pytest.raises(KeyError):
    partition_spec(("rows",))


def test_a_batch_is_split_over_data_and_fsdp_and_can_be_fetched():
  mesh = mesh_of(2, 2, 1, 2)
  tree = {"tokens": np.arange(24).reshape(8, 3), "reward": np.linspace(0, 1, 8, dtype=np.float32)}
  placed = shard_batch(tree, mesh)
  assert {shard.data.shape for shard in placed["tokens"].addressable_shards} == {(2, 3)}
  assert placed["reward"].sharding.is_equivalent_to(named_sharding(mesh, "batch"), 1)
  back = fetch(placed)
  for name in tree:
    assert isinstance(back[name], np.ndarray)
    np.testing.assert_array_equal(back[name], tree[name])


def test_a_batch_that_does_not_divide_evenly_is_an_error():
  with pytest.raises(ValueError, match="divi"):
    shard_batch(np.zeros((6, 2)), mesh_of(2, 2, 1, 2))


def test_constrain_changes_the_layout_but_not_the_values():
  mesh = mesh_of(1, 4, 1, 2)
  x = jnp.arange(32.0).reshape(8, 4)
  y = jax.jit(lambda x: constrain(x, mesh, "embed", "heads"))(x)
  np.testing.assert_array_equal(y, x)
  assert {shard.data.shape for shard in y.addressable_shards} == {(2, 2)}


def test_several_cpu_devices_are_refused_while_programs_may_be_read_from_the_cache(tmp_path):
  """Programs of several CPU devices that are read from the compile cache can deadlock."""
  folder = jax.config.jax_compilation_cache_dir
  try:
    use_compile_cache(True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    single_device_mesh()
    with pytest.raises(RuntimeError, match=r"can deadlock; call .*prepare_devices\(\) first"):
      mesh_of(2, 2, 1, 2)
    jax.config.update("jax_compilation_cache_dir", None)
    mesh_of(2, 2, 1, 2)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    prepare_devices()
    mesh_of(2, 2, 1, 2)
  finally:
    jax.config.update("jax_compilation_cache_dir", folder)
    use_compile_cache(False)


def torus_hops(ring, size):
  """Returns how many links apart a ring's neighbours are, on a torus with `size` per axis."""
  return [
    sum(min((x - y) % size, (y - x) % size) for x, y in zip(a.coords, b.coords, strict=True))
    for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)
  ]


def tpu_devices(name, slices=1):
  pytest.importorskip("libtpu")
  for variable, value in LIBTPU_ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  options = {"num_slices": slices} if slices > 1 else {}
  return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def test_the_mesh_follows_the_torus():
  """Ordered by index instead, neighbours in an fsdp ring are up to 5 links apart."""
  devices = tpu_devices("v5p:4x4x4")
  grid = mesh_of(1, 16, 1, 4, devices).devices[0, 0, :, 0, :]  # [fsdp, tensor]
  assert set(grid.flat) == set(devices)
  assert max(max(torus_hops(list(grid[:, k]), 4)) for k in range(4)) == 2
  assert max(max(torus_hops(list(grid[j]), 4)) for j in range(16)) == 1
  plain = np.asarray(devices).reshape(16, 4)
  assert max(torus_hops(list(plain[:, 0]), 4)) == 5


@pytest.mark.parametrize(
  ("sizes", "outer"),
  [
    ((2, 16, 1, 4), (2, 1, 1, 1)),
    ((-1, 8, 1, 4), (2, 1, 1, 1)),
    ((1, 32, 1, 4), (1, 2, 1, 1)),  # data does not divide, so fsdp spans the slices
    ((1, 1, 1, 128), (1, 1, 1, 2)),
  ],
)
def test_the_first_axes_span_the_slices(sizes, outer):
  grid = mesh_of(*sizes, tpu_devices("v5p:4x4x4", slices=2)).devices
  islands = np.vectorize(lambda device: device.slice_index)(grid)
  outer = (outer[0], 1, *outer[1:])
  inner = [size // part for size, part in zip(grid.shape, outer, strict=True)]
  expected = np.kron(np.arange(2).reshape(outer), np.ones(inner, int))
  np.testing.assert_array_equal(islands, expected)


def test_slices_of_different_sizes_keep_their_order():
  devices = tpu_devices("v5e:2x2", slices=2)[:6]
  mesh = mesh_of(1, 6, 1, 1, devices)
  assert mesh.devices.ravel().tolist() == list(devices)


def test_cpu_devices_keep_their_order():
  assert mesh_of(2, 2, 1, 2).devices.ravel().tolist() == jax.devices()
