"""Sampling on the devices: prefills prompts, and decodes a chunk of tokens in every slot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.attention import KV, MASKED
from gtpo_jax.models.decode import DecodeParams, decode_step, next_logits, prefill
from gtpo_jax.models.qwen2 import Qwen2
from gtpo_jax.runtime.mesh import constrain
from gtpo_jax.sampling.cache import (
  PromptCache,
  SlotCache,
  append_chunk,
  gather_rows,
  insert_prompts,
)
from gtpo_jax.sampling.decode_attention import DecodeAttention
from gtpo_jax.sampling.filters import SampledToken, sample_token
from gtpo_jax.sampling.params import SamplingParams
from gtpo_jax.sampling.scheduler import DecodeInputs


class Chunk(NamedTuple):
  """The tokens of one chunk, replicated on every device.

  The position in the chunk is the first axis, so that each step writes one contiguous row.
  """

  tokens: jax.Array  # i32[c, s]
  mask: jax.Array  # bool[c, s], True on generated tokens
  log_probs: jax.Array  # f32[c, s], nats, under the policy, see `SampledToken`
  entropy: jax.Array  # f32[c, s], nats, of the policy
  drawn_log_probs: jax.Array  # f32[c, s], nats, after penalty and filters
  plain_log_probs: jax.Array  # f32[c, s], nats, at temperature 1
  stopped: jax.Array  # bool[s], True if a stop token was sampled


class _LoopState(NamedTuple):
  """The state that changes from token to token within a chunk."""

  step: jax.Array  # i32[], tokens decoded in this chunk
  active: jax.Array  # bool[s]
  hidden: jax.Array  # [s, 1, 1, d], the states that predict the next token
  seen_tokens: jax.Array | None  # bool[s, v]
  kv: list[KV]  # per layer, [s, 1, k, ...] with the c positions of the chunk
  out: Chunk


def prefill_prompts(
  model: Qwen2,
  params: DecodeParams,
  prompt_cache: PromptCache,
  prompts: Prompts,
  entries: jax.Array,
) -> PromptCache:
  """Prefills `prompts` [b, p] into the prompt cache.

  Each prompt is computed once, and only the hidden state of its last position is kept. `entries` is
  described in `insert_prompts`.
  """
  hidden, kv = prefill(model, params, prompts)
  seen_tokens = None
  if prompt_cache.seen_tokens is not None:
    rows = jnp.arange(len(prompts.lengths))[:, None]
    vocab = model.config.vocab_size
    tokens = jnp.where(
      prompts.mask, prompts.tokens, vocab
    )  # padding is out of range, so it is dropped
    seen_tokens = jnp.zeros((len(prompts.lengths), vocab), bool)
    seen_tokens = seen_tokens.at[rows, tokens].set(True, mode="drop")
  return insert_prompts(model, prompt_cache, kv, hidden, seen_tokens, entries)


def decode_chunk(
  model: Qwen2,
  params: DecodeParams,
  prompt_cache: PromptCache,
  slots: SlotCache,
  inputs: DecodeInputs,
  stop: jax.Array,
  max_steps: jax.Array,
  max_finished: jax.Array,
  *,
  sampling_params: SamplingParams,
  chunk: int,
  attention: str,
  vocab_limit: int | None = None,
) -> tuple[SlotCache, Chunk]:
  """Samples up to `chunk` tokens in every active slot without returning to the host.

  Token i of a completion is drawn with `fold_in(key, i)` of the completion's key, so a completion
  depends only on its key and its prompt.

  Args:
    model: the architecture.
    params: the policy's parameters in sampling layout.
    prompt_cache: the prefilled prompts.
    slots: the completions generated so far.
    inputs: the inputs of every slot and entry.
    stop: i32[number of stop tokens], token ids that end a completion. The stop token itself is
      sampled, has a log-prob and is included in the mask.
    max_steps: i32[] <= chunk; the chunk ends after this many tokens.
    max_finished: i32[]; the chunk ends once this many slots have finished in it.
    sampling_params: temperature and filters.
    chunk: number of positions allocated for the chunk's keys and values.
    attention: "xla", "pallas" or "triton", see `EngineConfig`.
    vocab_limit: only token ids below this are sampled; None for the full vocabulary.

  Returns:
    The slots' caches with the chunk appended, and the chunk's tokens.
  """
  decode_attention = _decode_attention(model, prompt_cache, slots, inputs, attention)
  keys = jax.random.wrap_key_data(inputs.keys)

  def keep_going(state: _LoopState) -> jax.Array:
    finished = (inputs.active & ~state.active).sum()
    return (state.step < max_steps) & state.active.any() & (finished < max_finished)

  def decode_token(state: _LoopState) -> _LoopState:
    index = inputs.generated + state.step
    logits = _limit_vocab(next_logits(model, params, state.hidden[:, 0, 0]), vocab_limit)
    token_keys = jax.vmap(jax.random.fold_in)(keys, index)
    sampled = sample_token(sampling_params, logits, token_keys, state.seen_tokens)
    stopped = state.active & jnp.isin(sampled.token, stop)
    hidden, kv = decode_step(
      model,
      params,
      sampled.token[:, None],
      (inputs.prompt_lengths + index)[:, None],
      decode_attention.at_step(state.kv, state.step),
    )
    seen_tokens = state.seen_tokens
    if seen_tokens is not None:
      seen_tokens = seen_tokens.at[jnp.arange(len(stopped)), sampled.token].set(True)
    return _LoopState(
      step=state.step + 1,
      active=state.active & ~stopped & (index + 1 < inputs.max_tokens),
      hidden=hidden,
      seen_tokens=seen_tokens,
      kv=kv,
      out=_record(state, sampled, stopped),
    )

  start = _initial_state(model, prompt_cache, slots, inputs, chunk)
  end = jax.lax.while_loop(keep_going, decode_token, start)
  kv = append_chunk(model, slots.kv, end.kv, inputs.generated)
  replicated = jax.tree.map(lambda x: constrain(x, model.mesh), end.out)
  return SlotCache(kv, end.hidden, end.seen_tokens), replicated


def _decode_attention(
  model: Qwen2, prompt_cache: PromptCache, slots: SlotCache, inputs: DecodeInputs, kernel: str
) -> DecodeAttention:
  p = prompt_cache.kv[0].v.shape[3]
  prompt_mask = jnp.arange(p) >= p - inputs.entry_lengths[:, None]
  return DecodeAttention(
    model,
    prompt_cache.kv,
    slots.kv,
    inputs.table_index,
    inputs.slot_table,
    prompt_mask[:, None, None],
    jnp.asarray(inputs.generated),
    kernel,
  )


def _initial_state(
  model: Qwen2, prompt_cache: PromptCache, slots: SlotCache, inputs: DecodeInputs, chunk: int
) -> _LoopState:
  """Returns the state before the first token. A new completion starts from its prompt's state."""
  entry = inputs.table_index // inputs.slot_table.shape[1]

  def start_from(prompt: jax.Array, slot: jax.Array) -> jax.Array:
    is_new = inputs.is_new.reshape(-1, *[1] * (slot.ndim - 1))
    return jnp.where(is_new, gather_rows(model, prompt, entry), slot)

  hidden = start_from(prompt_cache.hidden, slots.hidden)
  seen_tokens = slots.seen_tokens
  if seen_tokens is not None:
    seen_tokens = start_from(prompt_cache.seen_tokens, seen_tokens)
  kv = [
    KV(
      jnp.zeros((*past.k.shape[:4], chunk), hidden.dtype),
      jnp.zeros((*past.v.shape[:3], chunk, model.config.head_dim), hidden.dtype),
    )
    for past in slots.kv
  ]
  s = len(inputs.active)
  zeros = lambda dtype: jnp.zeros((chunk, s), dtype)
  out = Chunk(
    tokens=zeros(jnp.int32),
    mask=zeros(bool),
    log_probs=zeros(jnp.float32),
    entropy=zeros(jnp.float32),
    drawn_log_probs=zeros(jnp.float32),
    plain_log_probs=zeros(jnp.float32),
    stopped=jnp.zeros(s, bool),
  )
  return _LoopState(jnp.int32(0), jnp.asarray(inputs.active), hidden, seen_tokens, kv, out)


def _record(state: _LoopState, sampled: SampledToken, stopped: jax.Array) -> Chunk:
  """Returns the chunk with one step's tokens of the active slots written to it."""

  def write(rows: jax.Array, row: jax.Array) -> jax.Array:
    return rows.at[state.step].set(jnp.where(state.active, row, jnp.zeros_like(row)))

  out = state.out
  return Chunk(
    tokens=write(out.tokens, sampled.token),
    mask=write(out.mask, state.active),
    log_probs=write(out.log_probs, sampled.log_prob),
    entropy=write(out.entropy, sampled.entropy),
    drawn_log_probs=write(out.drawn_log_probs, sampled.drawn_log_prob),
    plain_log_probs=write(out.plain_log_probs, sampled.plain_log_prob),
    stopped=out.stopped | stopped,
  )


def _limit_vocab(logits: jax.Array, vocab_limit: int | None) -> jax.Array:
  """Masks the logits f32[..., v] of token ids that are not below `vocab_limit`."""
  vocab = logits.shape[-1]
  if vocab_limit in (None, vocab):
    return logits
  return jnp.where(jnp.arange(vocab) < vocab_limit, logits, MASKED)
