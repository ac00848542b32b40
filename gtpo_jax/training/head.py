"""Log-probs, entropy and loss from hidden states, without an array of shape [tokens, vocabulary].

Tokens are processed in chunks. With z the logits of a token over the complete vocabulary, lse their
log-sum-exp and p = exp(z - lse), the outputs are log-prob = z[token] - lse and entropy = lse -
sum(p z). The gradient with respect to the logits is (1[token] - p) for the log-prob, and
-p (log p + entropy) for the entropy; the second is computed only on request. There are two ways to
compute the gradient of a loss:

- `log_probs_and_entropy` saves one log-sum-exp per token, and its backward pass recomputes the
  logits of each chunk. It works with every objective.
- `loss_and_log_probs` requires a loss that is a sum over tokens. The derivative of such a loss with
  respect to a chunk's log-probs depends only on that chunk, so the forward pass computes the
  gradient while the chunk's logits are in memory. This takes three matrix products of the size of
  the logits instead of four, and the backward pass only scales the result. The loss may include the
  divergences from a teacher, which add one product, the teacher's logits of the chunk.

Rows are sharded over the batch axes of the mesh; positions and the vocabulary are sharded over
context and tensor. The table (the output head) is gathered over fsdp once, before the loop over
chunks. In the loop, the positions of a chunk are gathered, each device computes their logits for
its vocabulary shard, and a maximum and sums over the shards complete the softmax statistics.

Dimension letters: b rows, t positions, c positions of a chunk, d model width, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.algorithms import Distillation
from gtpo_jax.models.number_formats import einsum
from gtpo_jax.runtime.mesh import (
  all_gather_axis,
  axis_size,
  batch_shards,
  partition_spec,
  reduce_scatter_axis,
  sum_shards,
)
from gtpo_jax.training.head_logits import (
  Comparison,
  chunk_count,
  chunk_logits,
  compare_with_teacher,
  default_chunk,
  gather_positions,
  head_gradient,
  local_positions,
  logits_gradient,
  merge_positions,
  pad_positions,
  softmax_statistics,
  split_positions,
)

# (log-probs and entropies f32[b, c], signals [b, c] of the same tokens) -> the sum of their losses
TokenLoss = Callable[[jax.Array, jax.Array, Any], jax.Array]

ROWS = partition_spec(("batch", "sequence"))
TABLE = partition_spec(("vocab", "vocab_embed"))


@dataclasses.dataclass(frozen=True)
class HeadSettings:
  """How the head computes, the same for all tokens."""

  # the device mesh. b must be a multiple of its batch shards, v of context x tensor, and d of
  # fsdp
  mesh: Mesh
  temperature: float  # the temperature of the policy
  # approximate number of tokens whose logits a device has in memory at once; 0 for
  # `default_chunk`. Each chunk is a range of positions of all rows of the device
  chunk: int
  precision: str  # the precision of the matrix products
  # whether the gradient flows through the entropy too, as for an entropy bonus
  entropy_gradient: bool = False


@flax.struct.dataclass
class TeacherStates:
  """The inputs of the divergences from a teacher."""

  hidden: jax.Array  # [b, t, d'], the teacher's states at the policy's positions
  table: jax.Array  # [v', d'], its output head. Only the ids that both have are compared
  weights: jax.Array  # f32[b, t], the weight of each token's divergence in the loss
  distillation: Distillation = flax.struct.field(pytree_node=False)  # names the divergence


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def log_probs_and_entropy(
  hidden: jax.Array, table: jax.Array, tokens: jax.Array, settings: HeadSettings
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probs and entropies of softmax(hidden @ table.T / temperature).

  Args:
    hidden: [b, t, d], the states that predict each token.
    table: [v, d], the output head in its storage dtype; products use the dtype of `hidden`.
    tokens: i32[b, t].
    settings: the temperature, the mesh, and how the products are computed.

  Returns:
    log_probs f32[b, t] and entropy f32[b, t], in nats. Without `entropy_gradient`, the gradient
    flows only through log_probs.
  """
  return _forward(hidden, table, tokens, settings)[0]


def score_norms(
  hidden: jax.Array, table: jax.Array, tokens: jax.Array, settings: HeadSettings
) -> jax.Array:
  """Returns the squared norm of the gradient of each log-prob in the logits, f32[b, t].

  It is `1 - 2 p[token] + sum(p^2)`, from 0 for a certain token to 2. It has no gradient. Arguments
  are as in `log_probs_and_entropy`.
  """

  def chunk_norms(
    vocab_shard: jax.Array, hidden: jax.Array, tokens: jax.Array
  ) -> tuple[None, jax.Array]:
    _, logits, ids = chunk_logits(
      vocab_shard, hidden, tokens, settings.temperature, settings.precision
    )
    log_probs, _, _, squares = softmax_statistics(logits, ids, squares=True)
    return None, local_positions(1 - 2 * jnp.exp(log_probs) + squares)

  _, norms = _over_chunks(chunk_norms, hidden, table, (tokens,), settings, with_gradient=False)
  return jax.lax.stop_gradient(jnp.maximum(norms, 0))


