"""Sampling for its callers: prompts as lists of token ids in, completions out as they end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gtpo_jax.arrays import Prompts, Rollouts
from gtpo_jax.models.lora import merge_lora, without_lora
from gtpo_jax.models.qwen2 import DecodeParams, Params, Qwen2, sampling_layout
from gtpo_jax.runtime.errors import UserError
from gtpo_jax.runtime.mesh import batch_shards, sampling_mesh
from gtpo_jax.sampling.cache import PromptCache, SlotCache, abstract, empty, fewer, longer
from gtpo_jax.sampling.decode import Chunk, decode_chunk, read_prompts
from gtpo_jax.sampling.filters import SamplingParams
from gtpo_jax.sampling.ragged import LANES
from gtpo_jax.sampling.slots import EngineConfig, Room, Schedule, room

PREFILL_TOKENS = 8192  # prompt tokens that one shard reads at once
CHOSEN = EngineConfig()  # all of them by the machine
LEAST = 64  # the shortest length that arrays are made for; others double it


@dataclasses.dataclass(frozen=True)
class CompletionBuffer:
  """Completions of one call on the host, while they are written: arrays that fill up, [n, g, t] or [n, g]."""

  tokens: np.ndarray  # i32[n, g, t]; the padding id where nothing is written
  mask: np.ndarray  # bool[n, g, t]
  log_probs: np.ndarray  # f32[n, g, t], nats, as `Rollouts`
  entropy: np.ndarray  # f32[n, g, t], nats, as `Rollouts`
  drawn_log_probs: (
    np.ndarray
  )  # f32[n, g, t], nats, of the distribution that was drawn from: penalty and filters applied
  plain_log_probs: np.ndarray  # f32[n, g, t], nats, at temperature 1
  finished: np.ndarray  # bool[n, g], ended with a stop token

  @classmethod
  def blank(cls, n: int, g: int, t: int, pad: int) -> CompletionBuffer:
    """A sheet with nothing written."""
    number = lambda: np.zeros((n, g, t), np.float32)
    return cls(
      np.full((n, g, t), pad, np.int32),
      np.zeros((n, g, t), bool),
      number(),
      number(),
      number(),
      number(),
      np.zeros((n, g), bool),
    )

  def write(self, which: np.ndarray, start: np.ndarray, chunk: Chunk) -> None:
    """Enters what a chunk wrote in the slots of completions `which` i32[s, 2], from token `start` i32[s] on."""
    step, slot = np.nonzero(chunk.mask)
    place = (*which[slot].T, start[slot] + step)
    self.mask[place] = True
    for field in ("tokens", "log_probs", "entropy", "drawn_log_probs", "plain_log_probs"):
      getattr(self, field)[place] = getattr(chunk, field)[step, slot]
    self.finished[tuple(which[chunk.stopped].T)] = True


def pad_prompts(ids: Sequence[Sequence[int]], width: int, pad: int) -> Prompts:
  """Host prompts to left-padded arrays [n, width].

  Raises:
    UserError: a prompt is empty or longer than `width`.
  """
  tokens = np.full((len(ids), width), pad, np.int32)
  for row, prompt in zip(tokens, ids, strict=True):
    if not len(prompt):
      raise UserError("a prompt is empty; give at least one token")
    if len(prompt) > width:
      raise UserError(
        f"a prompt has {len(prompt)} tokens, over the limit of {width}; raise data.max_prompt_tokens or shorten it"
      )
    row[-len(prompt) :] = prompt
  return Prompts(tokens, np.asarray([len(prompt) for prompt in ids], np.int32))


def lengths(most: int) -> list[int]:
  """The lengths that arrays for up to `most` positions are made of: few, so that few programs are compiled."""
  sizes = [LEAST]
  while sizes[-1] < most:
    sizes.append(2 * sizes[-1])
  return [size for size in sizes if 4 * size <= 3 * most] + [most]


class Engine:
  """Compiled sampling for one model on one mesh: continuous batching over a fixed number of slots.

  Each prompt is read once, and its keys and values are kept once for its whole group. A chunk of tokens is decoded in every slot without
  the host; between chunks finished slots take the next completions. Keys and values take the room that the longest of the running
  completions needs, and when nothing waits any more, slots that have run dry are given up. All shapes come from a small fixed set.
  """

  def __init__(
    self,
    model: Qwen2,
    stop: Sequence[int],
    pad: int,
    max_prompt_tokens: int,
    max_tokens: int,
    words: int | None = None,
    engine_config: EngineConfig = CHOSEN,
  ):
    c = model.config
    self.model = Qwen2(without_lora(model).config, sampling_mesh(model.mesh, c.kv_heads, c.mlp))
    self.pad = pad
    self.max_prompt_tokens = max_prompt_tokens
    self.max_tokens = max_tokens
    self._stop = np.asarray(sorted(stop), np.int32)
    self._shards = batch_shards(self.model.mesh)
    self.engine_config = engine_config.on(model.mesh.devices.flat[0].platform, self._shards)
    self._most = self.engine_config.slots
    self._chunk = min(self.engine_config.chunk, max_tokens)
    if self.engine_config.attention == "triton" and (
      c.head_dim < 16 or c.head_dim & (c.head_dim - 1)
    ):
      raise UserError(
        f"sampling.attention = 'triton' needs heads whose width is a power of two from 16, not {c.head_dim}; set it to 'xla'"
      )
    multiple = 1 if self.engine_config.attention == "xla" else LANES
    self._widths = sorted(
      {-(-(size + self._chunk) // multiple) * multiple for size in lengths(max_tokens)}
    )
    self._kv_dtype = engine_config.kv_dtype or c.compute_dtype
    self._layout = jax.jit(lambda params: sampling_layout(self.model, merge_lora(model, params)))
    self._empty = jax.jit(functools.partial(empty, self.model), static_argnums=(0, 1, 2, 3))
    self._read = jax.jit(functools.partial(read_prompts, self.model), donate_argnums=1)
    decode = functools.partial(
      decode_chunk,
      self.model,
      chunk=self._chunk,
      attention=self.engine_config.attention,
      words=words,
    )
    self._decode = jax.jit(decode, static_argnames="sampling_params", donate_argnums=2)
    self._longer = jax.jit(functools.partial(longer, self.model), static_argnums=1)
    self._fewer = jax.jit(functools.partial(fewer, self.model))
    self._keys = jax.jit(
      lambda key, n, g: jax.random.key_data(completion_keys(key, n, g)), static_argnums=(1, 2)
    )

  def described(self) -> str:
    """How it samples on this machine, in words."""
    engine_config = self.engine_config
    return (
      f"{engine_config.slots} completions at once in chunks of {self._chunk} tokens, keys and values as {self._kv_dtype}, "
      f"attention by {engine_config.attention} on {self.model.mesh.devices.flat[0].platform}"
    )

  def layout(self, params: Params) -> DecodeParams:
    """The parameters as sampling wants them, adapters merged; make it once and sample many batches from it."""
    return self._layout(params)

  def sample(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    group: int,
    sampling_params: SamplingParams,
  ) -> Rollouts:
    """Samples `group` completions of each prompt; see `generate`.

    Returns:
      Rollouts [n, group, max_tokens] in host arrays.
    """
    *_, (buffer, _) = self.generate(
      params, prompts, key, group=group, sampling_params=sampling_params
    )
    return self.rollouts(buffer, prompts)

  def rollouts(self, buffer: CompletionBuffer, prompts: Sequence[Sequence[int]]) -> Rollouts:
    """What a sheet holds of its prompts, in host arrays."""
    return Rollouts(
      pad_prompts(prompts, self.max_prompt_tokens, self.pad),
      buffer.tokens,
      buffer.mask,
      buffer.log_probs,
      buffer.entropy,
      buffer.finished,
    )

  def generate(
    self,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    group: int,
    sampling_params: SamplingParams,
    every: int | None = None,
    token_limits: np.ndarray | None = None,
  ) -> Iterator[tuple[CompletionBuffer, list[tuple[int, int]]]]:
    """Samples `group` completions of each prompt, and shows them as they are written.

    Completion (i, j) is drawn with `fold_in(fold_in(key, i), j)`: it depends on the key, the prompt's place and its own number, not on
    slots, mesh or the completions beside it. It may have `max_tokens`, or what the model's context leaves behind the prompt.

    Args:
      params: from `layout`.
      prompts: token ids, n lists.
      key: typed PRNG key.
      group: completions of each prompt.
      sampler: how tokens are drawn.
      every: looks after so many tokens, if that is sooner than the engine's own chunk.
      token_limits: i32[n, group] >= 1, the most tokens that each completion may have; None for `max_tokens`.

    Yields:
      The sheet, always the same object, after each chunk (once, blank, before the first), and the (prompt, number) that have ended since.

    Raises:
      UserError: a prompt is empty, over `max_prompt_tokens` or over the model's context.
    """
    pad_prompts(prompts, self.max_prompt_tokens, self.pad)
    context = self.model.config.longest
    have = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if max(have, default=0) > context:
      raise UserError(
        f"a prompt has {max(have)} tokens, over the model's context of {context}; shorten it"
      )
    token_limits = (
      np.full((len(prompts), group), self.max_tokens, np.int32)
      if token_limits is None
      else token_limits.astype(np.int32)
    )
    token_limits = np.minimum(token_limits, np.minimum(self.max_tokens, context - have)[:, None])
    buffer = CompletionBuffer.blank(len(prompts), group, self.max_tokens, self.pad)
    yield buffer, [(i, j) for i, j in np.argwhere(token_limits == 0).tolist()]
    if not token_limits.any():
      return
    keys = np.asarray(self._keys(key, len(prompts), group))
    schedule = Schedule(
      room(len(prompts), group, self._shards, self._most), have, token_limits, keys
    )
    width = next(size for size in lengths(self.max_prompt_tokens) if size >= max(have))
    until = np.int32(min(every or self._chunk, self._chunk))
    prompt_cache = self._seats(schedule.room, width, sampling_params)
    slots = None
    reads = _reads(schedule.room, width)
    while True:
      while any(seated := schedule.fill(reads)):
        prompt_cache = self._read(
          params,
          prompt_cache,
          *_padded(seated, prompts, reads, width, schedule.room.prompt_cache, self.pad),
        )
      if not schedule.live.any():
        return
      slots = self._fitted(slots, schedule, sampling_params)
      control = schedule.control()
      busy = int(schedule.live.sum())
      spare = np.int32(max(busy // 8, 1) if schedule.waiting else busy)
      slots, chunk = self._decode(
        params,
        prompt_cache,
        slots,
        control,
        self._stop,
        sampling_params=sampling_params,
        until=until,
        spare=spare,
      )
      chunk = jax.device_get(chunk)
      which = schedule.completion.copy()
      written = chunk.mask.sum(0)
      buffer.write(which, control.written, chunk)
      ended = control.live & (chunk.stopped | (control.written + written >= control.limit))
      schedule.advance(written, ended)
      yield buffer, [(i, j) for i, j in which[ended].tolist()]

  def _fitted(
    self, slots: SlotCache | None, schedule: Schedule, sampling_params: SamplingParams
  ) -> SlotCache:
    """The slots with room for the next chunk: new ones, or the same made longer; a quarter of them where no more are needed."""
    need = int(schedule.written.max()) + self._chunk
    if slots is None:
      return self._slots(schedule.room, self._widths[0], sampling_params)
    while (have := slots.kv[0].v.shape[3]) < need:
      slots = self._longer(slots, self._widths[self._widths.index(have) + 1])
    busy = 0 if schedule.waiting else int(schedule.live.reshape(self._shards, -1).sum(1).max())
    while busy and 4 * busy <= schedule.room.slots:
      slots = self._fewer(slots, schedule.shrink(schedule.room.slots // 4))
    return slots

  def _slots(self, room: Room, width: int, sampling_params: SamplingParams) -> SlotCache:
    return SlotCache(
      *self._empty(room.shards * room.slots, width, self._kv_dtype, sampling_params.penalises)
    )

  def _seats(self, room: Room, width: int, sampling_params: SamplingParams) -> PromptCache:
    return PromptCache(
      *self._empty(
        room.shards * room.prompt_cache, width, self._kv_dtype, sampling_params.penalises
      )
    )

  def warm_up(
    self, params: DecodeParams, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> None:
    """Compiles every program that sampling `prompts` x `group` completions may need, so that none is compiled later."""
    limit = min(self.max_prompt_tokens, self.model.config.longest)
    for width in lengths(limit):
      place = room(prompts, group, self._shards, self._most)
      reads = _reads(place, width)
      prompt_cache = self._read(
        params,
        self._seats(place, width, sampling_params),
        *_padded([[] for _ in range(place.shards)], [], reads, width, place.prompt_cache, self.pad),
      )
      while True:
        schedule = _at_rest(place, group)
        slots = self._slots(place, self._widths[0], sampling_params)
        rest = schedule.control()
        less = place.slots // 4
        order = schedule.shrink(less) if less else None
        for wider in [*self._widths[1:], None]:
          slots, _ = self._decode(
            params,
            prompt_cache,
            slots,
            rest,
            self._stop,
            sampling_params=sampling_params,
            until=np.int32(0),
            spare=np.int32(1),
          )
          if less:
            self._fewer(slots, order)
          if wider:
            slots = self._longer(slots, wider)
        if not less:
          break
        place = place._replace(slots=less)
    jax.block_until_ready(slots)

  def caches(
    self, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> tuple[PromptCache, SlotCache]:
    """What sampling `prompts` x `group` completions keeps at its largest, as shapes and shardings."""
    place = room(prompts, group, self._shards, self._most)
    width = min(self.max_prompt_tokens, self.model.config.longest)
    make = lambda rows, length: abstract(
      self.model, self._shards * rows, length, self._kv_dtype, sampling_params.penalises
    )
    return PromptCache(*make(place.prompt_cache, width)), SlotCache(
      *make(place.slots, self._widths[-1])
    )

  def programs(
    self, params: Params, prompts: int, *, group: int, sampling_params: SamplingParams
  ) -> Iterator[tuple[str, jax.stages.Lowered, Any]]:
    """The programs of sampling `prompts` x `group` completions at their largest, for devices that need not be here.

    Yields:
      A name (layout, read, decode), the lowered program, and its arguments, all abstract but for what the host sends.
    """
    lowered = self._layout.lower(params)
    yield "layout", lowered, params
    shapes = jax.eval_shape(self._layout, params)
    shardings = lowered.compile().output_shardings
    laid = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings
    )
    prompt_cache, slots = self.caches(prompts, group=group, sampling_params=sampling_params)
    place = room(prompts, group, self._shards, self._most)
    width = prompt_cache.kv[0].v.shape[3]
    reads = _reads(place, width)
    padded = _padded(
      [[] for _ in range(self._shards)], [], reads, width, place.prompt_cache, self.pad
    )
    yield "read", self._read.lower(laid, prompt_cache, *padded), (laid, prompt_cache)
    rest = _at_rest(place, group).control()
    number = np.int32(1)
    decode = self._decode.lower(
      laid,
      prompt_cache,
      slots,
      rest,
      self._stop,
      sampling_params=sampling_params,
      until=number,
      spare=number,
    )
    yield "decode", decode, (laid, prompt_cache, slots)


def _reads(room: Room, width: int) -> int:
  """How many prompts of `width` tokens a shard reads at once."""
  return max(min(room.prompt_cache, PREFILL_TOKENS // width), 1)


def _at_rest(room: Room, group: int) -> Schedule:
  """A schedule with nothing to do."""
  return Schedule(
    room, np.ones(1, np.int32), np.zeros((1, group), np.int32), np.zeros((1, group, 2), np.uint32)
  )


def _padded(
  seated: list[list[tuple[int, int]]],
  prompts: Sequence[Sequence[int]],
  reads: int,
  width: int,
  prompt_cache: int,
  pad: int,
) -> tuple[Prompts, np.ndarray]:
  """The prompts that take seats, `reads` rows a shard, and their seats i32[shards, reads]; rows that are not needed get none."""
  rows = [row for shard in seated for row in shard + [(prompt_cache, -1)] * (reads - len(shard))]
  ids = [prompts[prompt] if prompt >= 0 else [pad] for _, prompt in rows]
  return pad_prompts(ids, width, pad), np.asarray([seat for seat, _ in rows], np.int32).reshape(
    len(seated), reads
  )


def completion_keys(key: jax.Array, n: int, g: int) -> jax.Array:
  """Keys [n, g]: the step's key folded with the prompt's number, then with the completion's."""
  rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
  return jax.vmap(lambda row: jax.vmap(lambda j: jax.random.fold_in(row, j))(jnp.arange(g)))(rows)
