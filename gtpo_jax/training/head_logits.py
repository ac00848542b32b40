"""A chunk's logits in one vocabulary shard, their softmax statistics, and their gradients.

`head_chunk_size` decides how many tokens' logits a device has in memory at once. The functions of
logits run within `shard_map`. Dimension letters: b rows, t positions, c positions of a chunk,
d model width, v vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.algorithms import Distillation
from gtpo_jax.models.embedding import local_ids
from gtpo_jax.models.number_formats import einsum
from gtpo_jax.runtime.chips import chip_of, memory_of
from gtpo_jax.runtime.mesh import (
  all_gather_axis,
  axis_size,
  mesh_axes,
  reduce_scatter_axis,
  shard_index,
  sum_shards,
)

VOCAB_AXES = mesh_axes("vocab")
NEVER = -1e9  # the logit of an id that is never sampled
TINY = 1e-30  # added to probabilities whose logarithm is taken


def chunk_logits(
  vocab_shard: jax.Array, hidden: jax.Array, tokens: jax.Array, temperature: float, precision: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gathers a chunk's positions and computes their logits in one vocabulary shard.

  Returns:
    The hidden states [b, c, d], the logits f32[b, c, v / shards], and the index i32[b, c] of each
    token within the vocabulary shard (`local_ids`).
  """
  hidden = gather_positions(hidden)
  logits = einsum("btd,vd->btv", hidden, vocab_shard, precision)
  return hidden, logits / temperature, local_ids(vocab_shard, gather_positions(tokens))


def softmax_statistics(
  logits: jax.Array, ids: jax.Array, squares: bool = False
) -> tuple[jax.Array, ...]:
  """Returns log-prob, entropy and log-sum-exp, f32[b, c] each, from the chunk's logits and ids.

  With `squares`, the sum of the squared probabilities is the last result.
  """
  of_shard = jax.lax.platform_dependent(
    logits,
    cuda=functools.partial(_in_one_pass, squares=squares),
    default=functools.partial(_in_two_passes, squares=squares),
  )
  max_logit = jax.lax.pmax(of_shard.largest, VOCAB_AXES)
  last_id = logits.shape[-1] - 1
  target = jnp.take_along_axis(logits, jnp.minimum(ids, last_id)[..., None], -1)[..., 0]
  of_target = jnp.where(ids <= last_id, target - max_logit, 0)
  shard_sums = (of_target, *of_shard.relative_to(max_logit)[1:])
  shifted_target, total, weighted_total, total_squares = sum_shards(shard_sums, VOCAB_AXES)
  log_total = jnp.log(total)
  statistics = (shifted_target - log_total, log_total - weighted_total / total)
  statistics += (max_logit + log_total,)
  return (*statistics, total_squares / jnp.square(total)) if squares else statistics


class _Sums(NamedTuple):
  """Sums over the logits z of a token, with m the largest of them."""

  largest: jax.Array  # m
  total: jax.Array  # the sum of exp(z - m)
  weighted: jax.Array  # the sum of exp(z - m) (z - m)
  squares: jax.Array | None = None  # the sum of exp(2 (z - m)); None if it is not needed

  def relative_to(self, largest: jax.Array) -> _Sums:
    """Returns the same sums with another number, at least as large, in place of m."""
    shift = self.largest - largest
    scale = jnp.exp(shift)
    total = self.total * scale
    weighted = (self.weighted + self.total * shift) * scale
    squares = None if self.squares is None else self.squares * jnp.square(scale)
    return _Sums(largest, total, weighted, squares)


def _in_two_passes(logits: jax.Array, squares: bool = False) -> _Sums:
  """Returns the sums over the last axis of logits; the first pass finds the largest."""
  largest = logits.max(-1)
  shifted = logits - largest[..., None]
  weights = jnp.exp(shifted)
  total_squares = jnp.square(weights).sum(-1) if squares else None
  return _Sums(largest, weights.sum(-1), (weights * shifted).sum(-1), total_squares)


def _in_one_pass(logits: jax.Array, squares: bool = False) -> _Sums:
  """Returns the sums over the last axis of logits, which GPUs then read once."""

  def join(x: _Sums, y: _Sums) -> _Sums:
    largest = jnp.maximum(x.largest, y.largest)
    x, y = x.relative_to(largest), y.relative_to(largest)
    total_squares = x.squares + y.squares if squares else None
    return _Sums(largest, x.total + y.total, x.weighted + y.weighted, total_squares)

  zero = jnp.zeros((), logits.dtype)
  # Not -inf, whose difference to itself is no number.
  none = _Sums(zero + jnp.finfo(logits.dtype).min, zero, zero, zero if squares else None)
  ones = jnp.ones_like(logits)
  single = _Sums(logits, ones, jnp.zeros_like(logits), ones if squares else None)
  return jax.lax.reduce(single, none, join, (logits.ndim - 1,))


class Comparison(NamedTuple):
  """How the distributions of policy and teacher compare at each token."""

  divergence: jax.Array  # f32[b, c], nats
  # f32[b, c], the sum of the smaller of both probabilities: 1 minus the total variation
  overlap: jax.Array


