"""The vocabulary head: log-prob and entropy of every token without ever holding [tokens, vocabulary].

Tokens pass in chunks at full vocabulary width. With z a chunk's logits, lse their log-sum-exp and p = exp(z - lse), one log-sum-exp
serves both outputs: log-prob = z[token] - lse and entropy = lse - sum(p z). There are two ways to a gradient:

- `log_probs_and_entropy` keeps one log-sum-exp a token, and its backward pass makes each chunk's logits again: for every objective.
- `loss_and_log_probs` knows a chunk's slopes as soon as its log-probs, because the loss is a sum over tokens, and takes the gradient
  while the logits are there: three products with the table instead of four, and nothing left to compute in its backward pass.

Rows lie over the batch axes; positions and the vocabulary over context and tensor. The table is gathered over fsdp once, outside the loop
over chunks; each chunk's positions are gathered, and every shard looks at its words alone: maxima and sums make the statistics whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.arrays import Packing, Prompts, Rollouts
from gtpo_jax.models.embedding import place_among
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.runtime.mesh import (
  axis_size,
  gathered,
  mesh_axes,
  partition_spec,
  scattered,
  shard_number,
)
from gtpo_jax.training.micro_batches import join, split

TokenLoss = Callable[
  [jax.Array, Any], jax.Array
]  # (log-probs f32[b, c], arrays [b, c] of the same tokens) -> their sum of losses f32[]


def score(
  model: Qwen2,
  params: Params,
  prompts: Prompts,
  tokens: jax.Array,
  temperature: float,
  chunk: int,
  packing: Packing | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob and entropy f32[n, g, t], in nats, of completion tokens i32[n, g, t] under the policy at `temperature`.

  With a `packing`, anything stands behind a completion's end.
  """
  found = log_probs_and_entropy(
    *_inputs(model, params, prompts, tokens, packing),
    temperature,
    chunk,
    model.config.matmul_precision,
    model.mesh,
  )
  return tuple(_of_completions(x, tokens, packing) for x in found)


