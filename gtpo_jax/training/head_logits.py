"""A chunk's logits in one vocabulary shard, their softmax statistics, and their gradients.

These functions run within `shard_map`. Dimension letters: b rows, c positions of a chunk, d model
width, v vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gtpo_jax.algorithms import Distillation
from gtpo_jax.models.embedding import local_ids
from gtpo_jax.models.formats.products import einsum
from gtpo_jax.runtime.mesh import (
  all_gather_axis,
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


def softmax_statistics(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns log-prob, entropy and log-sum-exp, f32[b, c] each, from the chunk's logits and ids."""
  max_logit = jax.lax.pmax(logits.max(-1), VOCAB_AXES)
  last_id = logits.shape[-1] - 1
  shifted = logits - max_logit[..., None]
  weights = jnp.exp(shifted)
  target = jnp.take_along_axis(logits, jnp.minimum(ids, last_id)[..., None], -1)[..., 0]
  shard_sums = (
    jnp.where(ids <= last_id, target - max_logit, 0),
    weights.sum(-1),
    (weights * shifted).sum(-1),
  )
  shifted_target, total, weighted_total = sum_shards(shard_sums, VOCAB_AXES)
  log_total = jnp.log(total)
  return shifted_target - log_total, log_total - weighted_total / total, max_logit + log_total


def divergence_from_teacher(
  logits: jax.Array, teacher_logits: jax.Array, shared: int, distillation: Distillation
) -> tuple[jax.Array, jax.Array]:
  """Returns the divergence between two distributions, and its gradient in the policy's logits.

  With p the policy, q the teacher and m = beta q + (1 - beta) p, the divergence is KL(p || q), KL(q
  || p), or beta KL(q || m) + (1 - beta) KL(p || m). The gradient is p (x - E_p[x]), with x = log(p
  / q), x = -q / p, or x = (1 - beta) log(p / m).

  Args:
    logits, teacher_logits: f32[b, c, v / shards], divided by the temperature.
    shared: the ids below this are compared; both distributions are over these.
    distillation: names the divergence.

  Returns:
    f32[b, c], in nats, and f32[b, c, v / shards].
  """
  size = logits.shape[-1]
  valid = jnp.arange(size) + shard_index("vocab") * size < shared
  log_p, log_q = (_log_softmax(x, valid) for x in (logits, teacher_logits))
  if 0 < distillation.top_k < shared:
    log_q = _with_one_tail(log_p, log_q, distillation.top_k)
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  expected = lambda probs, x: jax.lax.psum((probs * x).sum(-1), VOCAB_AXES)
  if distillation.divergence == "forward_kl":
    return expected(q, log_q - log_p), p - q
  if distillation.divergence == "reverse_kl":
    x = log_p - log_q
    divergence = expected(p, x)
    return divergence, p * (x - divergence[..., None])
  beta = distillation.beta
  log_m = jnp.logaddexp(jnp.log(beta) + log_q, jnp.log1p(-beta) + log_p)
  of_policy = expected(p, log_p - log_m)
  divergence = beta * expected(q, log_q - log_m) + (1 - beta) * of_policy
  return divergence, (1 - beta) * p * (log_p - log_m - of_policy[..., None])


def _with_one_tail(log_p: jax.Array, log_q: jax.Array, k: int) -> jax.Array:
  """Returns the teacher's log-probs with the policy's proportions outside its k most probable ids.

  The divergence from this teacher, and its gradient with the teacher held constant, are those of
  distributions in which all ids but these k are one. Ids as probable as the k-th are kept too.

  Args:
    log_p, log_q: f32[b, c, v / shards], of policy and teacher.
    k: less than v.
  """
  of_shard, _ = jax.lax.top_k(log_q, min(k, log_q.shape[-1]))
  of_all = all_gather_axis(of_shard, "vocab", of_shard.ndim - 1)
  in_tail = log_q < jax.lax.top_k(of_all, k)[0][..., -1:]
  sums = (jnp.where(in_tail, jnp.exp(x), 0.0).sum(-1) for x in (log_p, log_q))
  tail_p, tail_q = (x + TINY for x in jax.lax.psum(tuple(sums), VOCAB_AXES))
  return jnp.where(in_tail, log_p + jnp.log(tail_q / tail_p)[..., None], log_q)


def _log_softmax(logits: jax.Array, valid: jax.Array) -> jax.Array:
  """Returns the log-probs of the ids in `valid` bool[v / shards]; those of the others are huge."""
  logits = jnp.where(valid, logits, NEVER)
  max_logit = jax.lax.pmax(logits.max(-1), VOCAB_AXES)
  total = jax.lax.psum(jnp.exp(logits - max_logit[..., None]).sum(-1), VOCAB_AXES)
  return logits - (max_logit + jnp.log(total))[..., None]


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
