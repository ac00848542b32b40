"""The vocabulary head: log-prob and entropy of every token without ever holding [tokens, vocabulary].

Tokens pass in chunks at full vocabulary width. The forward pass keeps one log-sum-exp a token; the backward pass makes each
chunk's logits again. One log-sum-exp serves both outputs: with z the logits, lse their log-sum-exp and p = exp(z - lse),
log-prob = z[token] - lse and entropy = lse - sum(p z).

Rows lie over the batch axes; positions and the vocabulary over context and tensor. The table is gathered over fsdp once, outside the loop
over chunks; each chunk's positions are gathered, and every shard looks at its words alone: maxima and sums make the statistics whole.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gtpo_jax.arrays import Packing, Prompts, Rollouts
from gtpo_jax.models.embedding import place_among
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.parallel import axis_size, gathered, mesh_axes, partition_spec, scattered, shard_number
from gtpo_jax.training.micro_batches import join, split


def score(model: Qwen2, params: Params, prompts: Prompts, tokens: jax.Array, temperature: float, chunk: int,
          packing: Packing | None = None) -> tuple[jax.Array, jax.Array]:
  """Log-prob and entropy f32[n, g, t], in nats, of completion tokens i32[n, g, t] under the policy at `temperature`.

  With a `packing`, anything stands where no token does.
  """
  hidden = model.apply({"params": params}, prompts, tokens, packing, method="completion_hidden")
  table = model.apply({"params": params}, method="head_table")
  targets = tokens if packing is None else packing.pack(tokens)
  rows = lambda x: x.reshape(-1, *x.shape[2:])
  found = log_probs_and_entropy(rows(hidden), table, rows(targets), temperature, chunk, model.config.matmul_precision, model.mesh)
  found = tuple(x.reshape(targets.shape) for x in found)
  return found if packing is None else tuple(packing.unpack(x, tokens.shape[2]) for x in found)


def make_scorer(model: Qwen2, temperature: float, micro_batches: int, chunk: int) -> Callable[[Params, Rollouts], jax.Array]:
  """A jitted function (params, rollouts) -> f32[n, g, t]: log-probs, in nats, of what was written, as the trainer computes them."""
  def log_probs(params: Params, rollouts: Rollouts) -> jax.Array:
    def part(x: Rollouts) -> jax.Array:
      return jnp.where(x.mask, score(model, params, x.prompts, x.tokens, temperature, chunk, x.packing)[0], 0.0)
    return join(jax.lax.map(part, split(rollouts, micro_batches, model)))

  return jax.jit(log_probs)


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
ROWS, TABLE = partition_spec(("batch", "sequence")), partition_spec(("vocab", "vocab_embed"))
WORDS = mesh_axes("vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def log_probs_and_entropy(hidden: jax.Array, table: jax.Array, tokens: jax.Array, temperature: float, chunk: int, precision: str,
                          mesh: Mesh) -> tuple[jax.Array, jax.Array]:
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


def _forward(hidden: jax.Array, table: jax.Array, tokens: jax.Array, temperature: float, chunk: int, precision: str,
             mesh: Mesh) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
  (b, t), shards = tokens.shape, axis_size(mesh, "vocab")

  def local(hidden: jax.Array, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
    words = _words(table, hidden.dtype)

    def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
      h, token = (_all_positions(x) for x in args)
      z = _logits(h, words, temperature, precision)
      peak = jax.lax.pmax(z.max(-1), WORDS)
      weights, place = jnp.exp(z - peak[..., None]), place_among(words, token)
      target = jnp.take_along_axis(z, jnp.minimum(place, len(words) - 1)[..., None], -1)[..., 0]
      parts = jnp.where(place < len(words), target - peak, 0), weights.sum(-1), (weights * (z - peak[..., None])).sum(-1)
      target, total, mixed = jax.lax.psum(parts, WORDS)
      log_total = jnp.log(total)
      return tuple(map(_own_positions, (target - log_total, log_total - mixed / total, peak + log_total)))

    count = _chunks(b, tokens.shape[1] * shards, chunk)
    return tuple(_join(x, tokens.shape[1]) for x in jax.lax.map(one, (_split(hidden, count), _split(tokens, count))))

  whole = _shard(mesh, local, (ROWS, TABLE, ROWS), (ROWS, ROWS, ROWS))
  log_probs, entropy, lse = whole(_fill(hidden, shards), table, _fill(tokens, shards))
  return (log_probs[:, :t], jnp.maximum(entropy[:, :t], 0)), (hidden, table, tokens, lse)


def _backward(temperature: float, chunk: int, precision: str, mesh: Mesh, residuals: Residuals,
              grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, None]:
  hidden, table, tokens, lse = residuals
  (b, t), shards = tokens.shape, axis_size(mesh, "vocab")

  def local(hidden: jax.Array, table: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(table, hidden.dtype)

    def one(d_table: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
      h, token, lse, grad = (_all_positions(x) for x in args)
      probs = jnp.exp(_logits(h, words, temperature, precision) - lse[..., None])
      hit = jnp.arange(len(words)) == place_among(words, token)[..., None]
      d_logits = ((hit - probs) * (grad / temperature)[..., None]).astype(h.dtype)
      d_hidden = jnp.einsum("btv,vd->btd", d_logits, words, precision=precision)
      d_table += jnp.einsum("btv,btd->vd", d_logits, h, preferred_element_type=jnp.float32, precision=precision)
      return d_table, scattered(d_hidden, "sequence", 1)

    count = _chunks(b, hidden.shape[1] * shards, chunk)
    parts = tuple(_split(x, count) for x in (hidden, *rest))
    d_table, d_hidden = jax.lax.scan(one, jnp.zeros(words.shape, jnp.float32), parts)
    d_table = jax.lax.psum(scattered(d_table, "vocab_embed", 1), "data")
    return _join(d_hidden, hidden.shape[1]), d_table.astype(table.dtype)

  whole = _shard(mesh, local, (ROWS, TABLE, ROWS, ROWS, ROWS), (ROWS, TABLE))
  d_hidden, d_table = whole(_fill(hidden, shards), table, _fill(tokens, shards), lse, _fill(grads[0], shards))
  return d_hidden[:, :t], d_table, None


log_probs_and_entropy.defvjp(_forward, _backward)


def _shard(mesh: Mesh, function: Callable, inputs: tuple, outputs: tuple) -> Callable:
  return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _words(table: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """A shard's words, whole over fsdp."""
  return gathered(table.astype(dtype), "vocab_embed", 1)


def _all_positions(x: jax.Array) -> jax.Array:
  """A chunk's positions of every shard, [b, c, ...] -> [b, shards c, ...]."""
  return gathered(x, "sequence", 1)


def _own_positions(x: jax.Array) -> jax.Array:
  """The inverse of `_all_positions`."""
  own = x.shape[1] // jax.lax.axis_size(mesh_axes("sequence"))
  return jax.lax.dynamic_slice_in_dim(x, shard_number("sequence") * own, own, 1)


def _logits(hidden: jax.Array, table: jax.Array, temperature: float, precision: str) -> jax.Array:
  return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32, precision=precision) / temperature


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
