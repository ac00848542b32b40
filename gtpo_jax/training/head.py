"""The vocabulary head: log-prob and entropy of every token without ever holding [tokens, vocabulary].

Tokens pass in chunks at full vocabulary width. The forward pass keeps one log-sum-exp a token; the backward pass makes each
chunk's logits again. One log-sum-exp serves both outputs: with z the logits, lse their log-sum-exp and p = exp(z - lse),
log-prob = z[token] - lse and entropy = lse - sum(p z).
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.models.qwen2 import Params, Qwen2
from gtpo_jax.training.micro_batches import join, split


def score(model: Qwen2, params: Params, prompts: Prompts, tokens: jax.Array, temperature: float,
          chunk: int) -> tuple[jax.Array, jax.Array]:
  """Log-prob and entropy f32[n, g, t], in nats, of completion tokens i32[n, g, t] under the policy at `temperature`."""
  n, g, t = tokens.shape
  hidden = model.apply({"params": params}, prompts, tokens, method="completion_hidden")
  table = model.apply({"params": params}, method="head_table")
  rows = lambda x: x.reshape(n * g, *x.shape[2:])
  log_probs, entropy = log_probs_and_entropy(rows(hidden), table, rows(tokens), temperature, chunk, model.config.matmul_precision)
  return log_probs.reshape(n, g, t), entropy.reshape(n, g, t)


def make_scorer(model: Qwen2, temperature: float, micro_batches: int, chunk: int) -> Callable[[Params, Rollouts], jax.Array]:
  """A jitted function (params, rollouts) -> f32[n, g, t]: log-probs, in nats, of what was written, as the trainer computes them."""
  def log_probs(params: Params, rollouts: Rollouts) -> jax.Array:
    def part(x: tuple[Prompts, jax.Array]) -> jax.Array:
      return jnp.where(x[2], score(model, params, x[0], x[1], temperature, chunk)[0], 0.0)
    return join(jax.lax.map(part, split((rollouts.prompts, rollouts.tokens, rollouts.mask), micro_batches, model)))

  return jax.jit(log_probs)


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def log_probs_and_entropy(hidden: jax.Array, table: jax.Array, tokens: jax.Array, temperature: float, chunk: int,
                          precision: str) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies of softmax(hidden @ table.T / temperature).

  Args:
    hidden: [b, t, d], the states that predict each token.
    table: [v, d], the output head.
    tokens: i32[b, t].
    temperature: of the policy.
    chunk: about how many tokens' logits are held at once; positions are chunked, rows stay whole (and sharded).
    precision: of the matrix products.

  Returns:
    log_probs f32[b, t] and entropy f32[b, t], in nats. The gradient flows through log_probs alone: entropy is a measurement
    here, never an objective.
  """
  return _forward(hidden, table, tokens, temperature, chunk, precision)[0]


def _forward(hidden: jax.Array, table: jax.Array, tokens: jax.Array, temperature: float, chunk: int,
             precision: str) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
  def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    z = _logits(args[0], table, temperature, precision)
    lse = jax.nn.logsumexp(z, axis=-1)
    target = jnp.take_along_axis(z, args[1][..., None], -1)[..., 0]
    return target - lse, lse - (jnp.exp(z - lse[..., None]) * z).sum(-1), lse

  count, t = _chunks(tokens.shape, chunk), tokens.shape[1]
  log_probs, entropy, lse = (_join(x, t) for x in jax.lax.map(one, (_split(hidden, count), _split(tokens, count))))
  return (log_probs, jnp.maximum(entropy, 0)), (hidden, table, tokens, lse)


def _backward(temperature: float, chunk: int, precision: str, residuals: Residuals,
              grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, None]:
  hidden, table, tokens, lse = residuals
  count = _chunks(tokens.shape, chunk)

  def one(d_table: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    h, token, lse, grad = args
    probs = jnp.exp(_logits(h, table, temperature, precision) - lse[..., None])
    hit = jnp.arange(table.shape[0]) == token[..., None]
    d_logits = ((hit - probs) * (grad / temperature)[..., None]).astype(h.dtype)
    d_hidden = jnp.einsum("btv,vd->btd", d_logits, table, precision=precision)
    d_table += jnp.einsum("btv,btd->vd", d_logits, h, preferred_element_type=jnp.float32, precision=precision)
    return d_table, d_hidden

  parts = tuple(_split(x, count) for x in (hidden, tokens, lse, grads[0]))
  d_table, d_hidden = jax.lax.scan(one, jnp.zeros(table.shape, jnp.float32), parts)
  return _join(d_hidden, tokens.shape[1]), d_table.astype(table.dtype), None


log_probs_and_entropy.defvjp(_forward, _backward)


def _logits(hidden: jax.Array, table: jax.Array, temperature: float, precision: str) -> jax.Array:
  return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32, precision=precision) / temperature


def _chunks(shape: tuple[int, ...], chunk: int) -> int:
  """Into how many parts t is cut so that a part holds at most `chunk` tokens, or one position where rows alone are more."""
  b, t = shape
  return -(-t // max(chunk // b, 1))


def _split(x: jax.Array, count: int) -> jax.Array:
  """[b, t, ...] -> [count, b, ceil(t / count), ...], padded with zeros."""
  b, t = x.shape[:2]
  x = jnp.pad(x, [(0, 0), (0, -t % count)] + [(0, 0)] * (x.ndim - 2))
  return jnp.moveaxis(x.reshape(b, count, -1, *x.shape[2:]), 1, 0)


def _join(x: jax.Array, t: int) -> jax.Array:
  """The inverse of `_split`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]
