"""How many tokens' logits a device has in memory at once, and the chunks of positions they are in.

Dimension letters: b rows, t positions.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.runtime.chips import chip_of, memory_of
from gtpo_jax.runtime.mesh import axis_size

LOGIT_BYTES = 6  # a logit in float32, and its gradient in 16 bits
CPU_CHUNK = 4096  # tokens
CPU_LOGITS = 2**28  # bytes; larger chunks are no faster
SHORTEST_CHUNK = 256
# A chunk reads a device's part of the table in 16 bits, and reads and writes its gradient in
# float32: 10 bytes for 6 FLOP a token. With 10 / 6 * FLOP/s / bandwidth tokens, the two take equal
# time. This multiple of it makes the matrix products the larger part.
COMPUTE_BOUND = 4
MEMORY_FRACTION = 16  # the logits of a chunk take at most this part of a device's memory
UNKNOWN_MEMORY = 16 * 2**30  # bytes, of a device that reports none


def default_chunk(mesh: Mesh, vocab_size: int) -> int:
  """Returns the tokens of a chunk on one device, enough for compute-bound matrix products.

  It is a power of two. There are fewer if their logits would take more than a sixteenth of the
  device's memory, or on a CPU more than `CPU_LOGITS`.
  """
  device = mesh.devices.flat[0]
  logits = LOGIT_BYTES * vocab_size // axis_size(mesh, "vocab")  # bytes of a token
  if device.platform == "cpu":
    return max(min(CPU_CHUNK, _power_of_two_to(CPU_LOGITS / logits)), SHORTEST_CHUNK)
  chip = chip_of(device)
  enough = CPU_CHUNK
  if chip and chip.flops and chip.memory_bandwidth:
    enough = COMPUTE_BOUND * chip.flops / chip.memory_bandwidth
  memory = chip.memory if chip else memory_of(device) or UNKNOWN_MEMORY
  fitting = memory / MEMORY_FRACTION / logits
  return max(min(_power_of_two_from(enough), _power_of_two_to(fitting)), SHORTEST_CHUNK)


def chunk_count(b: int, t: int, chunk: int) -> int:
  """Returns how many chunks a device's b rows of t positions need for `chunk` tokens each.

  It is t if b > chunk.
  """
  return -(-t // max(chunk // b, 1))


def pad_positions(x: jax.Array, divisor: int) -> jax.Array:
  """Pads [b, t, ...] with zeros until t is a multiple of `divisor`."""
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % divisor)] + [(0, 0)] * (x.ndim - 2))


def split_positions(x: jax.Array, chunks: int) -> jax.Array:
  """Splits [b, t, ...] into [chunks, b, ceil(t / chunks), ...], padded with zeros."""
  x = pad_positions(x, chunks)
  return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)


def merge_positions(x: jax.Array, t: int) -> jax.Array:
  """Undoes `split_positions`, given the original t."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]


def _power_of_two_from(least: float) -> int:
  return 2 ** math.ceil(math.log2(least))


def _power_of_two_to(most: float) -> int:
  return 2 ** math.floor(math.log2(most))
