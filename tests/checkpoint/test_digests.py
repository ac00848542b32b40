"""Digests of arrays: equal on every mesh, different after any change of one element."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from meshes import mesh_of

from gtpo_jax.checkpoint import integrity
from gtpo_jax.checkpoint.integrity import digest_file, digest_leaves, digest_tree
from gtpo_jax.runtime.mesh import named_sharding


def slow_sum(x, salt):
  """One of the two sums of a digest, with Python integers."""

  def mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)

  bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").ravel()
  return sum(mix(int(b) ^ mix((i + salt) % 2**32)) for i, b in enumerate(bits)) % 2**32


@pytest.mark.parametrize(
  "dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint32, np.bool_]
)
def test_against_a_slow_loop(dtype):
  x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(dtype)
  name = np.dtype(dtype).name
  assert digest_leaves({"a": x}) == {
    "['a']": f"{name}[3, 4, 5]:{slow_sum(x, 0x9E3779B9):08x}{slow_sum(x, 0x85EBCA77):08x}"
  }


def test_known_values():
  assert digest_leaves([np.float32(0), np.arange(4, dtype=np.int32)]) == {
    "[0]": "float32[]:aa3e5b61b8dbb7ba",
    "[1]": digest_leaves([jnp.arange(4)])["[0]"],
  }


@pytest.mark.devices
def test_digests_do_not_depend_on_the_mesh():
  x = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
  digests = {
    digest_tree({"a": jax.device_put(x, named_sharding(mesh_of(*sizes), *axes))})
    for sizes in ((8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 2))
    for axes in (("batch", "heads"), ("embed", None), (None, "vocab"), ())
  }
  assert digests == {digest_tree({"a": x})}


def test_every_flipped_bit_changes_the_digest():
  x = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
  digests = {digest_tree([x])}
  for bit in range(x.size * 32):
    bits = x.view(np.uint32).copy().ravel()
    bits[bit // 32] ^= np.uint32(1 << bit % 32)
    digests.add(digest_tree([bits.view(np.float32).reshape(5, 3)]))
  assert len(digests) == 1 + x.size * 32


def test_order_shape_type_and_name_change_the_digest():
  x = np.arange(6, dtype=np.float32)
  trees = [
    [x],
    [x[::-1].copy()],
    [x.reshape(2, 3)],
    [x.view(np.int32)],
    {"a": x},
    [x, x],
    [np.where(x == 0, -0.0, x)],
    [np.full(6, np.nan, np.float32)],
  ]
  assert len({digest_tree(tree) for tree in trees}) == len(trees)


def test_large_files_are_identified_by_their_size(tmp_path, monkeypatch):
  from etils import epath

  file = epath.Path(tmp_path / "a")
  file.write_bytes(b"abc")
  assert digest_file(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
  monkeypatch.setattr(integrity, "MAX_HASHED_BYTES", 2)
  assert digest_file(file) == "3 bytes"