def score_and_loss(
  model: Qwen2,
  params: Params,
  prompts: Prompts,
  tokens: jax.Array,
  temperature: float,
  chunk: int,
  token_loss: TokenLoss,
  signals: Any,
  packing: Packing | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The loss f32[], whose gradient is computed beside it, and the log-probs f32[n, g, t] of `score`, which pass no gradient on.

  Takes what `score` takes, and a `token_loss` and its signals as `loss_and_log_probs` does; these are [n, g, t] here, or [n, g] where a
  completion's tokens share one. Where there is no token, all its signals are 0, and so must be its loss.
  """
  of_tokens = lambda x: jnp.broadcast_to(x.reshape(*tokens.shape[:2], -1), tokens.shape)
  loss, log_probs = loss_and_log_probs(
    token_loss,
    *_inputs(model, params, prompts, tokens, packing),
    jax.tree.map(lambda x: _rows(of_tokens(x), packing), signals),
    temperature,
    chunk,
    model.config.matmul_precision,
    model.mesh,
  )
  return loss, _of_completions(log_probs, tokens, packing)


def make_scorer(
  model: Qwen2, temperature: float, micro_batches: int, chunk: int
) -> Callable[[Params, Rollouts], jax.Array]:
  """A jitted function (params, rollouts) -> f32[n, g, t]: log-probs, in nats, of what was written, as the trainer computes them."""

  def log_probs(params: Params, rollouts: Rollouts) -> jax.Array:
    def part(x: Rollouts) -> jax.Array:
      return jnp.where(
        x.mask, score(model, params, x.prompts, x.tokens, temperature, chunk, x.packing)[0], 0.0
      )

    return join(jax.lax.map(part, split(rollouts, micro_batches, model)))

  return jax.jit(log_probs)


def _inputs(
  model: Qwen2, params: Params, prompts: Prompts, tokens: jax.Array, packing: Packing | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What the head reads: the states that predict each token [b, t, d], the table [v, d], the tokens i32[b, t]; packed or not."""
  hidden = model.apply({"params": params}, prompts, tokens, packing, method="completion_hidden")
  return (
    hidden.reshape(-1, *hidden.shape[2:]),
    model.apply({"params": params}, method="head_table"),
    _rows(tokens, packing),
  )


def _rows(x: jax.Array, packing: Packing | None) -> jax.Array:
  """[n, g, t] -> [b, t]; packed, where completions are."""
  x = x if packing is None else packing.pack(x)
  return x.reshape(-1, x.shape[2])


def _of_completions(x: jax.Array, tokens: jax.Array, packing: Packing | None) -> jax.Array:
  """What the head found in rows [b, t], for each of `tokens` [n, g, t]."""
  return (
    x.reshape(tokens.shape)
    if packing is None
    else packing.unpack(x.reshape(packing.source.shape), tokens.shape[2])
  )


ROWS = partition_spec(("batch", "sequence"))
TABLE = partition_spec(("vocab", "vocab_embed"))
WORDS = mesh_axes("vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def log_probs_and_entropy(
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies of softmax(hidden @ table.T / temperature).

  Args:
    hidden: [b, t, d], the states that predict each token.
    table: [v, d], the output head as it is kept; products are taken in the type of `hidden`.
    tokens: i32[b, t].
    temperature: of the policy.
    chunk: about how many tokens' logits are held at once, all devices together; positions are chunked, rows stay whole (and sharded).
    precision: of the matrix products.
    mesh: b divides over its batch axes, v over context and tensor, d over fsdp.

  Returns:
    log_probs f32[b, t] and entropy f32[b, t], in nats. The gradient flows through log_probs alone: entropy is a measurement
    here, never an objective.
  """
  return _forward(hidden, table, tokens, temperature, chunk, precision, mesh)[0]


def _forward(
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  def one(words: jax.Array, h: jax.Array, token: jax.Array) -> tuple[None, tuple[jax.Array, ...]]:
    _, *read = _read(words, h, token, temperature, precision)
    return None, tuple(map(_own_positions, _statistics(*read)))

  _, (log_probs, entropy, lse) = _over_chunks(
    one, hidden, table, (tokens,), chunk, mesh, learns=False
  )
  return (log_probs, jnp.maximum(entropy, 0)), (hidden, table, tokens, lse)


def _backward(
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
  residuals: tuple[jax.Array, ...],
  grads: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None]:
  hidden, table, tokens, lse = residuals

  def one(
    words: jax.Array, h: jax.Array, token: jax.Array, lse: jax.Array, slope: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    read = _read(words, h, token, temperature, precision)
    return _gradient(
      words, *read, _all_positions(lse), _all_positions(slope) / temperature, precision
    )

  d_table, d_hidden = _over_chunks(
    one, hidden, table, (tokens, lse, grads[0]), chunk, mesh, learns=True
  )
  return d_hidden, d_table, None


log_probs_and_entropy.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6, 7, 8))
def loss_and_log_probs(
  token_loss: TokenLoss,
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  signals: Any,
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
) -> tuple[jax.Array, jax.Array]:
  """A loss that is a sum over tokens, and the log-probs it is made from. Its gradient is computed beside it, chunk by chunk.

  Args:
    token_loss: (log_probs f32[b, c], signals of the same tokens [b, c]) -> f32[], a sum over tokens of a function of each token's own
      log-prob and signals. It is called with chunks of positions, and with all of them.
    signals: a pytree of arrays [b, t]. Positions that fill up the last chunk have signals of 0 and states of 0.
    hidden, table, tokens, temperature, chunk, precision, mesh: as in `log_probs_and_entropy`.

  Returns:
    The loss f32[] and log_probs f32[b, t], in nats. The gradient flows through the loss alone, and to `hidden` and `table` alone.
  """
  return _forward_with_gradient(
    token_loss, hidden, table, tokens, signals, temperature, chunk, precision, mesh
  )[0]


def _forward_with_gradient(
  token_loss: TokenLoss,
  hidden: jax.Array,
  table: jax.Array,
  tokens: jax.Array,
  signals: Any,
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  def one(
    words: jax.Array, h: jax.Array, token: jax.Array, signals: Any
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    h, z, place = _read(words, h, token, temperature, precision)
    log_probs, _, lse = _statistics(z, place)
    log_probs = _own_positions(log_probs)
    slope = jax.grad(token_loss)(log_probs, signals)
    d_table, d_hidden = _gradient(
      words, h, z, place, lse, _all_positions(slope) / temperature, precision
    )
    return d_table, (log_probs, d_hidden)

  d_table, (log_probs, d_hidden) = _over_chunks(
    one, hidden, table, (tokens, signals), chunk, mesh, learns=True
  )
  return (token_loss(log_probs, signals), log_probs), (d_hidden, d_table)


def _backward_with_gradient(
  token_loss: TokenLoss,
  temperature: float,
  chunk: int,
  precision: str,
  mesh: Mesh,
  residuals: tuple[jax.Array, jax.Array],
  grads: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
  return *((x * grads[0]).astype(x.dtype) for x in residuals), None, None


loss_and_log_probs.defvjp(_forward_with_gradient, _backward_with_gradient)


def _over_chunks(
  one: Callable,
  hidden: jax.Array,
  table: jax.Array,
  rows: tuple,
  chunk: int,
  mesh: Mesh,
  learns: bool,
) -> tuple[jax.Array | None, Any]:
  """Calls `one` with chunk after chunk of positions, within `shard_map`.

  Args:
    one: (a shard's words, its positions of a chunk of `hidden` and of each of `rows`) -> (the chunk's part of the table's gradient,
      f32[d, v] as wide as the words, or None; and a pytree of what it has of its positions).
    rows: pytrees of arrays [b, t, ...].
    learns: whether `one` gives a gradient.

  Returns:
    The gradient of the table [v, d], or None, and the pytree of all positions, [b, t, ...].
  """
  (b, t) = hidden.shape[:2]
  shards = axis_size(mesh, "sequence")

  def local(table: jax.Array, rows: tuple) -> tuple[jax.Array | None, Any]:
    words = gathered(table.astype(hidden.dtype), "vocab_embed", 1)
    width = rows[0].shape[1]
    count = _chunks(b, width * shards, chunk)

    def step(total: jax.Array | None, part: tuple) -> tuple[jax.Array | None, Any]:
      more, own = one(words, *part)
      return jax.tree.map(jnp.add, total, more), own

    start = jnp.zeros(words.T.shape, jnp.float32) if learns else None
    d_table, own = jax.lax.scan(step, start, jax.tree.map(lambda x: _split(x, count), rows))
    # Turned before it is sent: a tied embedding's gradient lies so too, and XLA sums the two first and sends them once.
    d_table = jax.tree.map(
      lambda x: jax.lax.psum(scattered(x.T, "vocab_embed", 1), "data").astype(table.dtype), d_table
    )
    return d_table, jax.tree.map(lambda x: _join(x, width), own)

  whole = jax.shard_map(
    local, mesh=mesh, in_specs=(TABLE, ROWS), out_specs=(TABLE, ROWS), check_vma=False
  )
  d_table, own = whole(table, jax.tree.map(lambda x: _fill(x, shards), (hidden, *rows)))
  return d_table, jax.tree.map(lambda x: x[:, :t], own)


def _read(
  words: jax.Array, h: jax.Array, token: jax.Array, temperature: float, precision: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Of all positions of a chunk: states [b, c, d], logits f32[b, c, v] of a shard's words, and where among these each token stands."""
  h = _all_positions(h)
  z = (
    jnp.einsum("btd,vd->btv", h, words, preferred_element_type=jnp.float32, precision=precision)
    / temperature
  )
  return h, z, place_among(words, _all_positions(token))


def _statistics(z: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log-prob, entropy and log-sum-exp f32[b, c] of what `_read` gives."""
  peak = jax.lax.pmax(z.max(-1), WORDS)
  last = z.shape[-1] - 1
  above = z - peak[..., None]
  weights = jnp.exp(above)
  target = jnp.take_along_axis(z, jnp.minimum(place, last)[..., None], -1)[..., 0]
  parts = jnp.where(place <= last, target - peak, 0), weights.sum(-1), (weights * above).sum(-1)
  target, total, mixed = jax.lax.psum(parts, WORDS)
  log_total = jnp.log(total)
  return target - log_total, log_total - mixed / total, peak + log_total


def _gradient(
  words: jax.Array,
  h: jax.Array,
  z: jax.Array,
  place: jax.Array,
  lse: jax.Array,
  slope: jax.Array,
  precision: str,
) -> tuple[jax.Array, jax.Array]:
  """The gradient in a shard's words f32[d, v] and in its own positions' states [b, c, d]; `slope` f32[b, c] is that in a token's logit."""
  hit = jnp.arange(len(words)) == place[..., None]
  d_logits = ((hit - jnp.exp(z - lse[..., None])) * slope[..., None]).astype(h.dtype)
  d_table = jnp.einsum(
    "btd,btv->dv", h, d_logits, preferred_element_type=jnp.float32, precision=precision
  )
  return d_table, scattered(
    jnp.einsum("btv,vd->btd", d_logits, words, precision=precision), "sequence", 1
  )


def _all_positions(x: jax.Array) -> jax.Array:
  """A chunk's positions of every shard, [b, c, ...] -> [b, shards c, ...]."""
  return gathered(x, "sequence", 1)


def _own_positions(x: jax.Array) -> jax.Array:
  """The inverse of `_all_positions`."""
  own = x.shape[1] // jax.lax.axis_size(mesh_axes("sequence"))
  return jax.lax.dynamic_slice_in_dim(x, shard_number("sequence") * own, own, 1)


def _chunks(b: int, t: int, chunk: int) -> int:
  """Into how many parts t is cut so that a part holds at most `chunk` tokens, or one position where rows alone are more."""
  return -(-t // max(chunk // b, 1))


def _fill(x: jax.Array, shards: int) -> jax.Array:
  """[b, t, ...] with t filled up with zeros until it divides."""
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % shards)] + [(0, 0)] * (x.ndim - 2))


def _split(x: jax.Array, count: int) -> jax.Array:
  """[b, t, ...] -> [count, b, ceil(t / count), ...], padded with zeros."""
  x = _fill(x, count)
  return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _join(x: jax.Array, t: int) -> jax.Array:
  """The inverse of `_split`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]
