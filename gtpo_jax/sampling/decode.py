"""The compiled sampling loop: prefill once a prompt, then one token a completion until all have stopped."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.models.attention import KV
from gtpo_jax.models.qwen2 import Qwen2, Unstacked, decode_step, empty_cache, prefill
from gtpo_jax.parallel import constrain
from gtpo_jax.sampling.filters import Sampler


class _Loop(NamedTuple):
  step: jax.Array       # i32[]
  hidden: jax.Array     # [n, g, 1, d], predicts the token at `step`
  caches: list[KV]
  done: jax.Array       # bool[n, g]
  tokens: jax.Array     # i32[t, n, g]; time first, so that a step writes one contiguous slab
  mask: jax.Array       # bool[t, n, g]
  log_probs: jax.Array  # f32[t, n, g]
  entropy: jax.Array    # f32[t, n, g]


def generate(model: Qwen2, params: Unstacked, prompts: Prompts, keys: jax.Array, stop: jax.Array, pad: jax.Array,
             sampler: Sampler, max_tokens: int) -> Rollouts:
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
  """
  n, g = keys.shape
  head = lambda hidden: model.apply({"params": params.outer}, hidden[:, :, 0], method="logits")
  hidden, prompt_kv = prefill(model, params, prompts)
  slab = lambda value, dtype: jnp.full((max_tokens, n, g), value, dtype)
  start = _Loop(jnp.int32(0), jnp.broadcast_to(hidden, (n, g, *hidden.shape[2:])), empty_cache(model, n, g, max_tokens),
                jnp.zeros((n, g), bool), slab(pad, jnp.int32), slab(False, bool), slab(0, jnp.float32), slab(0, jnp.float32))

  def going(loop: _Loop) -> jax.Array:
    return (loop.step < max_tokens) & ~loop.done.all()

  def advance(loop: _Loop) -> _Loop:
    fold = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, loop.step)))
    token, log_prob, entropy = sampler.pick(head(loop.hidden), fold(keys))
    alive = ~loop.done
    token = jnp.where(alive, token, pad)
    write = lambda slabs, row, empty: slabs.at[loop.step].set(jnp.where(alive, row, empty))
    hidden, caches = decode_step(model, params, prompts, prompt_kv, loop.caches, token, loop.step)
    return _Loop(loop.step + 1, hidden, caches, loop.done | (alive & jnp.isin(token, stop)),
                 write(loop.tokens, token, pad), write(loop.mask, True, False),
                 write(loop.log_probs, log_prob, 0.0), write(loop.entropy, entropy, 0.0))

  end = jax.lax.while_loop(going, advance, start)
  by_row = lambda x: constrain(jnp.moveaxis(x, 0, -1), model.mesh, "batch")
  return Rollouts(prompts, by_row(end.tokens), by_row(end.mask), by_row(end.log_probs), by_row(end.entropy), end.done)