def _forward(
  hidden: jax.Array, table: jax.Array, tokens: jax.Array, settings: HeadSettings
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  def chunk_statistics(
    vocab_shard: jax.Array, hidden: jax.Array, tokens: jax.Array
  ) -> tuple[None, tuple[jax.Array, ...]]:
    _, logits, ids = chunk_logits(
      vocab_shard, hidden, tokens, settings.temperature, settings.precision
    )
    return None, tuple(map(local_positions, softmax_statistics(logits, ids)))

  _, (log_probs, entropy, lse) = _over_chunks(
    chunk_statistics, hidden, table, (tokens,), settings, with_gradient=False
  )
  entropy = jnp.maximum(entropy, 0)
  residuals = (hidden, table, tokens, lse, entropy if settings.entropy_gradient else None)
  return (log_probs, entropy), residuals


def _backward(
  settings: HeadSettings, residuals: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
  hidden, table, tokens, lse, entropy = residuals
  # The entropies and their cotangents, or nothing.
  of_entropy = (entropy, cotangents[1]) if settings.entropy_gradient else ()

  def chunk_gradient(
    vocab_shard: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    lse: jax.Array,
    d_log_probs: jax.Array,
    *of_entropy: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    hidden, logits, ids = chunk_logits(
      vocab_shard, hidden, tokens, settings.temperature, settings.precision
    )
    cotangents = map(gather_positions, (d_log_probs, *of_entropy))
    lse = gather_positions(lse)
    d_logits = logits_gradient(logits, ids, lse, settings.temperature, *cotangents)
    return head_gradient(vocab_shard, hidden, d_logits, settings.precision)

  rows = (tokens, lse, cotangents[0], *of_entropy)
  d_table, d_hidden = _over_chunks(
    chunk_gradient, hidden, table, rows, settings, with_gradient=True
  )
  return d_hidden, d_table, None


log_probs_and_entropy.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def loss_and_log_probs(
  token_loss: TokenLoss,
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  signals: Any,
  settings: HeadSettings,
  teacher: TeacherStates | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Comparison | None]:
  """Returns a loss that is a sum over tokens, and the log-probs and entropies of the tokens.

  The gradient is computed chunk by chunk in the forward pass, together with the loss. The logits of
  policy and teacher are in memory for one chunk at a time.

  Args:
    token_loss: (log_probs f32[b, c], entropy f32[b, c], signals [b, c] of the same tokens) ->
      f32[], a sum over tokens in which each term depends only on that token's values. It is called
      on every chunk and once on all positions.
    signals: a pytree of arrays [b, t]. Positions are padded with zero signals and zero hidden
      states.
    hidden, table, tokens, settings: as in `log_probs_and_entropy`.
    teacher: adds the weighted sum of the divergences from a teacher to the loss; None for none.

  Returns:
    The loss f32[], log_probs and entropy f32[b, t] in nats, and each token's comparison with the
    teacher [b, t], or None. The gradient flows only through the loss, and only to `hidden` and
    `table`.
  """
  return _forward_with_gradient(token_loss, hidden, table, tokens, signals, settings, teacher)[0]


def _forward_with_gradient(
  token_loss: TokenLoss,
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  signals: Any,
  settings: HeadSettings,
  teacher: TeacherStates | None,
) -> tuple[tuple[Any, ...], tuple[jax.Array, jax.Array]]:
  wanted = (0, 1) if settings.entropy_gradient else (0,)
  rows = (tokens, signals)
  teacher_tables = ()
  if teacher is not None:
    rows += (teacher.hidden, teacher.weights)
    v = table.shape[0]
    shared = min(v, teacher.table.shape[0])
    teacher_table = teacher.table[:v].astype(teacher.hidden.dtype)
    teacher_tables = (jnp.pad(teacher_table, [(0, v - shared), (0, 0)]),)

  def chunk_loss_gradient(
    vocab_shard: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    signals: Any,
    *of_teacher: jax.Array,
  ) -> tuple[jax.Array, tuple[Any, ...]]:
    hidden, logits, ids = chunk_logits(
      vocab_shard, hidden, tokens, settings.temperature, settings.precision
    )
    log_probs, entropy, lse = softmax_statistics(logits, ids)
    entropy = jnp.maximum(entropy, 0)
    local = (local_positions(log_probs), local_positions(entropy))
    gathered = map(gather_positions, jax.grad(token_loss, wanted)(*local, signals))
    d_log_probs, *d_entropy = gathered
    of_entropy = (entropy, *d_entropy) if settings.entropy_gradient else ()
    d_logits = logits_gradient(logits, ids, lse, settings.temperature, d_log_probs, *of_entropy)
    comparison = None
    if of_teacher:
      *gathered, teacher_shard = of_teacher
      teacher_hidden, weights = map(gather_positions, gathered)
      teacher_logits = einsum("btd,vd->btv", teacher_hidden, teacher_shard, settings.precision)
      comparison, slope = compare_with_teacher(
        logits, teacher_logits / settings.temperature, shared, teacher.distillation
      )
      d_logits += (weights / settings.temperature)[..., None] * slope
      comparison = jax.tree.map(local_positions, comparison)
    d_table, d_hidden = head_gradient(vocab_shard, hidden, d_logits, settings.precision)
    return d_table, (*local, comparison, d_hidden)

  d_table, (log_probs, entropy, comparison, d_hidden) = _over_chunks(
    chunk_loss_gradient, hidden, table, rows, settings, with_gradient=True, others=teacher_tables
  )
  loss = token_loss(log_probs, entropy, signals)
  if teacher is not None:
    loss += (teacher.weights * comparison.divergence).sum()
  return (loss, log_probs, entropy, comparison), (d_hidden, d_table)


def _backward_with_gradient(
  token_loss: TokenLoss,
  settings: HeadSettings,
  residuals: tuple[jax.Array, jax.Array],
  cotangents: tuple[Any, ...],
) -> tuple[jax.Array | None, ...]:
  d_hidden, d_table = ((x * cotangents[0]).astype(x.dtype) for x in residuals)
  return d_hidden, d_table, None, None, None


loss_and_log_probs.defvjp(_forward_with_gradient, _backward_with_gradient)


def _over_chunks(
  chunk_fn: Callable,
  hidden: jax.Array,
  table: jax.Array,
  rows: tuple,
  settings: HeadSettings,
  with_gradient: bool,
  others: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array | None, Any]:
  """Scans `chunk_fn` over chunks of positions, within `shard_map`.

  Args:
    chunk_fn: (vocab_shard [v / shards, d], *arrays, *other_shards), where `arrays` are `hidden` and
      `rows` at this device's positions of a chunk. Returns (d_shard, outputs): the chunk's term
      f32[d, v / shards] of the gradient of the vocabulary shard, or None; and a pytree of outputs
      at these positions.
    rows: pytrees of arrays [b, t, ...].
    with_gradient: whether `chunk_fn` returns a gradient.
    others: further tables with v rows, which have no gradient.

  Returns:
    The gradient of the table [v, d], or None; and the outputs at all positions, [b, t, ...].
  """
  b, t = hidden.shape[:2]
  mesh = settings.mesh
  shards = axis_size(mesh, "sequence")
  chunk = settings.chunk or default_chunk(mesh, table.shape[0])

  def scan_local(
    table: jax.Array, others: tuple[jax.Array, ...], rows: tuple
  ) -> tuple[jax.Array | None, Any]:
    vocab_shard = all_gather_axis(table.astype(hidden.dtype), "vocab_embed", 1)
    shards_of_others = [all_gather_axis(x, "vocab_embed", 1) for x in others]
    local_t = rows[0].shape[1]
    chunks = chunk_count(b // batch_shards(mesh), local_t * shards, chunk)

    def step(d_shard: jax.Array | None, rows: tuple) -> tuple[jax.Array | None, Any]:
      d_chunk, outputs = chunk_fn(vocab_shard, *rows, *shards_of_others)
      return jax.tree.map(jnp.add, d_shard, d_chunk), outputs

    zeros = jnp.zeros(vocab_shard.T.shape, jnp.float32) if with_gradient else None
    chunked_rows = jax.tree.map(lambda x: split_positions(x, chunks), rows)
    d_shard, outputs = jax.lax.scan(step, zeros, chunked_rows)

    def reduce_gradient(x: jax.Array) -> jax.Array:
      # The transpose comes before the communication. The gradient of a tied embedding has the same
      # layout, so XLA adds the two and sends one array.
      x = reduce_scatter_axis(x.T, "vocab_embed", 1)
      return sum_shards(x, "data").astype(table.dtype)

    outputs = jax.tree.map(lambda x: merge_positions(x, local_t), outputs)
    return jax.tree.map(reduce_gradient, d_shard), outputs

  sharded = jax.shard_map(
    scan_local, mesh=mesh, in_specs=(TABLE, TABLE, ROWS), out_specs=(TABLE, ROWS), check_vma=False
  )
  padded_rows = jax.tree.map(lambda x: pad_positions(x, shards), (hidden, *rows))
  d_table, outputs = sharded(table, others, padded_rows)
  return d_table, jax.tree.map(lambda x: x[:, :t], outputs)
