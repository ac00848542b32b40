"""Sampling on the devices: prefills prompts, and decodes a chunk of tokens in every slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gtpo_jax.arrays import Prompts
from gtpo_jax.models.attention.sources import KV, MASKED
from gtpo_jax.models.attention.streams import ropes_at
from gtpo_jax.models.decode import DecodeParams, Prefilled, decode_step, next_logits, prefill
from gtpo_jax.models.experts.routing import RouteShape
from gtpo_jax.models.transformer import Transformer
from gtpo_jax.runtime.mesh import constrain
from gtpo_jax.sampling.cache import Cache, States, constrain_kv, gather_rows, take_rows
from gtpo_jax.sampling.filters import (
  ALTERNATIVES,
  Alternatives,
  RowSampling,
  SampledToken,
  Temperature,
  sample_rows,
  sample_token,
)
from gtpo_jax.sampling.schedule.slots import DecodeInputs
from gtpo_jax.sampling.settings import SamplingParams


class Chunk(NamedTuple):
  """The tokens of one chunk, replicated on every device.

  The position in the chunk is the first axis: each step writes one contiguous row.
  """

  tokens: jax.Array  # i32[c, s]
  mask: jax.Array  # bool[c, s], True on generated tokens
  log_probs: jax.Array  # f32[c, s], nats, under the policy, see `SampledToken`
  entropy: jax.Array  # f32[c, s], nats, of the policy
  drawn_log_probs: jax.Array  # f32[c, s], nats, after penalty and filters
  plain_log_probs: jax.Array  # f32[c, s], nats, at temperature 1
  stopped: jax.Array  # bool[s], True if a stop token was sampled
  # [c, s, k], if each row is drawn in its own way; otherwise None
  alternatives: Alternatives | None = None
  # [c, s, layers with experts, k], the experts that computed each token as an input, as in
  # `Rollouts`; None without experts
  routes: jax.Array | None = None


class Decoder(NamedTuple):
  """What all chunks have in common."""

  model: Transformer
  cache: Cache  # the device functions of the cache
  chunk: int  # number of positions allocated for a chunk's keys and values
  vocab_limit: int | None  # only token ids below this are sampled; None for the full vocabulary


class ChunkLimits(NamedTuple):
  """What ends completions and a chunk, and how random its tokens are."""

  # i32[number of stop tokens], token ids that end a completion. The stop token itself is sampled,
  # has a log-prob and is included in the mask.
  stop: Any
  max_steps: Any  # i32[], at most `Decoder.chunk`; the chunk ends after this many tokens
  max_finished: Any  # i32[]; the chunk ends once this many slots have finished in it
  # f32[]; 0 takes the most probable token. None for the static `sampling_params`'. A
  # `RowSampling` if each row is drawn in its own way
  temperature: Any


class _LoopState(NamedTuple):
  """The state that changes from token to token within a chunk."""

  step: jax.Array  # i32[], tokens decoded in this chunk
  active: jax.Array  # bool[s]
  slots: States  # an inactive slot's mean nothing, except for `delta`
  kv: list[Any]  # per layer, the chunk's keys and values, see `Cache.zero_chunk`
  out: _Record


class _Record(NamedTuple):
  """The tokens of a chunk so far, in few arrays: each takes a launch per token on a GPU.

  What is beyond a slot's last token means nothing.
  """

  # i32[c, 5, s], the tokens, and the bits of the fields `NUMBERS` of `Chunk`
  values: jax.Array
  lengths: jax.Array  # i32[s], tokens in each slot
  stopped: jax.Array  # bool[s]
  alternatives: Alternatives | None
  routes: jax.Array | None

  def chunk(self) -> Chunk:
    """Returns the chunk."""
    mask = jnp.arange(len(self.values))[:, None] < self.lengths
    clear = lambda x: jnp.where(_expand(mask, x), x, jnp.zeros_like(x))
    tokens, *numbers = map(clear, jnp.unstack(self.values, axis=1))
    floats = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in numbers]
    alternatives = jax.tree.map(clear, self.alternatives)
    return Chunk(tokens, mask, *floats, self.stopped, alternatives, self.routes)


NUMBERS = ("log_probs", "entropy", "drawn_log_probs", "plain_log_probs")  # in this order


def read_rows(
  model: Transformer,
  insert: Callable[[Any, list[KV], Any], Any],
  params: DecodeParams,
  kv: Any,
  states: States,
  tokens: Prompts,
  source: jax.Array,
  places: Any,
) -> tuple[Any, States, jax.Array | None]:
  """Reads sequences into a part of the cache: `prefill_rows`, then `insert_rows`.

  Returns:
    The keys and values, the states, and `Prefilled.routes` on every device.
  """
  new = prefill_rows(model, params, tokens)
  kv, states = insert_rows(model, insert, kv, states, new, tokens, source, places)
  return kv, states, new.routes


def prefill_rows(model: Transformer, params: DecodeParams, tokens: Prompts) -> Prefilled:
  """Computes sequences [b, p], padded on the left: prompts, or prompts with completions."""
  hidden, layers, delta, routes = prefill(model, params, tokens)
  hidden = constrain(hidden, model.mesh, "batch")
  return Prefilled(
    hidden,
    [constrain_kv(model, kv) for kv in layers],
    States(hidden, None, delta).constrained(model).delta,
    jax.tree.map(lambda x: constrain(x, model.mesh), routes),
  )


def insert_rows(
  model: Transformer,
  insert: Callable[[Any, list[KV], Any], Any],
  kv: Any,
  states: States,
  new: Prefilled,
  tokens: Prompts,
  source: jax.Array,
  places: Any,
) -> tuple[Any, States]:
  """Writes sequences into a part of the cache; only the hidden state of the last position is kept.

  Args:
    model: the architecture.
    insert: `Cache.insert` or `Cache.insert_completions`.
    kv: the keys and values of that part.
    states: of the cached prompts, or of the slots.
    new: the sequences.
    tokens: [b, p], what they consist of.
    source: i32[shards, rows of a shard], the sequence of its shard that each row of `states` gets;
      below 0, a row stays.
    places: where the cache puts the keys and values, see `insert`.
  """
  seen_tokens = None
  if states.seen_tokens is not None:
    vocab = model.config.vocab_size
    # Padding gets an index that is out of range, so it is dropped.
    ids = jnp.where(tokens.mask, tokens.tokens, vocab)
    seen_tokens = jnp.zeros((len(ids), vocab), bool)
    seen_tokens = seen_tokens.at[jnp.arange(len(ids))[:, None], ids].set(True, mode="drop")
  set_states = lambda old, new: take_rows(model, old, new, source.reshape(-1))
  states = jax.tree.map(set_states, states, States(new.hidden, seen_tokens, new.delta))
  return insert(kv, new.layers, places), states.constrained(model)


def decode_chunk(
  decoder: Decoder,
  params: DecodeParams,
  kv: Any,
  prompts: States,
  slots: States,
  inputs: DecodeInputs,
  limits: ChunkLimits,
  *,
  sampling_params: SamplingParams | None,
) -> tuple[Any, States, Chunk]:
  """Samples up to `decoder.chunk` tokens in every active slot without returning to the host.

  Token i of a completion is drawn with `fold_in(key, i)` of the completion's key, so a completion
  depends only on its key and its prompt.

  Args:
    decoder: the architecture and its cache.
    params: the policy's parameters in sampling layout.
    kv: the cache's keys and values.
    prompts: the states of the cached prompts.
    slots: the states of the slots.
    inputs: the inputs of every slot.
    limits: what ends completions and the chunk.
    sampling_params: how tokens are drawn; None if `limits` has a `RowSampling`.

  Returns:
    The keys and values with the chunk appended, the slots' states, and the chunk's tokens. The
    state of a slot that is not active does not change.
  """
  model, cache, _, vocab_limit = decoder
  temperature = limits.temperature
  by_row = isinstance(temperature, RowSampling)
  if temperature is None:
    temperature = sampling_params.temperature
  if not by_row:
    temperature = Temperature.of(temperature)
  index = jnp.asarray(inputs.generated) + jnp.arange(decoder.chunk)[:, None]
  fold_in = jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))
  keys = fold_in(jax.random.wrap_key_data(inputs.keys), index)  # [c, s]
  # Of all positions, before the loop: a CPU would compute them in each layer and for each head.
  first = jnp.asarray(inputs.prompt_lengths + inputs.generated)
  ropes = ropes_at(first[:, None, None] + jnp.arange(decoder.chunk), model.config)
  attend = cache.attention(kv, inputs.tables, jnp.asarray(inputs.generated), ropes)

  def keep_going(state: _LoopState) -> jax.Array:
    finished = (inputs.active & ~state.active).sum()
    return (state.step < limits.max_steps) & state.active.any() & (finished < limits.max_finished)

  def decode_token(state: _LoopState) -> _LoopState:
    slots = state.slots
    logits = _limit_vocab(next_logits(model, params, slots.hidden[:, 0, 0]), vocab_limit)
    token_keys = keys[state.step]
    others = None
    if by_row:
      sampled, others = sample_rows(temperature, logits, token_keys)
    else:
      sampled = sample_token(sampling_params, temperature, logits, token_keys, slots.seen_tokens)
    stopped = state.active & jnp.isin(sampled.token, limits.stop)
    hidden, kv, delta, routes = decode_step(
      model,
      params,
      sampled.token[:, None],
      lambda layer, q, new: attend(layer, q, new, state.kv[layer], state.step),
      slots.delta,
    )
    # These replace the earlier states, which are too large to be copied for inactive slots.
    keep_old = lambda new, old: jnp.where(_expand(state.active, new), new, old)
    delta = jax.tree.map(keep_old, delta, slots.delta)
    seen_tokens = slots.seen_tokens
    if seen_tokens is not None:
      seen_tokens = seen_tokens.at[jnp.arange(len(stopped)), sampled.token].set(True)
    return _LoopState(
      step=state.step + 1,
      active=state.active & ~stopped & (inputs.generated + state.step + 1 < inputs.max_tokens),
      slots=States(hidden, seen_tokens, delta).constrained(model),
      kv=kv,
      out=_record(state, sampled, stopped, others, routes),
    )

  start = _initial_state(decoder, prompts, slots, inputs, by_row)
  end = jax.lax.while_loop(keep_going, decode_token, start)
  kv = cache.append(kv, end.kv, inputs.tables, jnp.asarray(inputs.generated))
  keep = lambda new, old: jnp.where(_expand(inputs.active, new), new, old)
  before = slots._replace(delta=end.slots.delta)  # which inactive slots have kept
  slots = jax.tree.map(keep, end.slots, before).constrained(model)
  return kv, slots, jax.tree.map(lambda x: constrain(x, model.mesh), end.out.chunk())


def _initial_state(
  decoder: Decoder, prompts: States, slots: States, inputs: DecodeInputs, by_row: bool
) -> _LoopState:
  """Returns the state before the first token. A new completion starts from its prompt's state."""
  model, cache, chunk, _ = decoder

  def start_from(prompt: jax.Array, slot: jax.Array) -> jax.Array:
    return jnp.where(_expand(inputs.is_new, slot), gather_rows(model, prompt, inputs.entries), slot)

  slots = jax.tree.map(start_from, prompts, slots).constrained(model)
  kv = cache.zero_chunk(len(inputs.active), chunk)
  s = len(inputs.active)
  k = min(ALTERNATIVES, model.config.vocab_size)
  zeros = lambda dtype, *shape: jnp.zeros((chunk, *shape), dtype)
  routes = RouteShape.of(model.config)
  out = _Record(
    values=zeros(jnp.int32, 1 + len(NUMBERS), s),
    lengths=jnp.zeros(s, jnp.int32),
    stopped=jnp.zeros(s, bool),
    alternatives=Alternatives(zeros(jnp.int32, s, k), zeros(jnp.float32, s, k)) if by_row else None,
    routes=routes and jnp.zeros_like(routes.like(chunk, s)),
  )
  return _LoopState(jnp.int32(0), jnp.asarray(inputs.active), slots, kv, out)


