"""The compiled sampling loop: prefill once a prompt, then one token a completion until all have stopped."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.models.attention import KV, MASKED
from gtpo_jax.models.qwen2 import Qwen2, Unstacked, decode_step, empty_cache, prefill
from gtpo_jax.parallel import constrain
from gtpo_jax.sampling.filters import Sampler


class Decoding(NamedTuple):
  """Completions on their way, after `step` tokens each."""

  step: jax.Array       # i32[]
  hidden: jax.Array     # [n, g, 1, d], predicts the token at `step`
  prompt_kv: list[KV]   # per layer [n, 1, k, p, e]
  caches: list[KV]      # per layer [n, g, k, t, e]
  done: jax.Array       # bool[n, g]
  tokens: jax.Array     # i32[t, n, g]; time first, so that a step writes one contiguous slab
  mask: jax.Array       # bool[t, n, g]
  log_probs: jax.Array  # f32[t, n, g]
  entropy: jax.Array    # f32[t, n, g]


def generate(model: Qwen2, params: Unstacked, prompts: Prompts, keys: jax.Array, stop: jax.Array, pad: jax.Array,
             sampler: Sampler, max_tokens: int, words: int | None = None) -> Rollouts:
  """Samples one completion for each key.

  Args:
    model: the architecture.
    params: the policy, in sampling layout.
    prompts: [n, p].
    keys: typed PRNG keys [n, g], one a completion; token i is drawn with `fold_in(key, i)`, so that a completion depends on
      its own key and prompt alone.
    stop: i32[k], token ids that end a completion. The stop token itself is sampled, scored and masked in.
    pad: i32[], the id written after the end.
    sampler: temperature and filters.
    max_tokens: the longest completion, stop token included.
    words: only the first so many of the vocabulary are drawn from; None for all.
  """
  begun = begin(model, params, prompts, keys.shape[1], pad, max_tokens)
  return rollouts(model, prompts, advance(model, params, prompts, begun, keys, stop, pad, sampler, jnp.int32(max_tokens), words))


def begin(model: Qwen2, params: Unstacked, prompts: Prompts, g: int, pad: jax.Array, max_tokens: int) -> Decoding:
  """Reads each prompt once; its g completions have no token yet."""
  n = prompts.tokens.shape[0]
  hidden, prompt_kv = prefill(model, params, prompts)
  slab = lambda value, dtype: jnp.full((max_tokens, n, g), value, dtype)
  return Decoding(jnp.int32(0), jnp.broadcast_to(hidden, (n, g, *hidden.shape[2:])), prompt_kv, empty_cache(model, n, g, max_tokens),
                  jnp.zeros((n, g), bool), slab(pad, jnp.int32), slab(False, bool), slab(0, jnp.float32), slab(0, jnp.float32))


def advance(model: Qwen2, params: Unstacked, prompts: Prompts, begun: Decoding, keys: jax.Array, stop: jax.Array, pad: jax.Array,
            sampler: Sampler, until: jax.Array, words: int | None = None) -> Decoding:
  """Goes on until every completion has ended or has `until` tokens, i32[]. Other arguments as of `generate`."""
  def head(hidden: jax.Array) -> jax.Array:
    logits = model.apply({"params": params.outer}, hidden[:, :, 0], method="logits")
    return logits if words in (None, logits.shape[-1]) else jnp.where(jnp.arange(logits.shape[-1]) < words, logits, MASKED)

  def going(loop: Decoding) -> jax.Array:
    return (loop.step < until) & ~loop.done.all()

  def one(loop: Decoding) -> Decoding:
    fold = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, loop.step)))
    token, log_prob, entropy = sampler.pick(head(loop.hidden), fold(keys))
    alive = ~loop.done
    token = jnp.where(alive, token, pad)
    write = lambda slabs, row, empty: slabs.at[loop.step].set(jnp.where(alive, row, empty))
    hidden, caches = decode_step(model, params, prompts, begun.prompt_kv, loop.caches, token, loop.step)
    return loop._replace(step=loop.step + 1, hidden=hidden, caches=caches, done=loop.done | (alive & jnp.isin(token, stop)),
                         tokens=write(loop.tokens, token, pad), mask=write(loop.mask, True, False),
                         log_probs=write(loop.log_probs, log_prob, 0.0), entropy=write(loop.entropy, entropy, 0.0))

  end = jax.lax.while_loop(going, one, begun._replace(prompt_kv=[]))  # what does not change stays out of the loop's state
  return end._replace(prompt_kv=begun.prompt_kv)


def rollouts(model: Qwen2, prompts: Prompts, end: Decoding) -> Rollouts:
  """What has been written so far, [n, g, t]."""
  by_row = lambda x: constrain(jnp.moveaxis(x, 0, -1), model.mesh, "batch")
  return Rollouts(prompts, by_row(end.tokens), by_row(end.mask), by_row(end.log_probs), by_row(end.entropy), end.done)
