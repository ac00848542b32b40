"""The compiled programs of sampling: read prompts into their seats, and decode a chunk of tokens in every slot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.attention import KV, MASKED
from gtpo_jax.models.qwen2 import DecodeParams, Qwen2, decode_step, next_logits, prefill
from gtpo_jax.runtime.mesh import constrain
from gtpo_jax.sampling.cache import (
  PromptCache,
  SlotCache,
  View,
  take_seats,
  within_shards,
  write_back,
)
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.slots import Control


class Chunk(NamedTuple):
  """What one chunk wrote, the same on every device; time first, so that a step writes one contiguous slab."""

  tokens: jax.Array  # i32[c, s]
  mask: jax.Array  # bool[c, s], True on tokens that were written
  log_probs: jax.Array  # f32[c, s], nats, of the policy (see `SamplingParams`)
  entropy: jax.Array  # f32[c, s], nats, of the policy
  drawn_log_probs: jax.Array  # f32[c, s], nats, of the distribution drawn from
  plain_log_probs: jax.Array  # f32[c, s], nats, at temperature 1
  stopped: jax.Array  # bool[s], a stop token was written


def read_prompts(
  model: Qwen2, params: DecodeParams, prompt_cache: PromptCache, prompts: Prompts, at: jax.Array
) -> PromptCache:
  """Reads `prompts` [b, p], each once, into the seats `at` i32[shards, b / shards]; only the last position's hidden state is kept."""
  hidden, kv = prefill(model, params, prompts)
  seen = None
  if prompt_cache.seen is not None:
    rows = jnp.arange(len(prompts.lengths))[:, None]
    words = jnp.where(prompts.mask, prompts.tokens, model.config.vocab_size)
    seen = (
      jnp.zeros((len(prompts.lengths), model.config.vocab_size), bool)
      .at[rows, words]
      .set(True, mode="drop")
    )
  return take_seats(model, prompt_cache, kv, hidden, seen, at)


def decode_chunk(
  model: Qwen2,
  params: DecodeParams,
  prompt_cache: PromptCache,
  slots: SlotCache,
  control: Control,
  stop: jax.Array,
  sampling_params: SamplingParams,
  chunk: int,
  until: jax.Array,
  spare: jax.Array,
  attention: str,
  words: int | None = None,
) -> tuple[SlotCache, Chunk]:
  """Draws up to `chunk` tokens in every live slot, with no way back to the host between them.

  Token i of a completion is drawn with `fold_in(its key, i)`, so that it depends on its key and prompt alone.

  Args:
    model: the architecture.
    params: the policy, in sampling layout.
    seats, slots: what has been read and written.
    control: what each slot does.
    stop: i32[k], token ids that end a completion. The stop token itself is sampled, scored and masked in.
    sampler: temperature and filters.
    chunk: room for the chunk's keys and values.
    until: i32[] <= chunk, ends the chunk after so many tokens.
    spare: i32[], ends the chunk when so many slots have finished in it.
    attention: "xla", "pallas" or "triton", see `Limits`.
    words: only the first so many of the vocabulary are drawn from; None for all.
  """
  c = model.config
  live = control.live
  first = control.prompt + control.written
  p = prompt_cache.kv[0].v.shape[3]
  rows = control.slot.shape[1]
  view = View(
    model,
    prompt_cache.kv,
    slots.kv,
    control.place,
    control.slot,
    (jnp.arange(p) >= p - control.seated[:, None])[:, None, None],
    jnp.asarray(control.written),
    attention,
  )
  keys = jax.random.wrap_key_data(control.keys)
  enter = lambda seat, slot: jnp.where(
    control.fresh.reshape(-1, *[1] * (slot.ndim - 1)),
    within_shards(model, lambda x, at: x[at], seat, control.place // rows),
    slot,
  )
  hidden = enter(prompt_cache.hidden, slots.hidden)
  seen = None if slots.seen is None else enter(prompt_cache.seen, slots.seen)
  s = len(live)
  fresh = [
    KV(
      jnp.zeros((*kv.k.shape[:4], chunk), hidden.dtype),
      jnp.zeros((*kv.v.shape[:3], chunk, c.head_dim), hidden.dtype),
    )
    for kv in slots.kv
  ]
  slab = lambda dtype: jnp.zeros((chunk, s), dtype)

  def head(hidden: jax.Array) -> jax.Array:
    logits = next_logits(model, params, hidden[:, 0, 0])
    return (
      logits
      if words in (None, logits.shape[-1])
      else jnp.where(jnp.arange(logits.shape[-1]) < words, logits, MASKED)
    )

  def going(loop: _Loop) -> jax.Array:
    return (loop.step < until) & loop.live.any() & ((live & ~loop.live).sum() < spare)

  def one(loop: _Loop) -> _Loop:
    index = control.written + loop.step
    picked = sampling_params.pick(
      head(loop.hidden), jax.vmap(jax.random.fold_in)(keys, index), loop.seen
    )
    stopped = loop.live & jnp.isin(picked.token, stop)
    write = lambda slab, row: slab.at[loop.step].set(jnp.where(loop.live, row, jnp.zeros_like(row)))
    written = Chunk(
      *map(write, loop.out[:-1], (picked.token, loop.live, *picked[1:])), loop.out.stopped | stopped
    )
    hidden, kv = decode_step(
      model,
      params,
      picked.token[:, None],
      (first + loop.step)[:, None],
      view.attend(loop.kv, loop.step),
    )
    seen = None if loop.seen is None else loop.seen.at[jnp.arange(s), picked.token].set(True)
    return _Loop(
      loop.step + 1, loop.live & ~stopped & (index + 1 < control.limit), hidden, seen, kv, written
    )

  out = Chunk(slab(jnp.int32), slab(bool), *[slab(jnp.float32)] * 4, jnp.zeros(s, bool))
  end = jax.lax.while_loop(
    going, one, _Loop(jnp.int32(0), jnp.asarray(live), hidden, seen, fresh, out)
  )
  slots = SlotCache(write_back(model, slots.kv, end.kv, control.written), end.hidden, end.seen)
  return slots, jax.tree.map(lambda x: constrain(x, model.mesh), end.out)


class _Loop(NamedTuple):
  step: jax.Array  # i32[]
  live: jax.Array  # bool[s]
  hidden: jax.Array  # [s, 1, 1, d]
  seen: jax.Array | None  # bool[s, v]
  kv: list[KV]  # per layer, c positions of s rows: of this chunk
  out: Chunk
