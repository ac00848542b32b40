"""Digests: of arrays, computed where they lie and the same on every mesh; of files."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

WHOLE_FILE = (
  64 << 20
)  # bytes; of larger files, which hold nothing but arrays, the size alone is noted


def digest_leaves(tree: Any) -> dict[str, str]:
  """One digest for each leaf, by its path: type, shape and 64 bits over every element and its place.

  The sums are of integers, so that neither the mesh nor the order of a reduction shows in them, and nothing but the sums leaves the
  devices. One element that differs always changes both; of wider damage one in 2**64 would pass.
  """
  sums = jax.device_get(jax.tree.map(_sum, tree))
  return {
    path: f"{kind}:{found[0]:08x}{found[1]:08x}"
    for (path, kind), found in zip(leaf_kinds(tree).items(), jax.tree.leaves(sums), strict=True)
  }


def leaf_kinds(tree: Any) -> dict[str, str]:
  """Type and shape of each leaf by its path, as `digest_leaves` puts them before the colon; arrays may be abstract."""
  return {
    jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def digest_tree(tree: Any) -> str:
  """The digests of all leaves as one."""
  return hashlib.sha256(repr(sorted(digest_leaves(tree).items())).encode()).hexdigest()


def digest_file(file: epath.Path) -> str:
  """The sha256 of a file, or the size of one over `WHOLE_FILE`."""
  size = file.stat().length
  return hashlib.sha256(file.read_bytes()).hexdigest() if size <= WHOLE_FILE else f"{size} bytes"


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
  """u32[2]: over all elements, the sum of a bijection of the element's bits that differs from place to place."""
  bits = (
    x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  )
  bits = bits.astype(jnp.uint32)
  place = jnp.zeros(x.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(x.ndim)):
    place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= x.shape[axis]
  return jnp.stack(
    [
      _mix(bits ^ _mix(place + jnp.uint32(salt))).sum(dtype=jnp.uint32)
      for salt in (0x9E3779B9, 0x85EBCA77)
    ]
  )


def _mix(x: jax.Array) -> jax.Array:
  """The finaliser of MurmurHash3: a bijection of 32 bits in which each bit of the input reaches each of the output."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
