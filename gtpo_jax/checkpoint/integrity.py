"""The integrity record of a checkpoint: digests of its files and arrays at the time of writing.

Arrays are digested on the devices, with the same result on every mesh. A step without a record was
not written completely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gtpo_jax.runtime.errors import CorruptCheckpoint
from gtpo_jax.runtime.paths import list_files, write_atomically

# Larger files contain only array data, which the digests of the leaves cover. Only their size is
# recorded, so nothing large is read twice.
MAX_HASHED_BYTES = 64 << 20
DIGEST_DIGITS = 16  # hexadecimal; enough to notice changes, short enough for a message

SALTS = (0x9E3779B9, 0x85EBCA77)  # one per 32-bit sum; stored digests depend on them


def digest_leaves(tree: Any) -> dict[str, str]:
  """Returns a digest of each leaf by its path: dtype, shape, and 64 bits over values and positions.

  The digests are integer sums, so neither the mesh nor the order of a reduction changes them, and
  only the sums leave the devices. A change of one element always changes both sums; of larger
  changes, one in 2**64 goes unnoticed.
  """
  sums = jax.device_get(jax.tree.map(_sums, tree))
  pairs = zip(leaf_types(tree).items(), jax.tree.leaves(sums), strict=True)
  return {path: f"{kind}:{first:08x}{second:08x}" for (path, kind), (first, second) in pairs}


def leaf_types(tree: Any) -> dict[str, str]:
  """Returns dtype and shape of each leaf by its path, as `digest_leaves` writes them before ":".

  The leaves may be abstract arrays.
  """
  return {
    jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def digest_tree(tree: Any) -> str:
  """Returns one SHA-256 over the digests of all leaves, in hexadecimal."""
  return hashlib.sha256(repr(sorted(digest_leaves(tree).items())).encode()).hexdigest()


def digest_file(file: epath.Path) -> str:
  """Returns the SHA-256 of a file, or its size if it is larger than `MAX_HASHED_BYTES`."""
  size = file.stat().length
  if size > MAX_HASHED_BYTES:
    return f"{size} bytes"
  return hashlib.sha256(file.read_bytes()).hexdigest()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
  """Returns u32[2]: sums over all elements of a hash of the element's bits and its position.

  At each position the hash is a bijection of the bits, and it differs between positions.
  """
  if x.dtype == jnp.int4:
    x = x.astype(jnp.int8)
  if x.dtype != jnp.bool_:
    x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  bits = x.astype(jnp.uint32)
  position = jnp.zeros(x.shape, jnp.uint32)  # the row-major index, modulo 2**32
  stride = 1
  for axis in reversed(range(x.ndim)):
    position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= x.shape[axis]
  hashes = [mix_bits(bits ^ mix_bits(position + jnp.uint32(salt))) for salt in SALTS]
  return jnp.stack([h.sum(dtype=jnp.uint32) for h in hashes])


def mix_bits(x: jax.Array) -> jax.Array:
  """Returns a bijection of u32 numbers in which each input bit affects every output bit.

  It has the form of MurmurHash3's finalizer.
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


RECORD_FILE = "integrity_record"  # its first line is the SHA-256 of the JSON that follows

# Orbax writes these files while it commits a step, after the integrity record.
COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")


class IntegrityRecord(NamedTuple):
  """The content of a checkpoint when it was written."""

  leaves: Mapping[str, Mapping[str, str]]  # by item, the digest of each leaf by its path
  metadata: Mapping[str, Any]  # plain values saved with the checkpoint
  files: Mapping[str, str]  # the digest of each file by its path in the step's folder


def write_integrity_record(
  folder: epath.Path, leaves: Mapping[str, Mapping[str, str]], metadata: Mapping[str, Any]
) -> None:
  """Records the content of a checkpoint before it is committed.

  Args:
    folder: the folder of one step, complete except for the files of the commit.
    leaves: for each item, the digests of its leaves.
    metadata: plain values to save with the checkpoint.
  """
  not_recorded = (RECORD_FILE, *COMMIT_FILES)
  files = {
    name: digest_file(folder / name) for name in list_files(folder) if name not in not_recorded
  }
  _write(folder, IntegrityRecord(leaves, metadata, files))


def record_commit_files(folder: epath.Path) -> None:
  """Adds the files of the commit to the record, if they are not in it yet.

  They contain timestamps and notes, nothing that is restored.
  """
  record = _read(folder)
  added = {name: digest_file(folder / name) for name in COMMIT_FILES if (folder / name).exists()}
  if not added.keys() <= record.files.keys():
    _write(folder, record._replace(files={**record.files, **added}))


def check_integrity(folder: epath.Path, items: Collection[str]) -> IntegrityRecord:
  """Checks the files of some items, and files of no item, against the record.

  Args:
    folder: the folder of one step.
    items: names of items; the files of other items are not read.

  Returns:
    The record.
  """
  record = _read(folder)
  for name, digest in record.files.items():
    item, slash, _ = name.partition("/")
    if slash and item not in items:
      continue
    file = folder / name
    if not file.exists():
      raise CorruptCheckpoint(f"{name} is missing")
    if digest_file(file) != digest:
      raise CorruptCheckpoint(f"{name} differs from what was written")
  return record


def _read(folder: epath.Path) -> IntegrityRecord:
  file = folder / RECORD_FILE
  if not file.exists():
    raise CorruptCheckpoint(f"{RECORD_FILE} is missing")
  digest, _, text = file.read_bytes().partition(b"\n")
  if digest != _sha256(text):
    raise CorruptCheckpoint(f"{RECORD_FILE} differs from what was written")
  values = json.loads(text)
  return IntegrityRecord(**values)


def _write(folder: epath.Path, record: IntegrityRecord) -> None:
  text = json.dumps(record._asdict(), indent=1).encode()
  write_atomically(folder / RECORD_FILE, _sha256(text) + b"\n" + text)


def _sha256(text: bytes) -> bytes:
  return hashlib.sha256(text).hexdigest().encode()