def _expand(mask: jax.Array, like: jax.Array) -> jax.Array:
  """Returns `mask` with the number of axes of `like`, whose first ones it has."""
  return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))


def _record(
  state: _LoopState,
  sampled: SampledToken,
  stopped: jax.Array,
  others: Alternatives | None,
  routes: jax.Array | None,
) -> _Record:
  """Returns the record with the tokens that the active slots sampled in this step."""

  out = state.out
  write = lambda rows, row: rows.at[state.step].set(row)
  numbers = (sampled.log_prob, sampled.entropy, sampled.drawn_log_prob, sampled.plain_log_prob)
  bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in numbers]
  return _Record(
    values=write(out.values, jnp.stack([sampled.token, *bits])),
    lengths=out.lengths + state.active,
    stopped=out.stopped | stopped,
    alternatives=jax.tree.map(write, out.alternatives, others),
    routes=None if routes is None else write(out.routes, routes[:, 0, 0]),
  )


def _limit_vocab(logits: jax.Array, vocab_limit: int | None) -> jax.Array:
  """Masks the logits f32[..., v] of token ids that are not below `vocab_limit`."""
  vocab = logits.shape[-1]
  if vocab_limit in (None, vocab):
    return logits
  return jnp.where(jnp.arange(vocab) < vocab_limit, logits, MASKED)