def compare_with_teacher(
  logits: jax.Array, teacher_logits: jax.Array, shared: int, distillation: Distillation
) -> tuple[Comparison, jax.Array]:
  """Returns how two distributions compare, and the divergence's gradient in the policy's logits.

  With p the policy, q the teacher and m = beta q + (1 - beta) p, the divergence is KL(p || q), KL(q
  || p), or beta KL(q || m) + (1 - beta) KL(p || m). The gradient is p (x - E_p[x]), with x = log(p
  / q), x = -q / p, or x = (1 - beta) log(p / m).

  Args:
    logits, teacher_logits: f32[b, c, v / shards], divided by the temperature.
    shared: the ids below this are compared; both distributions are over these.
    distillation: names the divergence.

  Returns:
    The comparison, and f32[b, c, v / shards].
  """
  size = logits.shape[-1]
  if shared < size * jax.lax.axis_size(VOCAB_AXES):
    valid = jnp.arange(size) + shard_index("vocab") * size < shared
    logits, teacher_logits = (jnp.where(valid, x, NEVER) for x in (logits, teacher_logits))
  (log_p, p), (log_q, q) = map(_softmax, (logits, teacher_logits))
  total = lambda x: jax.lax.psum(x.sum(-1), VOCAB_AXES)
  overlap = total(jnp.minimum(p, q))  # of all ids, also where the divergence counts some as one
  if 0 < distillation.top_k < shared:
    # Logits are compared and not log-probs, which XLA may compute twice with different rounding.
    k = distillation.top_k
    of_shard, _ = jax.lax.top_k(teacher_logits, min(k, size))
    of_all = all_gather_axis(of_shard, "vocab", of_shard.ndim - 1)
    in_tail = ~(teacher_logits >= jax.lax.top_k(of_all, k)[0][..., -1:])
    log_q = _with_one_tail(log_p, log_q, in_tail)
    q = jnp.exp(log_q)
  if distillation.divergence == "forward_kl":
    return Comparison(total(q * (log_q - log_p)), overlap), p - q
  if distillation.divergence == "reverse_kl":
    x = log_p - log_q
    divergence = total(p * x)
    return Comparison(divergence, overlap), p * (x - divergence[..., None])
  beta = distillation.beta
  log_m = jnp.log(beta * q + (1 - beta) * p + TINY)
  of_policy = total(p * (log_p - log_m))
  divergence = beta * total(q * (log_q - log_m)) + (1 - beta) * of_policy
  gradient = (1 - beta) * p * (log_p - log_m - of_policy[..., None])
  return Comparison(divergence, overlap), gradient


def _with_one_tail(log_p: jax.Array, log_q: jax.Array, in_tail: jax.Array) -> jax.Array:
  """Returns the teacher's log-probs with the policy's proportions among the ids `in_tail`.

  The divergence from this teacher, and its gradient with the teacher held constant, are those of
  distributions in which these ids are one. All arrays are [b, c, v / shards].
  """
  sums = (jnp.where(in_tail, jnp.exp(x), 0.0).sum(-1) for x in (log_p, log_q))
  tail_p, tail_q = (x + TINY for x in jax.lax.psum(tuple(sums), VOCAB_AXES))
  return jnp.where(in_tail, log_p + jnp.log(tail_q / tail_p)[..., None], log_q)


def _softmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs and probabilities, f32[b, c, v / shards], with one exponential per id."""
  shifted = logits - jax.lax.pmax(logits.max(-1), VOCAB_AXES)[..., None]
  weights = jnp.exp(shifted)
  total = jax.lax.psum(weights.sum(-1), VOCAB_AXES)[..., None]
  return shifted - jnp.log(total), weights / total


def logits_gradient(
  logits: jax.Array,
  ids: jax.Array,
  lse: jax.Array,
  temperature: float,
  d_log_probs: jax.Array,
  entropy: jax.Array | None = None,
  d_entropy: jax.Array | None = None,
) -> jax.Array:
  """Returns the gradient of the loss with respect to the model's logits, f32[b, c, v / shards].

  `logits` are the model's logits divided by the temperature. `d_log_probs` and `d_entropy`
  f32[b, c] are the derivatives of the loss with respect to each token's log-prob and entropy.
  """
  is_target = jnp.arange(logits.shape[-1]) == ids[..., None]
  log_probs = logits - lse[..., None]
  probs = jnp.exp(log_probs)
  d_target = d_log_probs / temperature
  d_logits = (is_target - probs) * d_target[..., None]
  if d_entropy is None:
    return d_logits
  slope = d_entropy / temperature
  return d_logits - probs * (log_probs + entropy[..., None]) * slope[..., None]


def head_gradient(
  vocab_shard: jax.Array, hidden: jax.Array, d_logits: jax.Array, precision: str
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of the vocabulary shard and the local hidden states.

  Args:
    vocab_shard: [v / shards, d].
    hidden: [b, c, d].
    d_logits: f32[b, c, v / shards], the gradient with respect to the logits.
    precision: the precision of the matrix products.

  Returns:
    f32[d, v / shards], the transposed gradient of the shard, and [b, c / shards, d].
  """
  d_logits = d_logits.astype(hidden.dtype)
  d_table = einsum("btd,btv->dv", hidden, d_logits, precision)
  d_hidden = einsum("btv,vd->btd", d_logits, vocab_shard, precision, hidden.dtype)
  return d_table, reduce_scatter_axis(d_hidden, "sequence", 1)


def gather_positions(x: jax.Array) -> jax.Array:
  """Gathers the positions of all shards: [b, c / shards, ...] -> [b, c, ...]."""
  return all_gather_axis(x, "sequence", 1)


def local_positions(x: jax.Array) -> jax.Array:
  """Returns this device's positions: the inverse of `gather_positions`."""
  size = x.shape[1] // jax.lax.axis_size(mesh_axes("sequence"))
  return jax.lax.dynamic_slice_in_dim(x, shard_index("sequence") * size, size, 1)


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
  return max(min(2 ** math.ceil(math.log2(enough)), _power_of_two_to(fitting)), SHORTEST_CHUNK)


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


def _power_of_two_to(most: float) -> int:
  return 2 ** math.floor(math.log2(most))
